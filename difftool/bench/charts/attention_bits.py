"""Accuracy and perplexity against bits: of the attention logits, and of the blocks' linears."""

import math
from collections.abc import Mapping

from matplotlib.axes import Axes
from matplotlib.ticker import LogFormatter

from difftool.bench.charts import style
from difftool.bench.measures.attention_bits import Result
from difftool.bench.result import Chart

GRANULARITIES = ("token", "tensor")
SPAN = 1.4  # of an axis of perplexity at least, from its middle up and down


def charts(results: Mapping[str, Result]) -> list[Chart]:
    """Return scores by bits of the attention logits, and perplexity by bits of the linears."""
    return [_attention(results), _linears(results)]


def _attention(results: Mapping[str, Result]) -> Chart:
    drawing, (accuracy, perplexity) = style.new_panels(2, columns=2)
    for index, (name, result) in enumerate(results.items()):
        scores = {"full": result.full} | {str(b): s for b, s in result.attention.items()}
        _plot(accuracy, index, name, {bits: score.accuracy for bits, score in scores.items()})
        _plot(perplexity, index, name, {bits: score.perplexity for bits, score in scores.items()})
    accuracy.set_ylabel("next-token accuracy")
    accuracy.set_ylim(0, 1.1 * accuracy.get_ylim()[1])
    _scale_perplexity(perplexity)
    for axes in (accuracy, perplexity):
        axes.set_xlabel("bits of the attention logits")
    style.legend(accuracy)
    return Chart(
        "Attention logits in low bits",
        drawing,
        "The less a line moves from left to right, the fewer bits its attention needs (as Figure 8 "
        "of arXiv 2410.05258).",
    )


def _linears(results: Mapping[str, Result]) -> Chart:
    drawing, panels = style.new_panels(len(GRANULARITIES), columns=2)
    for axes, granularity in zip(panels, GRANULARITIES, strict=True):
        for index, (name, result) in enumerate(results.items()):
            scores = {"full": result.full.perplexity} | {
                f"W{score.weight_bits}A{score.activation_bits}": score.perplexity
                for score in result.linears
                if score.granularity == granularity
            }
            _plot(axes, index, name, scores)
        axes.set_xlabel(f"activations scaled per {granularity}")
    _scale_perplexity(*panels)
    style.legend(panels[0])
    return Chart(
        "Linears of the blocks in low bits",
        drawing,
        "Round to nearest without calibration, bits of weights and of activations: what low bits "
        "do before anything is done about it. The larger the largest activations, the worse is one "
        "scale per tensor than one per token.",
    )


def _scale_perplexity(*panels: Axes) -> None:
    """Make the scales logarithmic, the same, and wide enough for small changes to look small."""
    for axes in panels:
        axes.set_ylabel("perplexity")
        axes.set_yscale("log")
    lows, highs = zip(*(axes.get_ylim() for axes in panels), strict=True)
    low, high = min(lows), max(highs)
    middle = math.sqrt(low * high)
    for axes in panels:
        axes.set_ylim(min(low, middle / SPAN), max(high, middle * SPAN))
        axes.yaxis.set_major_formatter(LogFormatter(labelOnlyBase=False))
        minor = LogFormatter(labelOnlyBase=False, minor_thresholds=(1.5, 0.7))
        axes.yaxis.set_minor_formatter(minor)


def _plot(axes: Axes, index: int, name: str, values: Mapping[str, float]) -> None:
    """Plot values over their names; what is not finite is left out."""
    axes.plot(list(values), list(values.values()), label=name, **style.series(index))
