"""Outliers by layer, stages overlaid; heat maps of λ by head and of attention over depth."""

import math
from collections.abc import Callable, Mapping

from difftool.bench.charts import style
from difftool.bench.outlier_result import Result
from difftool.bench.result import Chart

PANELS: tuple[tuple[str, Callable[[Result], list[float]]], ...] = (
    ("residual stream, max |x|", lambda result: [part.maximum for part in result.stream]),
    (
        "MLP down input, max |x|",
        lambda result: [math.nan, *(result.mlp_output(layer) for layer in range(result.layers))],
    ),
    ("residual stream, kurtosis", lambda result: [part.kurtosis for part in result.stream]),
)


def charts(results: Mapping[str, Result]) -> list[Chart]:
    """Return outliers by layer of all checkpoints, then what surgery added to each."""
    drawn = [_outliers(results)]
    for name, result in results.items():
        if result.differential:
            drawn.append(_gates(name, list(result.differential.gates.means.values())))
        if result.depth:
            drawn.append(_depth(name, result.depth))
    return drawn


def _outliers(results: Mapping[str, Result]) -> Chart:
    drawing, panels = style.new_panels(len(PANELS), height_in=7.0)
    layers = max(result.layers for result in results.values())
    for axes, (label, values) in zip(panels, PANELS, strict=True):
        for index, (name, result) in enumerate(results.items()):
            axes.plot(values(result), label=name, markevery=0.1, **style.series(index))
        style.use_log_scale(axes)
        axes.set_ylabel(label)
        axes.set_xlim(-0.02 * layers, 1.02 * layers)  # the same where a panel lacks the embedding
        style.count_in_whole_numbers(axes.xaxis)
    panels[-1].set_xlabel("layers passed (0: the embedding)")
    style.legend(panels[0])
    return Chart(
        "Outliers by layer",
        drawing,
        "The largest values of the residual stream, those that the last linear of an MLP gets, and "
        "the kurtosis of the stream (3 for a normal distribution), on logarithmic scales.",
    )


def _gates(name: str, means: list[tuple[float, ...]]) -> Chart:
    drawing, axes = style.new_figure(height_in=_height(len(means)))
    style.heat_map(axes, means, label="mean σ(λ)", limits=(0, 1))
    axes.set_xlabel("pair of heads")
    axes.set_ylabel("layer")
    return Chart(
        f"λ of {name}",
        drawing,
        "How much of its second head each pair subtracts, mean over tokens: 0 is plain attention, "
        "½ is where a conversion starts.",
    )


def _depth(name: str, depth: Mapping[str, tuple[float, ...]]) -> Chart:
    sources = max(len(weights) for weights in depth.values())
    rows = [[*weights, *[math.nan] * (sources - len(weights))] for weights in depth.values()]
    drawing, axes = style.new_figure(height_in=_height(len(rows)))
    style.heat_map(axes, rows, label="mean α", limits=(0, 1))
    axes.set_xlabel("source (0: the embedding, then one a block)")
    axes.set_ylabel("read (last: the output)")
    return Chart(
        f"Attention over depth of {name}",
        drawing,
        "What each read gives its sources, mean over tokens; a row adds up to 1. Even rows are the "
        "plain residual stream, where a conversion starts.",
    )


def _height(rows: int) -> float:
    """Return inches for a heat map of so many rows."""
    return min(6.0, max(2.4, 1.2 + 0.13 * rows))
