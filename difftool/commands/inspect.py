"""difftool inspect: what a checkpoint is, where it came from, what it can become."""

import rich_click as click

from difftool import terminal


@click.command(name="inspect", epilog="Example: difftool inspect tiny")
@click.argument("source", metavar="SRC")
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def command(source: str, as_json: bool) -> None:
    """Show what a checkpoint is, its history and what it can become.

    Architecture, geometry, parameters by part; the steps that made it and how each was verified;
    the targets it supports and why not the others. Reads headers only.
    """
    from difftool.inspection import inspect_source

    found = inspect_source(source)
    if as_json:
        terminal.print_json(found.as_dict())
        return
    terminal.print_text(found.heading)
    terminal.print_text(found.geometry_in_words)
    rows = [
        (part.name, terminal.format_count(part.parameters), terminal.format_bytes(part.nbytes))
        for part in found.parts
    ]
    terminal.print_table(("part", "parameters#", "bytes#"), rows)
    for target, reason in found.targets.items():
        terminal.print_text(f"{target}: {reason or f'supported, convert with --to {target}'}")
    for line in found.provenance_in_words:
        terminal.print_text(line)
