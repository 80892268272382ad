"""The command line: `difftool COMMAND`, a command for each file of `difftool.commands`.

Nothing here or in those files imports torch before a command runs, so that help answers at once.
"""

import importlib
import pkgutil
import sys
from collections.abc import Sequence

import rich_click as click

from difftool import __version__, commands
from difftool.errors import UserError, did_you_mean


class CommandFolder(click.RichGroup):
    """A group whose commands are the modules of `difftool.commands`, imported when asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [module.name for module in pkgutil.iter_modules(commands.__path__)]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.list_commands(ctx):
            return None
        module = importlib.import_module(f"difftool.commands.{cmd_name}")
        command: click.Command = module.command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            hint = did_you_mean(args[0], self.list_commands(ctx))
            raise click.UsageError(error.message + hint, ctx) from error


@click.command(cls=CommandFolder, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="difftool")
def difftool() -> None:
    """Exact surgery on pretrained Hugging Face checkpoints.

    Turn a checkpoint into a Differential Transformer V2 or a network with Attention Residuals that
    starts as exactly the same function.

    Example: difftool convert tiny --to diffv2
    """


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command line; a `UserError` becomes one message on stderr and exit status 1."""
    try:
        difftool.main(args=arguments, prog_name="difftool")
    except UserError as error:
        click.echo(f"Error: {error}", err=True)
        sys.exit(1)
