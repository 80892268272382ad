"""report.html in a browser: its figures, its width, its silence."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from made_reports import Page, made_hostile, made_pair

from difftool.bench.html import render_html
from difftool.bench.report import Report
from difftool.bench.summary import summarise

# Opens the page in a frame of the width asked for (a window is never narrower than 500 pixels) and
# writes down what it finds there.
FRAME = """<!DOCTYPE html><meta charset="utf-8"><link rel="icon" href="data:,">
<iframe src="report.html" style="width: {width}px; height: 900px; border: 0"></iframe>
<script>addEventListener("load", () => {{
const view = document.querySelector("iframe").contentWindow, page = view.document;
const all = (selector, inside = page) => [...inside.querySelectorAll(selector)];
const box = element => element.getBoundingClientRect();
const beyond = (one, whole) => one.left < whole.left - 1 || one.right > whole.right + 1
  || one.top < whole.top - 1 || one.bottom > whole.bottom + 1;
const found = document.createElement("pre");
found.textContent = JSON.stringify({{
  width: view.innerWidth,
  room: page.documentElement.clientWidth,
  needed: page.documentElement.scrollWidth,
  wide: all("body *").filter(one => !one.closest(".scroll, svg"))
    .filter(one => box(one).right > page.documentElement.clientWidth + 0.5)
    .map(one => one.outerHTML.slice(0, 80)),
  charts: all("figure svg").map(svg => [box(svg).width, box(svg).height]),
  clipped: all("figure svg").flatMap(svg =>
    all("text", svg).filter(text => beyond(box(text), box(svg))).map(text => text.textContent)),
  figures: all(".summary .value").map(one => one.textContent),
  loaded: view.performance.getEntriesByType("resource").map(one => one.name),
}});
document.body.append(found);
}});</script>"""


@pytest.fixture(scope="module")
def report() -> Report:
    return made_pair()


@pytest.fixture(scope="module")
def html(report: Report) -> str:
    return render_html(report)


@pytest.fixture(scope="module")
def chromium() -> str:
    names = ("chromium", "chromium-browser", "google-chrome")
    found = next((path for path in map(shutil.which, names) if path), None)
    if found is None:
        pytest.skip("no chromium is installed to look at the page with")
    return found


def look(chromium: str, html: str, width: int, folder: Path) -> tuple[dict[str, Any], list[str]]:
    """Open a page and return what FRAME found in it, and what the console said."""
    (folder / "report.html").write_text(html, encoding="utf-8")
    frame = folder / "frame.html"
    frame.write_text(FRAME.format(width=width), encoding="utf-8")
    command = [
        chromium,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-quic",
        "--no-first-run",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        f"--user-data-dir={folder / 'profile'}",
        "--window-size=1400,1000",
        "--allow-file-access-from-files",  # FRAME may look into the page
        "--enable-logging=stderr",
        "--dump-dom",
        frame.as_uri(),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    console = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    assert "<pre>" in done.stdout, console or done.stderr
    return json.loads(Page(done.stdout.partition("<pre>")[2]).text), console


@pytest.mark.parametrize("width", [1280, 390])
def test_the_page_shows_its_figures_loads_nothing_and_never_scrolls_sideways(
    width: int, report: Report, html: str, chromium: str, tmp_path: Path
) -> None:
    found, console = look(chromium, html, width, tmp_path)
    assert console == []
    assert found["width"] == width
    assert found["needed"] <= found["room"] and found["wide"] == []
    assert found["loaded"] == []
    assert len(found["charts"]) == html.count("<figure>") > 0
    assert all(wide >= 300 and high >= 100 for wide, high in found["charts"])
    assert found["clipped"] == []
    cells = [cell for line in summarise(report) for cell in line.cells]
    assert found["figures"] == [cell.value for cell in cells if cell is not None]


def test_what_a_checkpoint_is_called_runs_nothing(chromium: str, tmp_path: Path) -> None:
    html = render_html(made_hostile()).replace("alert(", "console.log(")
    assert "console.log(" in html
    unguarded = re.sub(r"<meta http-equiv=.*>", "", html)  # its policy would stop scripts as well
    found, console = look(chromium, unguarded, 390, tmp_path)
    assert console == []
    assert found["needed"] <= found["room"] and found["clipped"] == []
