"""Retrieval: accuracy by number of needles, and attention to answer and noise by depth."""

from collections.abc import Mapping

from difftool.bench.charts import style
from difftool.bench.measures.retrieval import Result
from difftool.bench.result import Chart

SPREAD = 0.5  # of the distance between two settings, over which the checkpoints' markers stand


def charts(results: Mapping[str, Result]) -> list[Chart]:
    """Return the two charts; that of attention where any checkpoint shows its own."""
    observed = {name: result for name, result in results.items() if result.attention}
    return [_accuracy(results), *([_attention(observed)] if observed else [])]


def _accuracy(results: Mapping[str, Result]) -> Chart:
    drawing, axes = style.new_figure()
    first = next(iter(results.values()))
    for index, (name, result) in enumerate(results.items()):
        shift = SPREAD * ((index + 0.5) / len(results) - 0.5)
        axes.errorbar(
            [place + shift for place in range(len(result.settings))],
            [score.accuracy for score in result.settings],
            yerr=[score.accuracy_stderr or 0.0 for score in result.settings],
            label=name,
            capsize=3,
            **style.series(index) | {"linestyle": "none"},
        )
    axes.axhline(first.chance, color="black", linewidth=0.8, linestyle=":")
    axes.annotate(
        "chance", (1, first.chance), xycoords=("axes fraction", "data"), ha="right", va="bottom"
    )
    axes.set_xticks(
        range(len(first.settings)),
        [f"{score.asked} of {score.needles}" for score in first.settings],
    )
    axes.set_xlabel("needles asked for, of all in the text")
    axes.set_ylabel("accuracy")
    axes.set_ylim(-0.03, 1.05)
    style.legend(axes)
    return Chart(
        "Needles found again",
        drawing,
        "How often the right one of ten digits is the most likely, with its standard error, over "
        "all lengths and depths (as Table 2 of arXiv 2410.05258).",
    )


def _attention(results: Mapping[str, Result]) -> Chart:
    drawing, panels = style.new_panels(2, columns=2)
    for axes, part, label in zip(
        panels, ("answer", "noise"), ("attention to the answer", "attention to noise"), strict=True
    ):
        for index, (name, result) in enumerate(results.items()):
            axes.plot(
                [100 * share.depth for share in result.attention],
                [getattr(share, part) for share in result.attention],
                label=name,
                **style.series(index),
            )
        axes.set_xlabel("depth of the answer, %")
        axes.set_ylabel(label)
        axes.set_ylim(bottom=0)
    style.legend(panels[0])
    return Chart(
        "Where the question looks",
        drawing,
        "Share of the last query's attention that the asked sentence gets, and the rest of the "
        "haystack, mean over heads and layers (as Table 3 of arXiv 2410.05258). Pairs of "
        "differential heads count as one map, by the size of its entries.",
    )
