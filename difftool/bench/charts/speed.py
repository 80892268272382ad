"""Prefill and decoding by checkpoint: medians, from the slowest to the fastest repetition."""

from collections.abc import Callable, Mapping
from math import isfinite

from matplotlib.axes import Axes

from difftool.bench.charts import style
from difftool.bench.measures.speed import Result
from difftool.bench.result import Chart
from difftool.bench.speed_result import CellResult, Spread

BAR, GAP, FRAME = 0.17, 0.12, 1.0  # inches: a bar, between two cells, around them all
BESIDE = 1.25  # the axis beyond the longest bar, for the ratios


def charts(results: Mapping[str, Result]) -> list[Chart]:
    """Return prefill and decoding of each batch and context, one bar to a checkpoint."""
    cells = dict.fromkeys(cell.cell for result in results.values() for cell in result.cells)
    names = [str(cell) for cell in cells]
    height = FRAME + len(names) * (len(results) * BAR + GAP)
    drawing, (prefill, decode) = style.new_panels(2, columns=2, height_in=max(height, 2.2))
    _draw_bars(prefill, results, names, lambda cell: cell.prefill)
    _draw_bars(decode, results, names, lambda cell: cell.decode)
    prefill.set_xlabel("prefill, tokens/s")
    decode.set_xlabel("decode, tokens/s")
    prefill.set_ylabel("batch × context")
    decode.set_yticklabels([])
    style.legend(prefill)
    ratios = "; beside a bar, its ratio to the first checkpoint's" if len(results) > 1 else ""
    return [
        Chart(
            "Speed",
            drawing,
            f"Medians, with lines from the slowest to the fastest repetition{ratios}.",
        )
    ]


def _draw_bars(
    axes: Axes,
    results: Mapping[str, Result],
    names: list[str],
    figure: Callable[[CellResult], Spread],
) -> None:
    """Draw a group of bars for each cell, the first at the top and the first checkpoint's first."""
    thick = BAR / (len(results) * BAR + GAP)
    longest = 0.0
    for index, (name, result) in enumerate(results.items()):
        found = [(names.index(str(cell.cell)), figure(cell)) for cell in result.cells]
        places = [place + thick * (index - (len(results) - 1) / 2) for place, _ in found]
        spreads = [spread for _, spread in found]
        axes.barh(
            places,
            [spread.median for spread in spreads],
            thick,
            xerr=[
                [spread.median - spread.low for spread in spreads],
                [spread.high - spread.median for spread in spreads],
            ],
            label=name,
            color=style.colour(index),
            hatch=style.hatch(index),
            edgecolor="white",
            error_kw={"elinewidth": 0.8},
        )
        longest = max(longest, *(s.high for s in spreads if isfinite(s.high)))
        if index:
            _write_ratios(axes, places, spreads)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.set_xlim(0, longest * BESIDE)
    axes.grid(visible=False, axis="y")


def _write_ratios(axes: Axes, places: list[float], spreads: list[Spread]) -> None:
    for place, spread in zip(places, spreads, strict=True):
        if spread.ratio is not None:
            axes.annotate(
                f"×{spread.ratio:.2f}",
                (spread.high, place),
                (3, 0),
                textcoords="offset points",
                va="center",
                fontsize=7.5,
            )
