"""report.html: the whole report on one page that needs nothing beside it, no network, no script."""

from importlib.resources import files

import jinja2

from difftool import __version__
from difftool.bench import contents
from difftool.bench.report import Report
from difftool.bench.summary import ARROWS, KEY, MISSING, summarise


def render_html(report: Report) -> str:
    """Return report.html; the same report gives the same bytes.

    Everything that comes from a checkpoint is escaped; only the charts, whose text matplotlib
    escapes, are put in as they are.
    """
    environment = jinja2.Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=jinja2.StrictUndefined
    )
    template = environment.from_string(
        (files("difftool.bench") / "template.html").read_text(encoding="utf-8")
    )
    return template.render(
        report=report,
        contents=contents,
        sections=contents.sections(report, charts=True),
        lines=summarise(report),
        arrows=ARROWS,
        key=KEY,
        missing=MISSING,
        version=__version__,
    )
