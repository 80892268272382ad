"""The other side of `speed_worker`: start one, ask it, see that it ends."""

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TypeVar

import torch
from pydantic import BaseModel

from difftool.bench import speed_worker
from difftool.bench.options import BenchOptions
from difftool.bench.speed_timing import Cell, Trial
from difftool.bench.speed_worker import GRACE, LOWER, Facts, Failure, Setup
from difftool.errors import UserError

LAST_WORDS = re.compile(r"^[A-Za-z_][\w.]*: .+", re.MULTILINE)  # of a traceback

Answer = TypeVar("Answer", bound=BaseModel)


class Worker:
    """A checkpoint in a process of its own.

    Attributes:
        name: of the checkpoint.
        pid: of the process.
        facts: what it said once the checkpoint was loaded.
    """

    def __init__(self, name: str, process: "subprocess.Popen[bytes]", errors: IO[bytes]) -> None:
        self.name, self._process, self._errors = name, process, errors
        self.pid = process.pid
        self.facts = self._hear(Facts, "loading")

    def time(self, cell: Cell) -> Trial:
        """Time a cell once.

        Raises:
            UserError: the worker failed, with its reason.
        """
        doing = f"batch {cell.batch}, context {cell.context}"
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(cell.model_dump_json().encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise self._death(doing) from error
        return self._hear(Trial, doing)

    def _hear(self, kind: type[Answer], doing: str) -> Answer:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line.endswith(b"\n"):
            raise self._death(doing)
        if line.startswith(b'{"found":'):
            failure = Failure.model_validate_json(line)
            found = f"{self.name}, {doing}: {failure.found}"
            raise UserError(found, failure.expected, failure.fix)
        return kind.model_validate_json(line)

    def _death(self, doing: str) -> UserError:
        """Return the reason why the process ended without an answer."""
        status = self._process.wait()
        self._errors.seek(0)
        said = self._errors.read().decode(errors="replace")
        last = LAST_WORDS.findall(said) or said.splitlines() or [f"exit status {status}"]
        reason, fix = last[-1].rstrip("."), ""
        if status < 0:
            name = signal.Signals(-status).name
            reason = f"it died of {name}"
            if name == "SIGKILL":
                reason, fix = "it was killed, as the system does when memory runs out", LOWER
        found = f"{self.name}, {doing}: the process that timed it ended: {reason}"
        error = UserError(found, "", fix)
        error.add_note(said)
        return error


@contextmanager
def started_worker(name: str, folder: Path, options: BenchOptions) -> Iterator[Worker]:
    """Yield a process that has loaded the checkpoint in `folder`; it is gone afterwards.

    Raises:
        UserError: the checkpoint cannot be loaded.
    """
    setup = Setup(folder=folder, threads=torch.get_num_threads(), options=options)
    command = [sys.executable, "-P", "-m", speed_worker.__name__, setup.model_dump_json()]
    found_here = os.pathsep.join(filter(None, sys.path))  # what is imported here, and nothing else
    with (
        tempfile.TemporaryFile() as errors,
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            env={**os.environ, "PYTHONPATH": found_here},
        ) as process,
    ):
        try:
            yield Worker(name, process, errors)
        finally:
            _end(process)


def _end(process: "subprocess.Popen[bytes]") -> None:
    assert process.stdin is not None
    with suppress(BrokenPipeError):
        process.stdin.close()
    try:
        process.wait(GRACE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
