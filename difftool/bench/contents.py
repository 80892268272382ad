"""What a report tells, in its order; markdown and HTML only dress it."""

from dataclasses import dataclass

from difftool.bench.charts import DrawnChart, draw_charts
from difftool.bench.measures import load_measure
from difftool.bench.options import BenchOptions
from difftool.bench.report import Environment, Report, SubjectReport
from difftool.bench.result import Table
from difftool.inspection import describe_step
from difftool.provenance import Step
from difftool.terminal import format_bytes, format_count

Fact = tuple[str, str]


@dataclass(frozen=True)
class Section:
    """All that one measure found on all checkpoints."""

    measure: str
    title: str
    tables: list[Table]
    charts: list[DrawnChart]


@dataclass(frozen=True)
class StepInWords:
    """One step of the chain that made a checkpoint."""

    lines: list[str]
    facts: list[Fact]


def sections(report: Report, *, charts: bool) -> list[Section]:
    """Return a section for every measure that has a result; `charts` says whether to draw."""
    found = []
    for measure in report.measures:
        module, results = load_measure(measure), report.results(measure)
        drawn = draw_charts(measure, results) if charts else []
        found.append(Section(measure, module.TITLE, module.tables(results), drawn))
    return found


def title(report: Report) -> str:
    """Return the heading of the report."""
    names = [subject.name for subject in report.subjects]
    if len(names) > 3:
        names = [*names[:2], f"{len(names) - 2} more"]
    listed = ", ".join(names[:-1]) + " and " * (len(names) > 1) + "".join(names[-1:])
    return f"Bench of {listed}" if listed else "Bench"


def checkpoint_facts(subject: SubjectReport) -> list[Fact]:
    """Return what a checkpoint is and how it was run."""
    return [
        ("source", subject.source),
        ("architecture", f"{subject.architecture} ({subject.family})"),
        ("surgery", " and ".join(subject.targets) or "none"),
        ("parameters", f"{format_count(subject.parameters)} ({subject.parameters:,})"),
        ("weights", format_bytes(subject.weight_bytes)),
        ("run in", f"{subject.dtype} on {subject.device}"),
        ("attention", subject.attention),
    ]


def chain(subject: SubjectReport) -> list[StepInWords]:
    """Return the steps that made a checkpoint, the first source's first."""
    return [
        StepInWords(describe_step(step), _step_facts(step)) for step in subject.provenance.steps
    ]


def environment_facts(environment: Environment) -> list[Fact]:
    """Return the machine and the versions."""
    return [
        ("CPU", environment.cpu),
        ("cores, threads", f"{environment.cores}, {environment.threads}"),
        ("memory", format_bytes(environment.memory_bytes)),
        ("GPU", environment.gpu or "none"),
        ("platform", environment.platform),
        *environment.versions.items(),
    ]


def option_facts(options: BenchOptions) -> list[Fact]:
    """Return every option of the bench; what was not given shows its default."""
    values = options.model_dump(mode="json")
    return [(name.replace("_", "-"), _option(value)) for name, value in values.items()]


def _step_facts(step: Step) -> list[Fact]:
    plain = {name: value for name, value in step.metrics.items() if not isinstance(value, list)}
    source = step.source.id + (f" at {step.source.revision}" if step.source.revision else "")
    return [
        ("from", source),
        ("source fingerprint", step.source.fingerprint),
        ("output fingerprint", step.output_fingerprint),
        ("options", _pairs(step.options)),
        *((("figures", _pairs(plain)),) if plain else ()),
        ("versions", ", ".join(f"{name} {version}" for name, version in step.versions.items())),
        ("seconds", f"{step.seconds:g}"),
    ]


def _pairs(values: dict[str, object]) -> str:
    return ", ".join(f"{name}={_option(value)}" for name, value in values.items())


def _option(value: object) -> str:
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value)) or "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "–" if value is None else str(value)
