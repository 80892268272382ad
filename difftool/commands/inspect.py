"""difftool inspect: what a checkpoint is, where it came from, what it can become."""

import rich_click as click

from difftool import terminal


@click.command(name="inspect", epilog="Example: difftool inspect tiny")
@click.argument("source", metavar="SRC")
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def command(source: str, as_json: bool) -> None:
    """Show architecture, geometry, parameters by part, provenance and verification.

    For a plain source, which targets it supports and why not the others. Reads headers only.
    """
    from difftool.inspection import inspect_source

    found = inspect_source(source)
    if as_json:
        terminal.print_json(found.as_dict())
        return
    click.echo(found.heading)
    click.echo(found.geometry_in_words)
    rows = [
        (part.name, terminal.format_count(part.parameters), terminal.format_bytes(part.nbytes))
        for part in found.parts
    ]
    terminal.print_table("", ("part", "parameters#", "bytes#"), rows)
    for target, reason in found.targets.items():
        click.echo(f"{target}: {reason or f'supported, difftool convert {source} --to {target}'}")
    for line in found.provenance_in_words:
        click.echo(line)
