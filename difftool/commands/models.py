"""difftool models: the aliases, and which of them are on this machine."""

import dataclasses

import rich_click as click

from difftool import terminal


@click.command(name="models", epilog="Example: difftool models --local")
@click.option("--local", is_flag=True, help="Only those on this machine.")
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def command(local: bool, as_json: bool) -> None:
    """List the model aliases and say which are already on this machine."""
    from difftool.sources import list_models

    rows = [row for row in list_models() if row.local or not local]
    if as_json:
        terminal.print_json([dataclasses.asdict(row) for row in rows])
        return
    cells = [
        (
            row.alias,
            row.hub_id,
            row.parameters,
            row.family,
            "yes" if row.local else "gated" if row.gated else "",
        )
        for row in rows
    ]
    cells.insert(0, ("tiny", "embedded in difftool", "4M", "llama", "yes"))
    terminal.print_table("", ("alias", "hub id", "size#", "family", "here"), cells)
