"""The three files of a report: JSON for machines, markdown for a pull request, HTML to look at."""

from pathlib import Path

from difftool.bench.html import render_html
from difftool.bench.markdown import render_markdown
from difftool.bench.report import Report, write_report


def write_reports(report: Report, folder: Path) -> None:
    """Write report.json, report.md and report.html; each old file stays until the new is whole.

    The JSON is first: nothing measured is lost if something cannot be drawn.
    """
    folder.mkdir(parents=True, exist_ok=True)
    write_report(report, folder / "report.json")
    for name, render in (("report.md", render_markdown), ("report.html", render_html)):
        new = folder / f".{name}.new"
        new.write_text(render(report), encoding="utf-8")
        new.replace(folder / name)
