"""Drawings of what was measured: a file for each measure that has any, found by its name."""

import importlib
import importlib.util
import warnings
from collections.abc import Mapping
from dataclasses import dataclass

from difftool.bench.result import MeasureResult

LONGEST = 32  # characters of a checkpoint's name in a chart


@dataclass(frozen=True)
class DrawnChart:
    """A chart as an `<svg>` element that may stand in an HTML page beside others."""

    title: str
    caption: str
    svg: str


def draw_charts(measure: str, results: Mapping[str, MeasureResult]) -> list[DrawnChart]:
    """Draw all charts of a measure, those that its file in this folder makes, if it has one.

    Args:
        measure: its name, as on the command line.
        results: by checkpoint; names that are too long for a legend are shortened.
    """
    name = f"{__name__}.{measure.replace('-', '_')}"
    if importlib.util.find_spec(name) is None:
        return []
    import matplotlib

    from difftool.bench.charts import style
    from difftool.bench.charts.svg import to_svg

    labels = short_names(list(results))
    named = dict(zip(labels, results.values(), strict=True))
    with matplotlib.rc_context(style.SETTINGS), warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"Glyph .* missing")  # the reader's browser has it
        drawn = []
        for number, chart in enumerate(importlib.import_module(name).charts(named)):
            title, caption = (text.replace(r"\$", "$") for text in (chart.title, chart.caption))
            svg = to_svg(chart.drawing, f"{measure}-{number}", title)
            drawn.append(DrawnChart(title, caption, svg))
        return drawn


def short_names(names: list[str]) -> list[str]:
    """Return names that a chart can print: printable, short, different, and not hidden.

    matplotlib leaves labels that begin with `_` out of legends, and takes what stands between two
    `$` for a formula.
    """
    short: list[str] = []
    for name in names:
        label = "".join(letter if letter.isprintable() else "�" for letter in name).strip() or "–"
        label = f"·{label}" if label.startswith("_") else label
        if len(label) > LONGEST:
            half = LONGEST // 2 - 1
            label = f"{label[:half]}…{label[-half:]}"
        taken = sum(other == label or other.startswith(f"{label} (") for other in short)
        short.append(f"{label} ({taken + 1})" if taken else label)
    return [label.replace("$", r"\$") for label in short]
