"""The summary: every headline figure of every checkpoint, and its ratio to the first one's.

A difference counts as better or worse where it exceeds two standard errors, those of the two
figures added in quadrature. Figures of one text or task list vary together, so that is cautious.
"""

import math
import sys
from dataclasses import dataclass
from typing import Literal

from rich.console import Console

from difftool.bench.report import Report, headline
from difftool.bench.result import Figure
from difftool.terminal import print_table

MISSING = "–"
ARROWS = {"lower": " ↓", "higher": " ↑", "": ""}
KEY = (
    "↓ lower is better, ↑ higher is better. × is the ratio to the first checkpoint; of timings, "
    "that of trials side by side."
)
NEGLIGIBLE = 0.005  # of the first checkpoint's figure, where there is no standard error


@dataclass(frozen=True)
class Cell:
    """One figure of one checkpoint, as text; `ratio` is "" for the first checkpoint."""

    value: str
    stderr: str
    ratio: str
    verdict: Literal["better", "worse", ""]
    finite: bool

    def __str__(self) -> str:
        error = f" ± {self.stderr}" if self.stderr else ""
        ratio = f" ×{self.ratio}" if self.ratio else ""
        return self.value + error + ratio


@dataclass(frozen=True)
class Line:
    """One figure of all checkpoints; None where one does not have it."""

    name: str
    better: Literal["lower", "higher", ""]
    cells: tuple[Cell | None, ...]


def summarise(report: Report) -> list[Line]:
    """Return all headline figures, in the order in which the checkpoints name them."""
    found = [headline(subject) for subject in report.subjects]
    names = dict.fromkeys(name for figures in found for name in figures)
    return [_line(name, [figures.get(name) for figures in found]) for name in names]


def summary_rows(report: Report) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Return the summary as columns and rows for `terminal.print_table`."""
    columns = ("", *(f"{subject.name}#" for subject in report.subjects))
    rows = [
        (
            line.name + ARROWS[line.better],
            *(MISSING if cell is None else str(cell) for cell in line.cells),
        )
        for line in summarise(report)
    ]
    return columns, rows


def print_summary(report: Report) -> None:
    """Print the summary to stdout, in as many tables as the terminal's width asks for."""
    columns, rows = summary_rows(report)
    if not rows:
        return
    widths = [max(len(row[place]) for row in rows) + 2 for place in range(len(columns))]
    room = Console(file=sys.stdout).width - widths[0]
    for group in _groups(widths[1:], room):
        places = (0, *(place + 1 for place in group))
        print_table(
            [columns[place] for place in places], [[row[place] for place in places] for row in rows]
        )
        print()


def format_number(value: float, digits: int) -> str:
    """Return a number with so many significant digits; whole numbers have no decimals."""
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else "∞" if value > 0 else "−∞"
    size = abs(value)
    if size != 0 and not 1e-4 <= size < 1e7:
        mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
        return f"{mantissa}e{int(exponent)}".replace("-", "−")
    whole = value == int(value)
    decimals = 0 if whole else max(0, digits - 1 - math.floor(math.log10(size)))
    return f"{value:,.{decimals}f}".replace("-", "−")


def _groups(widths: list[int], room: int) -> list[list[int]]:
    """Return indices in order, in groups whose widths fit into `room`; at least one in each."""
    groups: list[list[int]] = [[]]
    used = 0
    for index, width in enumerate(widths):
        if groups[-1] and used + width > room:
            groups.append([])
            used = 0
        groups[-1].append(index)
        used += width
    return groups


def _line(name: str, figures: list[Figure | None]) -> Line:
    first = figures[0]
    better = next(figure.better for figure in figures if figure is not None)
    cells = [
        None if figure is None else compare(figure, None if place == 0 else first)
        for place, figure in enumerate(figures)
    ]
    return Line(name, better, tuple(cells))


def compare(figure: Figure, first: Figure | None) -> Cell:
    """Return a figure beside the first checkpoint's; None where it is the first, or has none."""
    ratio = "" if first is None else _ratio(figure, first)
    return Cell(
        value=format_number(figure.value, figure.digits),
        stderr="" if figure.stderr is None else format_number(figure.stderr, 2),
        ratio=ratio,
        verdict="" if first is None else _verdict(figure, first),
        finite=math.isfinite(figure.value),
    )


def _ratio(figure: Figure, first: Figure) -> str:
    """Return the ratio that the figure knows, or that of the values; "" where it says nothing."""
    if not (math.isfinite(figure.value) and math.isfinite(first.value) and first.value > 0):
        return ""
    ratio = figure.value / first.value if figure.ratio is None else figure.ratio
    return f"{ratio:.4f}" if 0.01 <= ratio < 10 else format_number(ratio, 3)


def _verdict(figure: Figure, first: Figure) -> Literal["better", "worse", ""]:
    second = figure.value if figure.ratio is None else figure.ratio * first.value
    difference = second - first.value
    if figure.stderr is None and first.stderr is None:
        noise = NEGLIGIBLE * abs(first.value)
    else:
        noise = 2 * math.hypot(figure.stderr or 0.0, first.stderr or 0.0)
    if not figure.better or not math.isfinite(difference) or abs(difference) <= noise:
        return ""
    return "better" if (difference < 0) == (figure.better == "lower") else "worse"
