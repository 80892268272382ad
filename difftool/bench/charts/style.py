"""How the report's charts look: Okabe and Ito's palette, and a line and a marker to each colour.

Every series differs from the others in colour, dash and marker, so that charts read in grey and for
colour-blind eyes (Okabe & Ito 2008, "Color Universal Design"). Black is the page's ink: where the
page is dark, what is drawn in black is light, and nothing is drawn behind the axes.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.image import AxesImage
from matplotlib.ticker import LogFormatter, MaxNLocator

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#7F7F7F")
LINES = ("-", "--", "-.", ":")
MARKERS = ("o", "s", "^", "D", "v", "P", "X")
COLOUR_MAP = "cividis"  # even steps of lightness, the same to nearly all colour-blind eyes

# In force while charts are drawn and written.
SETTINGS: Any = {
    "axes.axisbelow": True,
    "axes.grid": True,
    "axes.labelsize": 10,
    "axes.linewidth": 0.8,
    "axes.spines.right": False,
    "axes.spines.top": False,
    "axes.titlelocation": "left",
    "axes.titlesize": 10,
    "axes.unicode_minus": True,
    "font.family": ["sans-serif"],
    "font.sans-serif": ["DejaVu Sans"],
    "font.size": 10,
    "grid.alpha": 0.15,
    "grid.color": "black",
    "grid.linewidth": 0.8,
    "svg.fonttype": "none",
    "svg.hashsalt": "difftool",
}


def new_figure(width_in: float = 6.0, height_in: float = 3.0) -> tuple[Figure, Axes]:
    """Return a figure of this size in inches that lays itself out, and its only axes."""
    figure, panels = new_panels(1, width_in=width_in, height_in=height_in)
    return figure, panels[0]


def new_panels(
    count: int, columns: int = 1, *, width_in: float = 6.0, height_in: float = 3.0
) -> tuple[Figure, list[Axes]]:
    """Return a figure with `count` axes, `columns` of them in a row; the size is the whole's."""
    figure = Figure(figsize=(width_in, height_in), layout="constrained")
    rows = -(-count // columns)
    panels = [figure.add_subplot(rows, columns, place + 1) for place in range(count)]
    return figure, panels


def colour(index: int) -> str:
    """Return the colour of the series with this index; after seven they begin again."""
    return COLOURS[index % len(COLOURS)]


def line(index: int) -> str:
    """Return the line style of the series with this index."""
    return LINES[index % len(LINES)]


def marker(index: int) -> str:
    """Return the marker of the series with this index."""
    return MARKERS[index % len(MARKERS)]


def series(index: int) -> dict[str, Any]:
    """Return how a series is drawn, as `axes.plot` takes it.

    Later series are thinner, so that those below them show where all are equal.
    """
    return {
        "color": colour(index),
        "linestyle": line(index),
        "marker": marker(index),
        "linewidth": max(1.4, 3.2 - 0.7 * index),
        "markersize": max(3.5, 8.0 - 1.5 * index),
    }


def hatch(index: int) -> str:
    """Return the hatching that tells a bar of this series from the others in grey."""
    return ("", "///", "...", "\\\\\\", "xxx", "---", "+++")[index % len(COLOURS)]


def legend(axes: Axes) -> None:
    """Put what `axes` has labels for above all axes of its figure, each label once."""
    handles, labels = axes.get_legend_handles_labels()
    if not labels:
        return
    by_label = dict(zip(labels, handles, strict=True))
    figure = axes.get_figure(root=True)
    assert figure is not None
    widest = max(len(label) for label in by_label) + 6  # of the line before it, in characters
    columns = max(1, int(figure.get_figwidth() * 12) // widest)
    figure.legend(
        by_label.values(),
        by_label.keys(),
        loc="outside upper left",
        ncols=min(columns, len(by_label)),
        frameon=False,
        handlelength=3.2,
        borderaxespad=0.2,
    )


def heat_map(
    axes: Axes,
    values: Sequence[Sequence[float]],
    *,
    label: str,
    limits: tuple[float, float] | None = None,
) -> AxesImage:
    """Draw values [rows, columns] as cells, row 0 at the top, with a bar that says what they are.

    Args:
        axes: to draw in; ticks count rows and columns from 0.
        values: NaN leaves a cell empty.
        label: what a value is, beside the bar.
        limits: values of the darkest and the lightest cell; None takes them from the values.
    """
    low, high = limits if limits is not None else (None, None)
    image = axes.imshow(
        np.asarray(values, dtype=float),
        aspect="auto",
        cmap=COLOUR_MAP,
        interpolation="none",
        vmin=low,
        vmax=high,
    )
    axes.grid(visible=False)
    axes.spines[:].set_visible(True)
    figure = axes.get_figure(root=True)
    assert figure is not None
    figure.colorbar(image, ax=axes, label=label, pad=0.02, aspect=30)
    count_in_whole_numbers(axes.xaxis, axes.yaxis)
    return image


def use_log_scale(axes: Axes) -> None:
    """Make the vertical axis logarithmic, with plain numbers beside it."""
    axes.set_yscale("log")
    axes.yaxis.set_major_formatter(_PlainNumbers())
    axes.yaxis.set_minor_formatter(_PlainNumbers(minor_thresholds=(1.5, 0.5)))


class _PlainNumbers(LogFormatter):
    """10,000 in place of a power of ten, at those ticks where there is room for a number."""

    def __call__(self, x: float, pos: int | None = None) -> str:
        shown = f"{x:,.10g}" if 1e-4 <= x < 1e6 else f"{x:.3g}"
        return shown.replace("e+0", "e").replace("e-0", "e−") if super().__call__(x, pos) else ""


def count_in_whole_numbers(*axes: Axis) -> None:
    """Put ticks at integers only, for layers and heads."""
    for axis in axes:
        axis.set_major_locator(MaxNLocator("auto", integer=True, steps=[1, 2, 5, 10]))
