"""Tasks: the first metric of each, where that is an accuracy, with its standard error."""

from collections.abc import Mapping

from difftool.bench.charts import style
from difftool.bench.measures.tasks import Result, TaskFigure
from difftool.bench.result import Chart

SPREAD = 0.6  # of the distance between two tasks, over which the checkpoints' markers stand
MOST = 30  # tasks in a chart, which is as many as can be read


def charts(results: Mapping[str, Result]) -> list[Chart]:
    """Return one chart, or none where no task has an accuracy."""
    found = {name: _accuracies(result) for name, result in results.items()}
    tasks = list(dict.fromkeys(task for figures in found.values() for task in figures))[:MOST]
    if not tasks:
        return []
    drawing, axes = style.new_figure(height_in=1.4 + 0.45 * len(tasks))
    for index, (name, figures) in enumerate(found.items()):
        shown = {place: figures[task] for place, task in enumerate(tasks) if task in figures}
        shift = SPREAD * ((index + 0.5) / len(found) - 0.5)
        axes.errorbar(
            [figure.value for figure in shown.values()],
            [place + shift for place in shown],
            xerr=[figure.stderr or 0.0 for figure in shown.values()],
            label=name,
            capsize=3,
            **style.series(index) | {"linestyle": "none"},
        )
    labels = {task: _label(next(f[task] for f in found.values() if task in f)) for task in tasks}
    axes.set_yticks(range(len(tasks)), [labels[task] for task in tasks])
    axes.set_ylim(len(tasks) - 0.5, -0.5)
    axes.set_xlim(-0.02, 1.02)
    axes.set_xlabel("share of documents right")
    style.legend(axes)
    return [
        Chart(
            "Tasks",
            drawing,
            "Accuracies with their standard errors. Where the bars of two checkpoints overlap, the "
            "documents do not tell them apart.",
        )
    ]


def _accuracies(result: Result) -> dict[str, TaskFigure]:
    """Return by task the first metrics that lie between 0 and 1 because more is better."""
    return {
        figure.task: figure
        for figure in result.figures
        if figure.main and figure.higher_is_better and not figure.value > 1
    }


def _label(figure: TaskFigure) -> str:
    return figure.task if figure.metric == "acc" else f"{figure.task}, {figure.metric}"
