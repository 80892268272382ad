"""difftool models: the aliases, and which of them are on this machine."""

import dataclasses

import rich_click as click

from difftool import terminal


@click.command(name="models", epilog="Example: difftool models --local")
@click.option("--local", is_flag=True, help="Only those on this machine.")
@click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
def command(local: bool, as_json: bool) -> None:
    """List the model aliases and say which are already on this machine."""
    from difftool.sources import ModelRow, list_models, open_source

    with open_source("tiny") as tiny:
        rows = [ModelRow("tiny", "", "3.8M", "llama", False, tiny.path), *list_models()]
    rows = [row for row in rows if row.local or not local]
    if as_json:
        terminal.print_json([dataclasses.asdict(row) for row in rows])
        return
    cells = [
        (
            row.alias,
            row.hub_id or "embedded in difftool",
            row.parameters,
            "here" if row.local else "gated" if row.gated else "",
        )
        for row in rows
    ]
    terminal.print_table(("alias", "hub id", "size#", "note"), cells)
