"""lm-evaluation-harness on an open checkpoint: its scoring and its tasks, without its noise.

The model in memory is what is measured, with the harness's own wrapper for its kind. Seeds, batches
and defaults are those of its command line (`lm_eval run`), so that figures are the same ones.
"""

import copy
import functools
import importlib.metadata
import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import islice
from typing import Any

import numpy as np
import torch

from difftool.bench.options import BenchOptions
from difftool.bench.quiet import quiet
from difftool.bench.subject import Subject, TorchModel
from difftool.bench.text import encode
from difftool.errors import UserError, did_you_mean

BOOTSTRAPS = 1000  # resamples for the standard error of a perplexity; the harness takes 100,000
SEEDS = (0, 1234)  # of the harness: for `random`, and for numpy, torch and the choice of shots


def require_harness() -> None:
    """Raise a UserError where lm_eval is not installed."""
    missing = [name for name in ("lm_eval", "datasets") if find_spec(name) is None]
    if missing:
        raise UserError(
            f"tasks need {' and '.join(missing)}, which are not installed",
            fix='pip install "difftool[eval]"',
        )


def harness_version() -> str:
    """Return the version of lm_eval."""
    return importlib.metadata.version("lm_eval")


def wrap_model(subject: Subject, options: BenchOptions) -> Any:
    """Return the harness's model (an `lm_eval.api.model.LM`) for a checkpoint.

    Raises:
        UserError: no tokenizer, one that the harness would score wrongly, or a model of a kind that
            it cannot run.
    """
    if not isinstance(subject.model, TorchModel):
        raise UserError(f"{subject.name} does not run in torch, so it cannot do tasks yet")
    from lm_eval.models.huggingface import HFLM

    tokenizer = copy.deepcopy(subject.require_tokenizer())  # the harness sets a pad token
    start, bare = encode("a", tokenizer)
    marked = tokenizer("a", verbose=False)["input_ids"]
    if len(marked) > len(start) + len(bare):
        raise UserError(
            f"the tokenizer of {subject.name} ends every text with {marked[-1]}, which the harness "
            "would take for a part of every answer",
            "a tokenizer that ends a text where it ends",
        )
    nameless = tokenizer.bos_token_id is None and tokenizer.eos_token_id is None
    return HFLM(
        pretrained=subject.model.module,
        backend="causal",
        tokenizer=tokenizer,
        batch_size=options.batch_size,
        add_bos_token=bool(start),
        # what stands before an empty context; without BOS and EOS any token is as good
        prefix_token_id=[*start, 0][0] if nameless else None,
    )


@functools.cache
def default_tasks() -> Any:
    """Return the harness's own tasks, a `lm_eval.tasks.TaskManager`; finding them takes seconds."""
    from lm_eval.tasks import TaskManager

    return TaskManager()


def check_name(name: str, local: list[str]) -> None:
    """Raise a UserError if the harness has no task, group or tag of this name either."""
    known = default_tasks().all_tasks
    if name not in known:
        here = f"one of {', '.join(local)}, or a task" if local else "a task"
        close = did_you_mean(name, [*local, *known])
        raise UserError(
            f"unknown task {name!r}", f"{here} that `lm_eval ls tasks` lists", close.strip()
        )


def load_task(spec: str | dict[str, Any], *, trusted: bool) -> dict[str, Any]:
    """Return a task, ready to run: the harness's own of that name, or one that is configured.

    Raises:
        UserError: its data cannot be had, or its settings do not fit its data.
    """
    from lm_eval.tasks import TaskManager

    if isinstance(spec, str):
        name, manager = spec, default_tasks()
    else:
        _check_metrics(spec, trusted)
        name, manager = spec["task"], TaskManager(include_defaults=False)
    with _explained(name):
        loaded: dict[str, Any] = manager.load([spec])
    return loaded


def check_documents(loaded: dict[str, Any], limit: int | None) -> None:
    """Raise a UserError for a row that lacks what its task asks for.

    The harness itself would ask about "None", or count an answer that is not among the choices as
    wrong.
    """
    for name, task in loaded["tasks"].items():
        with _explained(name):
            for number, row in enumerate(islice(task.eval_docs, limit)):
                problem = _problem(task, row)
                if problem:
                    raise UserError(f"row {number + 1} of the task {name} {problem}")


def _problem(task: Any, row: dict[str, Any]) -> str:
    config = task.config
    templates = (config.doc_to_text, config.doc_to_target, config.doc_to_choice)
    words = " ".join(str(template) for template in templates)
    missing = [column for column, value in row.items() if value is None and column in words]
    if missing:
        return f"has no {missing[0]!r}"
    text, target = task.doc_to_text(row), task.doc_to_target(row)
    if config.doc_to_choice is None:
        return ""
    choices = task.doc_to_choice(row)
    if not all(isinstance(choice, str) and choice for choice in choices):
        return "has a choice that is not text, or empty"
    gold = text if task.multiple_input else target
    for one in gold if isinstance(gold, list) else [gold]:
        if one not in (range(len(choices)) if isinstance(one, int) else choices):
            return f"has {one!r} for its answer, which is not among its {len(choices)} choices"
    return ""


def _check_metrics(config: dict[str, Any], trusted: bool) -> None:
    """Raise a UserError for a metric that the harness would look for elsewhere, as code."""
    import lm_eval.api.metrics  # noqa: F401, it fills the registry
    from lm_eval.api.registry import METRIC_REGISTRY

    for metric in config.get("metric_list") or []:
        name = metric.get("metric") if isinstance(metric, dict) else metric
        if not trusted and (name not in METRIC_REGISTRY or metric.get("hf_evaluate")):
            raise UserError(
                f"the task {config['task']} has the metric {name!r}",
                f"one of the harness's own, such as {', '.join(islice(METRIC_REGISTRY, 8))}",
                did_you_mean(str(name), METRIC_REGISTRY).strip(),
            )


@contextmanager
def _explained(task: str) -> Iterator[None]:
    """Turn what goes wrong with a task's settings or data into a UserError."""
    from datasets.exceptions import DatasetsError
    from jinja2 import TemplateError

    try:
        yield
    except StopIteration as error:  # what datasets makes of a file without rows
        raise UserError(f"the task {task} cannot be run: its data have no rows") from error
    except (OSError, ValueError, LookupError, TypeError, DatasetsError, TemplateError) as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        reason = f"there is no {reason}" if isinstance(error, KeyError) else reason
        cause = f" ({' '.join(str(error.__cause__).split())})" if error.__cause__ else ""
        raise UserError(f"the task {task} cannot be run: {reason}{cause}") from error


@dataclass(frozen=True)
class Outcome:
    """What the harness found.

    Attributes:
        results: as `lm_eval.evaluate` returns them.
        truncated: requests that did not fit into the model's context and lost their beginning.
        not_finite: log-likelihoods that are NaN or infinite, of which the harness makes an answer.
    """

    results: dict[str, Any]
    truncated: int
    not_finite: int


def run_task(
    model: Any, loaded: dict[str, Any], limit: int | None, show: Callable[[int, int], None]
) -> Outcome:
    """Run a loaded task as `lm_eval run` does.

    Args:
        model: from `wrap_model`.
        loaded: from `load_task`.
        limit: documents of each task.
        show: gets the requests that are done and all there are.
    """
    from lm_eval import evaluate

    random.seed(SEEDS[0])
    np.random.seed(SEEDS[1])
    torch.manual_seed(SEEDS[1])
    for task in loaded["tasks"].values():
        if task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=SEEDS[1])
    with quiet(show) as warnings:
        results = evaluate(
            model, loaded, limit=limit, bootstrap_iters=BOOTSTRAPS, log_samples=False
        )
    return Outcome(
        results,
        truncated=sum("Truncating" in message for message in warnings),
        not_finite=sum(not math.isfinite(value) for value in _likelihoods(loaded)),
    )


def _likelihoods(loaded: dict[str, Any]) -> Iterator[float]:
    """Yield the log-likelihood of every request that was answered with one."""
    for task in loaded["tasks"].values():
        for response in (one for request in task.instances for one in request.resps):
            value = response[0] if isinstance(response, tuple) else response
            if isinstance(value, float):
                yield value
