"""difftool generate: stream text from a checkpoint."""

import sys
from typing import Any

import rich_click as click

from difftool import terminal


@click.command(
    name="generate", epilog='Example: difftool generate tiny "import os" --max-new-tokens 32'
)
@click.argument("source", metavar="SRC")
@click.argument("prompt")
@click.option(
    "--max-new-tokens",
    type=click.IntRange(min=1),
    metavar="N",
    default=64,
    show_default=True,
    help="Stop after so many, if the model has not.",
)
@click.option(
    "--dtype",
    type=click.Choice(terminal.FLOATS),
    metavar="DTYPE",
    help="float32, bfloat16 or float16 to compute in [default: as stored].",
)
@click.option(
    "--temperature",
    type=click.FloatRange(min=0),
    metavar="T",
    default=0.0,
    show_default=True,
    help="Sample at this temperature; 0 is greedy.",
)
@click.option("--seed", type=int, metavar="N", default=0, show_default=True, help="Of sampling.")
@click.option("--trust-remote-code", is_flag=True, help="Run code that lies in SRC.")
def command(source: str, prompt: str, **options: Any) -> None:
    """Stream what a checkpoint, plain or converted, writes after PROMPT."""
    from difftool.generation import GenerateOptions, generate

    def write(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    generate(source, prompt, GenerateOptions(**options), write)
    write("\n")
