"""A process that loads one checkpoint and times it when asked to: `python -m … SETUP`.

One JSON object a line: cells come in on stdin, answers go out on stdout. It ends when stdin does,
which is when whoever started it closes it or dies.
"""

import gc
import os
import signal
import sys
import time
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from queue import SimpleQueue
from threading import Thread
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict
from transformers import PreTrainedModel

from difftool.bench.options import BenchOptions
from difftool.bench.process_memory import resident_bytes
from difftool.bench.speed_timing import Cell, attention_kernels, find_positions, time_trial
from difftool.bench.subject import open_model
from difftool.checkpoint import open_checkpoint
from difftool.errors import UserError

GRACE = 10.0  # seconds to leave contexts in before the process is ended hard
RECOMPILES = 64  # torch.compile's limit: batch of one or more, prompt or step, window full or not
LOWER = (
    "Lower --speed-batch-sizes or --speed-contexts, take --dtype bfloat16, or name fewer "
    "checkpoints: while speed is measured, all of them are in memory"
)


class Setup(BaseModel):
    """What a worker is started with; `threads` are those of torch."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    folder: Path
    threads: int
    options: BenchOptions


class Facts(BaseModel):
    """What is known of a checkpoint once it is loaded; bytes are of memory unless on disk.

    Attributes:
        parameters: tied ones counted once.
        weight_bytes: of the tensors on disk.
        start_rss: resident bytes before the model was loaded.
        positions: that the model was made for, if its config says.
        attention: transformers' name of the attention that the model runs.
        kernels: the fused operators that this turned out to call.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    parameters: int
    weight_bytes: int
    start_rss: int
    positions: int | None
    dtype: str
    device: str
    attention: str
    kernels: tuple[str, ...]


class Failure(BaseModel):
    """A UserError on its way to the process that started this one."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    found: str
    expected: str
    fix: str


def main() -> None:
    """Answer with `Facts`, then with a `Trial` to each cell; with a `Failure` to what fails."""
    answers = _take_stdout()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for whoever started this
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    questions = _listen()
    setup = Setup.model_validate_json(sys.argv[1])
    try:
        for answer in _answer(setup, questions):
            print(answer.model_dump_json(), file=answers, flush=True)
    except (UserError, RuntimeError, MemoryError) as error:
        failure = explain(error)
        if failure is None:
            raise
        print(failure.model_dump_json(), file=answers, flush=True)
        sys.exit(1)


def _answer(setup: Setup, questions: "SimpleQueue[bytes]") -> Iterator[BaseModel]:
    options = setup.options
    torch.set_num_threads(setup.threads)
    checkpoint = open_checkpoint(setup.folder)
    start_rss = resident_bytes()
    with open_model(checkpoint, options) as model:
        _require_in_memory(model)
        yield Facts(
            parameters=sum(parameter.numel() for parameter in model.parameters()),
            weight_bytes=checkpoint.nbytes,
            start_rss=start_rss,
            positions=find_positions(model),
            dtype=str(model.dtype).removeprefix("torch."),
            device=str(model.device),
            attention=str(model.config._attn_implementation),
            kernels=attention_kernels(model),
        )
        run = compile_model(model) if options.compile else model
        gc.collect()
        gc.freeze()  # what is there now is never looked through again
        while True:
            cell = Cell.model_validate_json(questions.get())
            yield time_trial(model, run, cell, options.seed)


def _require_in_memory(model: PreTrainedModel) -> None:
    if any(parameter.is_meta for parameter in model.parameters()):
        raise UserError(
            "the weights do not fit into memory, and from disk the disk would be timed",
            fix=LOWER,
        )


def compile_model(model: PreTrainedModel, backend: str = "inductor") -> Any:
    """Return the model under torch.compile, for any batch and length; it never falls back."""
    import torch._dynamo

    torch._dynamo.config.recompile_limit = RECOMPILES
    torch._dynamo.config.fail_on_recompile_limit_hit = True
    return torch.compile(model, dynamic=True, backend=backend)


def explain(error: Exception) -> Failure | None:
    """Return what to tell the user; None for an error that is nobody's but the programmer's."""
    if isinstance(error, UserError):
        return Failure(found=error.found, expected=error.expected, fix=error.fix)
    said = str(error)
    # torch's allocator on the CPU has no type for it
    on_cpu = "not enough memory" in said or "can't allocate memory" in said
    if not (on_cpu or isinstance(error, (MemoryError, torch.OutOfMemoryError))):
        return None
    reason = "".join(f": {line}" for line in said.splitlines()[:1])
    return Failure(found=f"out of memory{reason}", expected="", fix=LOWER)


def _take_stdout() -> Any:
    """Return a text stream to stdout, and send to stderr what anyone else prints there."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return answers


def _listen() -> "SimpleQueue[bytes]":
    """Return where the lines of stdin go; this process ends when they do, whatever it does."""
    inbox: SimpleQueue[bytes] = SimpleQueue()
    # Unbuffered, for a buffer's lock would be held by a thread that the interpreter's end kills.
    stream = open(0, "rb", buffering=0, closefd=False)  # noqa: SIM115, it is not to be closed
    Thread(target=_pass_on, args=(stream, inbox), daemon=True).start()
    return inbox


def _pass_on(stream: FileIO, inbox: "SimpleQueue[bytes]") -> None:
    for line in stream:
        inbox.put(line)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(GRACE)
    os._exit(1)


if __name__ == "__main__":
    main()
