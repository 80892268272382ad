"""report.json: what a bench found, with all that is needed to read it a year later."""

import json
import os
import platform
from importlib import metadata
from pathlib import Path
from typing import Any

import psutil
import torch
from pydantic import BaseModel, ConfigDict, Field, SerializeAsAny, ValidationError

from difftool.bench.measures import load_measure
from difftool.bench.options import BenchOptions
from difftool.bench.result import Figure, MeasureResult
from difftool.errors import UserError
from difftool.provenance import Provenance, versions

SCHEMA = 1
_FROZEN = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")


class Environment(BaseModel):
    """The machine and the versions that the figures depend on."""

    model_config = _FROZEN

    cpu: str
    cores: int = Field(description="that this process may use")
    threads: int = Field(description="that torch used")
    memory_bytes: int
    gpu: str | None
    platform: str
    versions: dict[str, str]


class SubjectReport(BaseModel):
    """One checkpoint and what was found on it."""

    model_config = _FROZEN

    name: str = Field(description="unique in the report")
    source: str = Field(description="hub id, folder name or tiny; free of local paths")
    architecture: str
    family: str = Field(description="model_type of the host")
    targets: tuple[str, ...] = Field(description="surgery that it has had")
    parameters: int
    weight_bytes: int = Field(description="of the tensors on disk")
    dtype: str = Field(description="it was run in")
    attention: str = Field(description="attention kernel")
    device: str
    provenance: Provenance
    results: dict[str, SerializeAsAny[MeasureResult]] = Field(description="by measure")
    problems: tuple[str, ...] = Field(description="what could not be measured, or is not finite")


class Report(BaseModel):
    """The whole bench."""

    model_config = _FROZEN

    schema_version: int = SCHEMA
    created: str = Field(description="ISO 8601, UTC")
    seconds: float
    complete: bool = Field(description="false where it was interrupted or something failed")
    options: BenchOptions
    environment: Environment
    subjects: tuple[SubjectReport, ...]

    def results(self, measure: str) -> dict[str, MeasureResult]:
        """Return one measure's results by checkpoint, those that have any."""
        return {s.name: s.results[measure] for s in self.subjects if measure in s.results}

    @property
    def measures(self) -> tuple[str, ...]:
        """The measures that have a result, in the order in which they ran."""
        return tuple(dict.fromkeys(name for s in self.subjects for name in s.results))

    @property
    def problems(self) -> list[str]:
        return [f"{s.name}: {problem}" for s in self.subjects for problem in s.problems]


def headline(subject: SubjectReport) -> dict[str, Figure]:
    """Return all summary figures of a checkpoint by name."""
    figures = [
        figure
        for measure, result in subject.results.items()
        for figure in load_measure(measure).headline(result)
    ]
    return {figure.name: figure for figure in figures}


def describe_environment() -> Environment:
    """Return what is known of this machine."""
    return Environment(
        cpu=_cpu_name(),
        cores=_usable_cores(),
        threads=torch.get_num_threads(),
        memory_bytes=psutil.virtual_memory().total,
        gpu=torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        platform=platform.platform(),
        versions={**versions(), "numpy": metadata.version("numpy")},
    )


def _usable_cores() -> int:
    affinity = getattr(os, "sched_getaffinity", None)  # not on every system
    return len(affinity(0)) if affinity else os.cpu_count() or 1


def _cpu_name() -> str:
    information = Path("/proc/cpuinfo")
    if information.exists():
        for line in information.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def write_report(report: Report, path: Path) -> None:
    """Write report.json; the old file stays until the new one is whole."""
    new = path.with_name(f".{path.name}.new")
    text = json.dumps(report.model_dump(mode="json"), indent=2, ensure_ascii=False)
    new.write_text(text + "\n", encoding="utf-8")
    new.replace(path)


def read_report(path: Path) -> Report:
    """Return a written report, each result as its measure's own type.

    Raises:
        UserError: the file is not a report, or one of another schema version.
    """
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if content.get("schema_version") != SCHEMA:
            raise UserError(
                f"{path} has schema version {content.get('schema_version')}", f"version {SCHEMA}"
            )
        found = [_read_results(subject.pop("results")) for subject in content["subjects"]]
        for subject, results in zip(content["subjects"], found, strict=True):
            subject["results"] = results
        return Report.model_validate(content)
    except (ValidationError, ValueError, LookupError, TypeError, AttributeError) as error:
        first = str(error).splitlines()[0]
        raise UserError(f"{path} is not a report of difftool bench: {first}") from error


def _read_results(results: dict[str, Any]) -> dict[str, MeasureResult]:
    return {
        name: load_measure(name).Result.model_validate(value) for name, value in results.items()
    }
