"""difftool generate: stream text from a checkpoint."""

import sys
from typing import Any

import rich_click as click


@click.command(
    name="generate", epilog='Example: difftool generate tiny "import os" --max-new-tokens 32'
)
@click.argument("source", metavar="SRC")
@click.argument("prompt")
@click.option("--max-new-tokens", type=click.IntRange(min=1), default=64, show_default=True)
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16", "float16"]),
    help="To compute in [default: as stored].",
)
@click.option("--temperature", type=click.FloatRange(min=0), default=0.0, show_default=True)
@click.option("--seed", type=int, default=0, show_default=True, help="Of the sampling.")
@click.option("--trust-remote-code", is_flag=True, help="Run code that lies in SRC.")
def command(source: str, prompt: str, **options: Any) -> None:
    """Stream the continuation of PROMPT from any checkpoint, plain or converted.

    Greedy unless a temperature is given.
    """
    from difftool.generation import GenerateOptions, generate

    def write(text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    generate(source, prompt, GenerateOptions(**options), write)
    write("\n")
