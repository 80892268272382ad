"""Speed: time to first token, prefill, decoding; memory; the bytes of weights and KV cache.

Every checkpoint is loaded by a process of its own, so that peak memory is its own, and the
processes take turns, one trial each, every repetition beginning with another one: what slows the
machine for a while slows all of them, and a ratio is of trials that stood side by side.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Literal

import torch

from difftool.bench.options import BenchOptions
from difftool.bench.result import Figure, Progress
from difftool.bench.speed_process import Worker, started_worker
from difftool.bench.speed_result import Result, Spread, summarise_cell
from difftool.bench.speed_tables import tables
from difftool.bench.speed_timing import STEPS, Cell, Trial, fits
from difftool.errors import UserError
from difftool.sources import open_source

__all__ = ["TITLE", "Result", "check", "headline", "measure_together", "tables"]

TITLE = "Speed"

Trials = dict[Cell, list[Trial]]


def measure_together(
    sources: Sequence[tuple[str, str]], options: BenchOptions, progress: Progress
) -> list[Result]:
    """Time all checkpoints in turns; `sources` are pairs of a name and what the user wrote.

    Contexts that leave a checkpoint no positions for the tokens after them are skipped, saying so.

    Raises:
        UserError: a checkpoint cannot be loaded or timed, or has room for none of the contexts.
    """
    cells = plan_cells(options)
    progress("speed", 0, 1)  # while processes start and load
    with ExitStack() as stack:
        workers = []
        for name, source in sources:
            opened = stack.enter_context(open_source(source, dtype=options.dtype))
            worker = stack.enter_context(started_worker(name, opened.path, options))
            require_room(worker, cells)
            workers.append(worker)
        trials = take_turns(workers, cells, options.repetitions, progress)
        return [_result(worker, trials[worker.name], trials, options) for worker in workers]


def check(options: BenchOptions) -> None:
    """Refuse batch sizes and contexts that cannot be timed on any checkpoint."""
    plan_cells(options)


def plan_cells(options: BenchOptions) -> list[Cell]:
    """Return what is timed, in the order of the options; what is named twice is timed once.

    Raises:
        UserError: no batch size or no context, or one that is not positive.
    """
    settings = {
        "speed_batch_sizes": options.speed_batch_sizes,
        "speed_contexts": options.speed_contexts,
    }
    for name, sizes in settings.items():
        if not sizes or min(sizes) < 1:
            raise UserError(f"{name} is {list(sizes)}", "one positive number or more")
    batches, contexts = (dict.fromkeys(sizes) for sizes in settings.values())
    return [Cell(batch=batch, context=context) for batch in batches for context in contexts]


def require_room(worker: Worker, cells: Sequence[Cell]) -> None:
    """Refuse a checkpoint that has positions enough for none of the cells."""
    positions = worker.facts.positions
    if any(fits(cell, positions) for cell in cells):
        return
    raise UserError(
        f"{worker.name} has {positions} positions, too few for any of the contexts",
        f"contexts of at most {(positions or 0) - STEPS} tokens, with {STEPS} decoded after them",
        "Lower --speed-contexts",
    )


def take_turns(
    workers: Sequence[Worker], cells: Sequence[Cell], repetitions: int, progress: Progress
) -> dict[str, Trials]:
    """Return the trials of each worker by cell; a first round warms up and is not kept."""
    trials: dict[str, Trials] = {worker.name: {} for worker in workers}
    for number, cell in enumerate(cells):
        ready = [worker for worker in workers if fits(cell, worker.facts.positions)]
        for repetition in range(repetitions + 1):
            for worker in rotated(ready, repetition):
                trial = worker.time(cell)
                if repetition > 0:
                    trials[worker.name].setdefault(cell, []).append(trial)
            done = number * (repetitions + 1) + repetition + 1
            progress("speed", done, len(cells) * (repetitions + 1))
    return trials


def rotated(workers: Sequence[Worker], repetition: int) -> list[Worker]:
    """Return the workers in the order of one repetition: each is the first once in a while."""
    first = repetition % len(workers) if workers else 0
    return [*workers[first:], *workers[:first]]


def _result(
    worker: Worker, trials: Trials, everyone: Mapping[str, Trials], options: BenchOptions
) -> Result:
    facts = worker.facts
    firsts = next(iter(everyone.values()))
    contexts = {cell.context for cell in trials}
    return Result(
        cells=tuple(
            summarise_cell(cell, found, firsts.get(cell)) for cell, found in trials.items()
        ),
        skipped=tuple(
            f"context {context}: with {STEPS} tokens after it more than {facts.positions} positions"
            for context in dict.fromkeys(options.speed_contexts)
            if context not in contexts
        ),
        parameters=facts.parameters,
        weight_bytes=facts.weight_bytes,
        start_rss=facts.start_rss,
        repetitions=options.repetitions,
        steps=STEPS,
        threads=torch.get_num_threads(),
        dtype=facts.dtype,
        device=facts.device,
        attention=facts.attention,
        kernels=facts.kernels,
        compiled=options.compile,
    )


def headline(result: Result) -> list[Figure]:
    """Return the figures of the first batch size at the largest context."""
    cell = result.shown
    where = f"({cell.batch} × {cell.context})"
    memory = [Figure("peak memory, MB", cell.peak_rss / 1e6, better="lower")]
    if cell.peak_gpu is not None:
        memory.append(Figure("peak GPU memory, MB", cell.peak_gpu / 1e6, better="lower"))
    return [
        _figure(f"time to first token, ms {where}", cell.ttft_ms, "lower"),
        _figure(f"prefill, tokens/s {where}", cell.prefill, "higher"),
        _figure(f"decode, tokens/s {where}", cell.decode, "higher"),
        *memory,
        Figure("weights on disk, MB", result.weight_bytes / 1e6, better="lower"),
        Figure("KV cache, bytes/token", cell.kv_bytes_per_token, better="lower"),
    ]


def _figure(name: str, spread: Spread, better: Literal["lower", "higher"]) -> Figure:
    """Return a timing for the summary; a single repetition says nothing of better or worse."""
    judged = better if spread.error is not None else ""
    return Figure(name, spread.median, spread.error, judged, ratio=spread.ratio)
