"""difftool convert: surgery on a checkpoint, proved and published as a new folder."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

import rich_click as click

from difftool import terminal

if TYPE_CHECKING:
    from difftool.surgery.convert import Converted
    from difftool.surgery.plan import Plan


@click.command(name="convert", epilog="Example: difftool convert tiny --to diffv2")
@click.argument("source", metavar="SRC")
@click.option("--to", required=True, metavar="TARGET", help="diffv2 or attnres.")
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), help="New folder [default: ./NAME-TARGET]."
)
@click.option(
    "--set",
    "settings",
    type=terminal.Setting(),
    multiple=True,
    help="Target option: diffv2 start_gate, noise, seed; attnres blocks (or full), block_size.",
)
@click.option(
    "--dtype",
    type=click.Choice(terminal.FLOATS),
    metavar="DTYPE",
    help="float32, bfloat16 or float16 for the floating weights [default: as they are].",
)
@click.option(
    "--shard-size", type=terminal.ByteSize(), help="Repack into shards of this size, e.g. 5GB."
)
@click.option(
    "--link", is_flag=True, help="Hard-link files that do not change; writing to them reaches SRC."
)
@click.option("--dry-run", is_flag=True, help="Print what would be done; needs no weights.")
@click.option("--no-verify", is_flag=True, help="Do not compare the result with the source.")
@click.option(
    "--max-memory",
    type=terminal.ByteSize(),
    help="Memory for weights while verifying; the rest is read from disk.",
)
@click.option("--force", is_flag=True, help="Replace an existing output.")
@click.option("--trust-remote-code", is_flag=True, help="Run code that lies in SRC (tokenizers).")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
def command(
    source: str, output: Path | None, *, dry_run: bool, as_json: bool, **options: Any
) -> None:
    """Convert a checkpoint to a target, starting as the same function.

    SRC is a folder, a hub id, a .gguf file, an alias (see difftool models) or tiny. The result
    loads with plain transformers and trust_remote_code=True.
    """
    from difftool.sources import open_source
    from difftool.surgery.convert import ConvertOptions, convert, plan_source

    settings = dict(options.pop("settings"))
    verify = not options.pop("no_verify")
    asked = " ".join(f"--set {key}={value}" for key, value in settings.items())
    name = f"difftool convert {Path(source).name or source} --to {options['to']} {asked}".strip()
    chosen = ConvertOptions(settings=settings, verify=verify, command=name, **options)
    if dry_run:
        with open_source(source, dtype=chosen.dtype) as opened:
            _print_plan(plan_source(opened, chosen), as_json)
        return
    with terminal.progress_report() as report:
        result = convert(source, output, chosen, report=report)
    _print_result(result, as_json)


def _print_plan(plan: "Plan", as_json: bool) -> None:
    from difftool.surgery.summary import summarise

    summary = summarise(plan)
    if as_json:
        terminal.print_json(summary.as_dict())
        return
    terminal.print_text(
        f"{plan.host.architecture} → {plan.shim.architecture}, {plan.exactness_in_words}"
    )
    rows = [
        (
            change.what,
            f"{change.count}×",
            change.pattern.removeprefix(f"{plan.host.layer_prefix}*."),
            change.shapes,
            terminal.format_bytes(change.nbytes) if change.nbytes else "",
        )
        for change in summary.changes
    ]
    terminal.print_table(("", "#", "tensor", "shape", "bytes#"), rows)
    before, after = summary.bytes_before, summary.bytes_after
    terminal.print_text(
        f"weights {terminal.format_bytes(before)} → {terminal.format_bytes(after)}; "
        f"{summary.untouched} tensors untouched; nothing was written"
    )


def _print_result(result: "Converted", as_json: bool) -> None:
    if as_json:
        terminal.print_json(
            {
                "path": str(result.path),
                "source": result.source.model_dump(),
                "architecture": result.plan.shim.architecture,
                "targets": result.plan.targets,
                "exactness": result.plan.exactness,
                "files": result.ways,
                "verification": [comparison.as_dict() for comparison in result.comparisons],
                "unused_tensors": result.plan.unused,
                "seconds": round(result.seconds, 3),
            }
        )
        return
    for comparison in result.comparisons:
        greedy = "equal" if comparison.greedy_equal else "DIFFERENT"
        terminal.print_text(f"{comparison.dtype}: {comparison.verdict()}; greedy text {greedy}")
    if not result.comparisons:
        click.echo("not verified")
    if unused := result.plan.unused:
        more = ", …" if len(unused) > 3 else ""
        terminal.print_text(
            f"{len(unused)} tensors that transformers does not use are carried along: "
            f"{', '.join(unused[:3])}{more}"
        )
    terminal.print_text(f"{result.path}: {result.plan.shim.architecture} in {result.seconds:.1f} s")
