"""What commands share: parsing of sizes and settings, progress, tables, JSON."""

import json
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import rich_click as click
import yaml
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

FLOATS = ("float32", "bfloat16", "float16")
UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


class ByteSize(click.ParamType[int]):
    """A number of bytes: 5GB is 5·10⁹ as on the Hub, 5GiB is 5·2³⁰."""

    name = "SIZE"

    def convert(self, value: Any, param: Any, ctx: Any) -> int:
        if isinstance(value, int):
            return value
        match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", value.strip())
        unit = UNITS.get(match[2].upper()) if match else None
        size = int(float(match[1]) * unit) if match and unit else 0
        if size < 1:
            self.fail(f"{value!r} is not a size such as 5GB, 500MB or 2GiB", param, ctx)
        return size


class Setting(click.ParamType[tuple[str, Any]]):
    """`key=value`, the value read as YAML: a number, true, a word."""

    name = "KEY=VALUE"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[str, Any]:
        key, equals, text = value.partition("=")
        if not (equals and key):
            self.fail(f"{value!r} is not of the form key=value", param, ctx)
        try:
            return key, yaml.safe_load(text)
        except yaml.YAMLError:
            self.fail(f"the value of {value!r} is not a number or a word", param, ctx)


class Words(click.ParamType[tuple[str, ...]]):
    """Words between commas."""

    name = "NAME,…"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[str, ...]:
        if isinstance(value, tuple):
            return value
        words = tuple(word.strip() for word in value.split(","))
        if not all(words):
            self.fail(f"{value!r} has nothing between two commas", param, ctx)
        return words


class Numbers(click.ParamType[tuple[int, ...]]):
    """Positive whole numbers between commas."""

    name = "N,…"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[int, ...]:
        if isinstance(value, tuple):
            return value
        words = [word.strip() for word in value.split(",")]
        if not all(word.isascii() and word.isdigit() and int(word) for word in words):
            self.fail(f"{value!r} is not of the form 1,4,16", param, ctx)
        return tuple(int(word) for word in words)


def format_bytes(count: int) -> str:
    """Return a size in decimal units with three digits: 1.23 GB."""
    size = float(count)
    for unit in ("B", "kB", "MB", "GB"):
        if abs(size) < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.3g} {unit}"
        size /= 1000
    return f"{size:.3g} TB"


def format_count(count: int) -> str:
    """Return a number of parameters with three digits: 8.03 B."""
    for limit, unit in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if abs(count) >= limit:
            return f"{count / limit:.3g} {unit}"
    return str(count)


def print_json(value: Any) -> None:
    """Print a value to stdout as JSON."""
    click.echo(json.dumps(value, indent=2, ensure_ascii=False, default=str))


def print_text(text: str) -> None:
    """Print a line to stdout, folded between words; what is folded stands further in."""
    margin = len(text) - len(text.lstrip())
    width = Console(file=sys.stdout).width
    lines = textwrap.wrap(
        text,
        width,
        subsequent_indent=" " * (margin + 2),
        break_long_words=False,
        break_on_hyphens=False,
    )
    click.echo("\n".join(lines))


def print_table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> None:
    """Print a table to stdout; columns whose name ends in `#` hold numbers."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        right = column.endswith("#")
        table.add_column(column.rstrip("#"), justify="right" if right else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    Console(file=sys.stdout, soft_wrap=False, highlight=False).print(table)


@contextmanager
def progress_report() -> Iterator[Callable[[str, int, int], None]]:
    """Yield a function (what, done, total) that draws progress bars where stderr is a terminal."""
    columns = (TextColumn("{task.description:>10}"), BarColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        tasks: dict[str, TaskID] = {}

        def report(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = progress.add_task(what, total=None if total == 1 else total)
            progress.update(tasks[what], completed=done, total=total if done else None)

        yield report
