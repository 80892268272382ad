"""bench(): measure checkpoints side by side and write the report.

One checkpoint at a time is loaded, and goes through all measures; those whose sides must take turns
come last. The report is written whenever a measure ends, so that an interruption loses nothing.
"""

import errno
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from math import prod
from pathlib import Path

import torch

from difftool.bench.measures import load_measure, measure_names
from difftool.bench.options import BenchOptions
from difftool.bench.report import (
    Environment,
    Report,
    SubjectReport,
    describe_environment,
    headline,
    write_report,
)
from difftool.bench.result import MeasureResult, Progress
from difftool.bench.subject import Subject, find_device, open_subject
from difftool.bench.writing import write_reports
from difftool.checkpoint import open_checkpoint
from difftool.errors import UserError
from difftool.provenance import read_provenance

REPORTS = ("report.json", "report.md", "report.html")
UNFINISHED = tuple(f".{name}.new" for name in REPORTS)  # what a killed run may leave


def bench(
    sources: Sequence[str],
    options: BenchOptions,
    out: Path,
    progress: Progress = lambda what, done, total: None,
) -> Report:
    """Measure what `sources` name and write report.json, report.md and report.html into `out`.

    A measure that cannot be had on a checkpoint is a problem in its report, as is a figure that is
    not finite; the others go on. KeyboardInterrupt passes through, with what is finished written.

    Raises:
        UserError: no source, an unknown measure or task, or an `out` that holds something else.
    """
    for name in options.measures:
        check = getattr(load_measure(name), "check", None)
        if check is not None:
            check(options)
    check_out(out)
    find_device(options.device)
    under_way = _Bench(sources, options, out, progress)
    try:
        under_way.measure_all()
    finally:
        report = under_way.report()
        if report.subjects:
            write_reports(report, out)
    return report


def check_out(out: Path) -> None:
    """Refuse a folder that holds anything but an earlier report."""
    if not out.exists():
        return
    if not out.is_dir():
        raise UserError(f"{out} is a file", "a folder for the report", "Choose another with -o")
    foreign = sorted(path.name for path in out.iterdir() if path.name not in REPORTS + UNFINISHED)
    if foreign:
        raise UserError(
            f"{out} holds {foreign[0]}, which is no report",
            "a new folder, or one with an earlier report",
            "Choose another with -o",
        )


def unique_names(sources: Sequence[str]) -> list[str]:
    """Return a short name for each source: its last part, numbered where two would be alike."""
    names: list[str] = []
    for source in sources:
        short = source.rstrip("/").rsplit("/", 1)[-1].removesuffix(".gguf") or source
        short = Path(source).resolve().name if short in (".", "..") else short
        count = sum(name == short or name.startswith(f"{short} (") for name in names)
        names.append(f"{short} ({count + 1})" if count else short)
    return names


class _Bench:
    """A bench under way."""

    def __init__(
        self, sources: Sequence[str], options: BenchOptions, out: Path, progress: Progress
    ) -> None:
        if not sources:
            raise UserError("nothing to measure", "at least one checkpoint")
        self.sources = list(zip(unique_names(sources), sources, strict=True))
        self.options, self.out, self.progress = options, out, progress
        self.started = time.monotonic()
        self.created = datetime.now(UTC).isoformat(timespec="seconds")
        self.environment: Environment = describe_environment()
        self.subjects: dict[str, SubjectReport] = {}
        self.complete = False
        in_order = [name for name in measure_names() if name in options.measures]
        self.together = [n for n in in_order if hasattr(load_measure(n), "measure_together")]
        self.alone = [name for name in in_order if name not in self.together]

    def measure_all(self) -> None:
        for name, source in self.sources:
            with open_subject(name, source, self.options) as subject:
                self.subjects[name] = describe_subject(subject)
                for measure in self.alone:
                    with self._problems([name], measure):
                        progress = self._progress_of(name)
                        result = load_measure(measure).measure(subject, self.options, progress)
                        self._add(name, measure, result)
        for measure in self.together:
            names = [name for name, _ in self.sources]
            with self._problems(names, measure):
                progress = self._progress_of("")
                module = load_measure(measure)
                results = module.measure_together(self.sources, self.options, progress)
                for name, result in zip(names, results, strict=True):
                    self._add(name, measure, result)
        self.complete = not any(subject.problems for subject in self.subjects.values())

    def _progress_of(self, name: str) -> Progress:
        def progress(what: str, done: int, total: int) -> None:
            self.progress(f"{name} {what}".strip(), done, total)

        return progress

    @contextmanager
    def _problems(self, names: Sequence[str], measure: str) -> Iterator[None]:
        """Turn what stops one measure into a problem of the report."""
        try:
            with explain_memory():
                yield
        except UserError as error:
            for name in names:
                self._update(name, problems=(f"{measure}: {error}",))

    def _add(self, name: str, measure: str, result: MeasureResult) -> None:
        self._update(name, results={measure: result})
        found = headline(self.subjects[name].model_copy(update={"results": {measure: result}}))
        wrong = [
            f"{figure.name} is {figure.value}"
            for figure in found.values()
            if not math.isfinite(figure.value)
        ]
        if wrong:
            self._update(name, problems=tuple(f"{measure}: {what}" for what in wrong))
        self.out.mkdir(parents=True, exist_ok=True)
        write_report(self.report(), self.out / "report.json")

    def _update(
        self,
        name: str,
        *,
        results: dict[str, MeasureResult] | None = None,
        problems: tuple[str, ...] = (),
    ) -> None:
        old = self.subjects[name]
        changes = {
            "results": {**old.results, **(results or {})},
            "problems": (*old.problems, *problems),
        }
        self.subjects[name] = old.model_copy(update=changes)

    def report(self) -> Report:
        return Report(
            created=self.created,
            seconds=round(time.monotonic() - self.started, 1),
            complete=self.complete,
            options=self.options,
            environment=self.environment,
            subjects=tuple(self.subjects.values()),
        )


def describe_subject(subject: Subject) -> SubjectReport:
    """Return what the report says of a checkpoint before it is measured."""
    checkpoint = open_checkpoint(subject.folder)
    module = subject.module
    return SubjectReport(
        name=subject.name,
        source=subject.id,
        architecture=type(module).__name__,
        family=subject.family,
        targets=subject.targets,
        parameters=sum(prod(tensor.shape) for tensor in checkpoint.tensors.values()),
        weight_bytes=sum(tensor.nbytes for tensor in checkpoint.tensors.values()),
        dtype=str(module.dtype).removeprefix("torch."),
        attention=str(module.config._attn_implementation),
        device=str(module.device),
        provenance=read_provenance(subject.folder),
        results={},
        problems=(),
    )


@contextmanager
def explain_memory() -> Iterator[None]:
    """Turn running out of memory into a UserError that names the settings to lower."""
    advice = "Lower --batch-size, --seq-len or --speed-contexts, or take --dtype bfloat16"
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise UserError(f"out of GPU memory: {str(error).splitlines()[0]}", fix=advice) from error
    except MemoryError as error:
        raise UserError("out of memory", fix=advice) from error
    except RuntimeError as error:  # torch's allocator on the CPU has no type of its own
        if "not enough memory" not in str(error) and "can't allocate" not in str(error):
            raise
        raise UserError(f"out of memory: {str(error).splitlines()[0]}", fix=advice) from error
    except OSError as error:
        if error.errno != errno.ENOMEM:
            raise
        raise UserError("out of memory", fix=advice) from error
