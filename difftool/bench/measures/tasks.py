"""Tasks, as lm-evaluation-harness poses and scores them: accuracies, each with its standard error.

A task is run on its own, so that its figures do not depend on what else was asked for: batches are
made by length over all requests of a run, and a batch's width decides how sums are rounded.
"""

import math
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import Field

from difftool.bench.harness import (
    Outcome,
    check_documents,
    check_name,
    harness_version,
    load_task,
    require_harness,
    run_task,
    wrap_model,
)
from difftool.bench.local_tasks import TaskFolder
from difftool.bench.options import BenchOptions
from difftool.bench.quiet import quiet, sandboxed_templates
from difftool.bench.result import Figure, MeasureResult, Progress, Table
from difftool.bench.subject import Subject
from difftool.errors import UserError

TITLE = "Tasks"


class TaskFigure(MeasureResult):
    """One metric of one task."""

    task: str
    metric: str = Field(description="acc, acc_norm, perplexity, …")
    filter: str = Field(description="what the harness did to a generated answer first, or none")
    value: float = Field(description="NaN where a log-likelihood was not finite")
    stderr: float | None = Field(description="of a perplexity, by bootstrap")
    higher_is_better: bool | None
    main: bool = Field(description="whether it is the first metric of a task that was asked for")
    documents: int = Field(description="that were posed")
    all_documents: int = Field(description="that the task has")
    shots: int | None = Field(description="solved examples before each question")
    truncated: int = Field(description="requests that were longer than the model's context")
    not_finite: int = Field(description="log-likelihoods that are NaN or infinite")


class Result(MeasureResult):
    """All figures, in the order of the tasks that were asked for."""

    figures: tuple[TaskFigure, ...]
    add_bos: bool = Field(description="whether each prompt begins with the tokenizer's BOS")
    max_length: int = Field(description="tokens that the harness gives to the model at most")
    batch_size: int
    harness: str = Field(description="version of lm_eval")


def check(options: BenchOptions) -> None:
    """Raise a UserError for tasks that `measure` would not find, before anything is loaded."""
    require_harness()
    with tempfile.TemporaryDirectory(prefix="difftool-tasks-") as scratch, quiet():
        _find(options, Path(scratch))


def measure(subject: Subject, options: BenchOptions, progress: Progress) -> Result:
    """Run each of `options.tasks`; `options.limit` keeps the first so many documents of each.

    A name is looked for in `options.tasks_dir` first, then among the harness's own tasks; the data
    of those come from the hub.

    Raises:
        UserError: no task was named, one is unknown or cannot be run, or lm_eval is not installed.
    """
    require_harness()
    with tempfile.TemporaryDirectory(prefix="difftool-tasks-") as scratch, quiet():
        specs = _find(options, Path(scratch))
        model = wrap_model(subject, options)
        figures: list[TaskFigure] = []
        for name, spec in specs:
            local = not isinstance(spec, str)
            with sandboxed_templates(options.trust_remote_code or not local):
                loaded = load_task(spec, trusted=options.trust_remote_code)
                if local:
                    check_documents(loaded, options.limit)

                def show(done: int, total: int, name: str = name) -> None:
                    progress(name, done, total)

                outcome = run_task(model, loaded, options.limit, show)
            figures += _figures(outcome, name if isinstance(spec, str) else spec["task"])
    return Result(
        figures=tuple(figures),
        add_bos=model.add_bos_token,
        max_length=model.max_length,
        batch_size=options.batch_size,
        harness=harness_version(),
    )


def _find(options: BenchOptions, scratch: Path) -> list[tuple[str, str | dict[str, Any]]]:
    """Return the name and the configuration of each task; only a name for the harness's own."""
    folder = options.tasks_dir and TaskFolder(options.tasks_dir, options.trust_remote_code, scratch)
    local = folder.entries if folder else {}
    if not options.tasks:
        there = f"; in {options.tasks_dir} there are {', '.join(sorted(local))}" if local else ""
        raise UserError("no task is named", f"--tasks NAME,NAME{there}")
    found: list[tuple[str, str | dict[str, Any]]] = []
    for name in dict.fromkeys(options.tasks):
        if folder and name in local:
            found += [(config["task"], config) for config in folder.configurations(name)]
        else:
            check_name(name, sorted(local))
            found.append((name, name))
    return found


def _figures(outcome: Outcome, asked: str) -> Iterator[TaskFigure]:
    """Yield what the harness found as figures: those of `asked`, then those of its tasks."""
    results = outcome.results
    for task in sorted(results["results"], key=lambda task: task != asked):
        values = results["results"][task]
        better = results["higher_is_better"].get(task, {})
        counts = [results["n-samples"][leaf] for leaf in _leaves(task, results["group_subtasks"])]
        for place, (metric, filter_name) in enumerate(_metrics(values, list(better))):
            value = math.nan if outcome.not_finite else float(values[f"{metric},{filter_name}"])
            stderr = values.get(f"{metric}_stderr,{filter_name}")  # "N/A" where there is none
            yield TaskFigure(
                task=task,
                metric=metric,
                filter=filter_name,
                value=value,
                stderr=float(stderr) if isinstance(stderr, float) else None,
                higher_is_better=better.get(metric),
                main=place == 0 and task == asked,
                documents=sum(count["effective"] for count in counts),
                all_documents=sum(count["original"] for count in counts),
                shots=results["n-shot"].get(task),
                truncated=outcome.truncated,
                not_finite=outcome.not_finite,
            )


def _metrics(values: Mapping[str, Any], order: list[str]) -> list[tuple[str, str]]:
    """Return the metrics of a task's results, each with its filter, in the order of its YAML."""
    keys = [key for key in values if "," in key and "_stderr," not in key]
    found = [(metric, name) for metric, _, name in (key.partition(",") for key in keys)]
    return sorted(found, key=lambda pair: [*order, pair[0]].index(pair[0]))


def _leaves(name: str, groups: Mapping[str, list[str]]) -> list[str]:
    """Return the tasks of a group, its groups' among them; of a task, itself."""
    if name not in groups:
        return [name]
    return [leaf for child in groups[name] for leaf in _leaves(child, groups)]


def headline(result: Result) -> list[Figure]:
    """Return the first metric of each task that was asked for."""
    directions = {True: "higher", False: "lower", None: ""}
    return [
        Figure(
            f"{figure.task}, {_label(figure)}",
            figure.value,
            figure.stderr,
            directions[figure.higher_is_better],  # type: ignore[arg-type]
        )
        for figure in result.figures
        if figure.main
    ]


def tables(results: Mapping[str, Result]) -> list[Table]:
    """Return every metric of every task, a column for each checkpoint."""
    rows: dict[tuple[str, str], dict[str, TaskFigure]] = {}
    for name, result in results.items():
        for figure in result.figures:
            rows.setdefault((figure.task, _label(figure)), {})[name] = figure
    first = next(iter(results.values()))
    return [
        Table(
            "Tasks",
            ("task", "metric", "documents#", *(f"{name}#" for name in results)),
            tuple(
                (task, metric, _documents(found), *(_value(found.get(name)) for name in results))
                for (task, metric), found in rows.items()
            ),
            note=" ".join(_notes(results, first)),
        )
    ]


def _notes(results: Mapping[str, Result], first: Result) -> list[str]:
    notes = [
        f"By lm-evaluation-harness {first.harness}, ± standard error, "
        f"in batches of {first.batch_size}."
    ]
    for name, result in results.items():
        bos = "begin with BOS" if result.add_bos else "have no BOS"
        notes.append(f"{name}: prompts {bos}, up to {result.max_length} tokens.")
        for task, truncated, broken in dict.fromkeys(
            (figure.task, figure.truncated, figure.not_finite) for figure in result.figures
        ):
            if truncated:
                notes.append(f"{name}, {task}: {truncated} requests were cut to fit.")
            if broken:
                notes.append(f"{name}, {task}: {broken} log-likelihoods are not finite.")
    return notes


def _label(figure: TaskFigure) -> str:
    return figure.metric if figure.filter == "none" else f"{figure.metric} ({figure.filter})"


def _documents(found: Mapping[str, TaskFigure]) -> str:
    figure = next(iter(found.values()))
    some = figure.documents < figure.all_documents
    return f"{figure.documents} of {figure.all_documents}" if some else str(figure.documents)


def _value(figure: TaskFigure | None) -> str:
    if figure is None:
        return "–"
    error = "" if figure.stderr is None else f" ± {figure.stderr:.2g}"
    return f"{figure.value:.4g}{error}"
