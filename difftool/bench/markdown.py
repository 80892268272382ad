"""report.md: the report for a pull request or a model card, without the charts."""

import re
from collections.abc import Iterable, Iterator

from difftool.bench import contents
from difftool.bench.report import Report, SubjectReport
from difftool.bench.result import Table
from difftool.bench.summary import KEY, summary_rows

SPECIAL = re.compile(r"([\\`*_{}\[\]<>#|~$&])")


def render_markdown(report: Report) -> str:
    """Return report.md; the same report gives the same text."""
    blocks = [
        f"# {escape(contents.title(report))}",
        f"{report.created}, {report.seconds:.0f} s, seed {report.options.seed}.",
        *_problems(report),
        "## Summary",
        render_table(*summary_rows(report)),
        KEY,
    ]
    for section in contents.sections(report, charts=False):
        blocks += [f"## {escape(section.title)}", *map(_details, section.tables)]
    blocks.append("## Checkpoints")
    for subject in report.subjects:
        blocks += _checkpoint(subject)
    blocks += ["## Environment", _facts(contents.environment_facts(report.environment))]
    blocks += ["## Options", _facts(contents.option_facts(report.options))]
    return "\n\n".join(blocks) + "\n"


def escape(text: str) -> str:
    """Return text that markdown shows as it is, on one line."""
    return SPECIAL.sub(r"\\\1", " ".join(text.split()))


def _problems(report: Report) -> Iterator[str]:
    if not report.complete:
        yield "**Not complete:** the bench was interrupted, or something could not be measured."
    if report.problems:
        yield "**Problems**"
        yield "\n".join(f"- {escape(problem)}" for problem in report.problems)


def _checkpoint(subject: SubjectReport) -> Iterator[str]:
    yield f"### {escape(subject.name)}"
    yield _facts(contents.checkpoint_facts(subject))
    steps = contents.chain(subject)
    if not steps:
        yield "No steps recorded: difftool did not make it."
        return
    lines = []
    for number, step in enumerate(steps, 1):
        lines.append(f"{number}. {escape(step.lines[0])}")
        lines += [f"   - {escape(line)}" for line in step.lines[1:]]
        lines += [f"   - {escape(name)}: {escape(value)}" for name, value in step.facts]
    yield "\n".join(lines)


def _details(table: Table) -> str:
    """Return a table that opens at a click."""
    parts = [f"<details><summary>{_in_html(table.title)}</summary>"]
    parts += [
        render_table(table.columns, table.rows),
        *([escape(table.note)] if table.note else []),
    ]
    return "\n\n".join([*parts, "</details>"])


def _in_html(text: str) -> str:
    """Return text for inside an HTML block, where backslashes do not escape."""
    return " ".join(text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;").split())


def render_table(columns: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a table in markdown; columns whose name ends in `#` are set right."""
    columns = tuple(columns)
    rules = ["---:" if column.endswith("#") else ":---" for column in columns]
    lines = [[escape(column.removesuffix("#")) for column in columns], rules]
    lines += [[escape(cell) for cell in row] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _facts(facts: Iterable[contents.Fact]) -> str:
    return render_table(("", ""), facts)
