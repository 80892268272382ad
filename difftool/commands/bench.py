"""difftool bench: accuracy, outliers and speed of checkpoints, side by side."""

import sys
from pathlib import Path
from typing import Any

import rich_click as click

from difftool import terminal


@click.command(name="bench", epilog="Example: difftool bench tiny --measures perplexity,outliers")
@click.argument("sources", metavar="SRC...", nargs=-1, required=True)
@click.option(
    "--measures",
    type=terminal.Words(),
    metavar="NAME,…",
    help="What to measure [default: all but tasks; tasks too where --tasks is given].",
)
@click.option("--text", type=click.Path(path_type=Path), metavar="FILE", help="Text to measure on.")
@click.option(
    "--tasks", type=terminal.Words(), metavar="NAME,…", help="Tasks of lm-evaluation-harness."
)
@click.option(
    "--tasks-dir",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    metavar="DIR",
    help="Folder of jsonl files or task YAMLs, for tasks offline.",
)
@click.option(
    "--limit",
    type=click.IntRange(min=1),
    metavar="N",
    help="Windows, documents or prompts in each measure at most.",
)
@click.option(
    "--seq-len",
    type=click.IntRange(min=2),
    metavar="N",
    default=512,
    show_default=True,
    help="Tokens in a window.",
)
@click.option(
    "--stride",
    type=click.IntRange(min=1),
    metavar="N",
    help="Tokens between windows of perplexity [default: half a window].",
)
@click.option(
    "--batch-size",
    type=click.IntRange(min=1),
    metavar="N",
    default=4,
    show_default=True,
    help="Windows at a time; changes no figure beyond rounding.",
)
@click.option(
    "--speed-batch-sizes",
    type=terminal.Numbers(),
    metavar="N,…",
    default="1,4",
    show_default=True,
    help="Batch sizes that are timed.",
)
@click.option(
    "--speed-contexts",
    type=terminal.Numbers(),
    metavar="N,…",
    default="128,512",
    show_default=True,
    help="Context lengths that are timed.",
)
@click.option(
    "--repetitions",
    type=click.IntRange(min=1),
    metavar="N",
    default=5,
    show_default=True,
    help="Of each timing, after a warm-up.",
)
@click.option("--compile", is_flag=True, help="Time under torch.compile.")
@click.option(
    "--dtype",
    type=click.Choice(terminal.FLOATS),
    metavar="DTYPE",
    help="float32, bfloat16 or float16 to compute in [default: as stored].",
)
@click.option("--device", metavar="NAME", help="cpu, cuda, cuda:1 [default: a GPU if there].")
@click.option("--seed", type=int, metavar="N", default=0, show_default=True, help="Of all draws.")
@click.option("--trust-remote-code", is_flag=True, help="Run code that lies in SRC or DIR.")
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Folder of the report [default: bench-NAME-vs-NAME here].",
)
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def command(sources: tuple[str, ...], output: Path | None, as_json: bool, **options: Any) -> None:
    """Measure one checkpoint, or several against the first.

    Perplexity, tasks, retrieval, outliers, accuracy at low bits, speed; a table here, and
    report.json, report.md and report.html in a folder. Exit status 1 if something could not be
    measured or a figure is not finite.
    """
    from difftool.bench.measures import default_measures
    from difftool.bench.options import parse_options
    from difftool.bench.run import bench, unique_names
    from difftool.bench.summary import print_summary

    tasks = options["tasks"] or ()
    asked = options.pop("measures") or default_measures()
    measures = (*asked, "tasks") if tasks and "tasks" not in asked else asked
    folder = output or Path("bench-" + "-vs-".join(unique_names(sources)))
    parsed = parse_options(**{**options, "measures": measures, "tasks": tasks})
    with terminal.progress_report() as progress:
        report = bench(sources, parsed, folder, progress)
    if as_json:
        terminal.print_json(report.model_dump(mode="json"))
    else:
        print_summary(report)
        terminal.print_text(f"report: {folder / 'report.html'}")
    for problem in report.problems:
        click.echo(f"Error: {problem}", err=True)
    if report.problems:
        sys.exit(1)
