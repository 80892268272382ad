"""The report of a bench: its summary, report.json, report.md and report.html."""

import math
import re
from collections import Counter
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from made_reports import (
    EVIL,
    Page,
    made_hostile,
    made_pair,
    made_perplexity,
    made_report,
    made_subject,
)
from markdown_it import MarkdownIt

from difftool.bench import contents
from difftool.bench.html import render_html
from difftool.bench.markdown import render_markdown
from difftool.bench.options import BenchOptions
from difftool.bench.report import Report, read_report
from difftool.bench.result import Figure
from difftool.bench.schema import describe_schema
from difftool.bench.summary import compare, format_number, print_summary, summarise, summary_rows
from difftool.bench.writing import write_reports

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def report() -> Report:
    return made_pair()


@pytest.fixture(scope="module")
def html(report: Report) -> str:
    return render_html(report)


@pytest.fixture(scope="module")
def hostile() -> Report:
    return made_hostile()


@pytest.fixture(scope="module")
def hostile_html(hostile: Report) -> str:
    return render_html(hostile)


@pytest.mark.parametrize(
    ("value", "digits", "text"),
    [
        (27.6134, 4, "27.61"),
        (0.5, 4, "0.5000"),
        (0.00123456, 3, "0.00123"),
        (27613.4, 4, "27,613"),
        (134515008, 4, "1.345e8"),
        (-2.5e-7, 2, "−2.5e−7"),
        (-1.25, 3, "−1.25"),
        (640, 4, "640"),
        (0, 4, "0"),
        (math.nan, 4, "NaN"),
        (math.inf, 4, "∞"),
        (-math.inf, 4, "−∞"),
    ],
)
def test_a_number_has_its_significant_digits(value: float, digits: int, text: str) -> None:
    assert format_number(value, digits) == text


def test_the_summary_has_each_figure_with_its_error_and_its_ratio_to_the_first(
    report: Report,
) -> None:
    columns, rows = summary_rows(report)
    assert columns == ("", "plain#", "both#")
    assert rows[0] == ("perplexity ↓", "20 ± 0.40", "25 ± 0.40 ×1.2500")
    assert ("residual stream, max |x| ↓", "200", "100 ×0.5000") in rows
    assert ("cosine of paired heads, mean", "0.9000", "0.9000 ×1.0000") in rows


def test_figures_that_only_some_checkpoints_have_leave_a_dash(report: Report) -> None:
    plain = made_subject("plain", {"perplexity": made_perplexity(20.0)})
    _, rows = summary_rows(made_report(plain, report.subjects[1]))
    assert ("λ gate, mean", "–", "0.5000") in rows
    _, rows = summary_rows(made_report(report.subjects[1], plain))
    assert ("λ gate, mean", "0.5000", "–") in rows


@pytest.mark.parametrize(
    ("first", "second", "verdict"),
    [
        (Figure("x", 10, 0.3, "lower"), Figure("x", 10.84, 0.3, "lower"), ""),
        (Figure("x", 10, 0.3, "lower"), Figure("x", 10.86, 0.3, "lower"), "worse"),
        (Figure("x", 10, 0.3, "lower"), Figure("x", 9.14, 0.3, "lower"), "better"),
        (Figure("x", 10, 0.3, "higher"), Figure("x", 9.14, 0.3, "higher"), "worse"),
        (Figure("x", 10, None, "higher"), Figure("x", 10.04, None, "higher"), ""),
        (Figure("x", 10, None, "higher"), Figure("x", 10.06, None, "higher"), "better"),
        (Figure("x", 10, 0.3), Figure("x", 20, 0.3), ""),
        (Figure("x", 10, 0.3, "lower"), Figure("x", 12, 0.3, "lower", ratio=1.08), ""),
        (Figure("x", 10, 0.3, "lower"), Figure("x", 10, 0.3, "lower", ratio=1.09), "worse"),
        (Figure("x", 10, None, "lower"), Figure("x", math.nan, None, "lower"), ""),
    ],
)
def test_only_a_difference_beyond_two_standard_errors_is_better_or_worse(
    first: Figure, second: Figure, verdict: str
) -> None:
    assert compare(second, first).verdict == verdict


def test_a_ratio_of_trials_side_by_side_stands_in_place_of_that_of_the_medians() -> None:
    assert compare(Figure("x", 12, ratio=1.08), Figure("x", 10)).ratio == "1.0800"


@pytest.mark.parametrize(
    ("first", "second"), [(0.0, 1.0), (math.nan, 1.0), (1.0, math.inf), (-1, 2)]
)
def test_a_ratio_that_would_say_nothing_is_left_out(first: float, second: float) -> None:
    assert compare(Figure("x", second), Figure("x", first)).ratio == ""


def test_a_nan_is_shown_as_such_everywhere() -> None:
    broken = made_perplexity(20.0).model_copy(update={"perplexity": math.nan})
    report = made_report(
        made_subject("plain", {"perplexity": made_perplexity(20.0)}),
        made_subject("broken", {"perplexity": broken}),
    )
    assert summary_rows(report)[1][0][2] == "NaN ± 0.40"
    assert '<span class="value infinite">NaN</span>' in render_html(report)
    assert "| NaN ± 0.40 |" in render_markdown(report)


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_the_terminal_s_summary_fits_into_80_columns_and_shows_every_checkpoint(
    count: int, report: Report, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    subjects = [
        report.subjects[1].model_copy(update={"name": f"checkpoint-{i}"}) for i in range(count)
    ]
    print_summary(made_report(*subjects))
    printed = capsys.readouterr().out
    assert max(map(len, printed.splitlines())) <= 80
    assert [f"checkpoint-{i}" for i in range(count)] == re.findall(r"checkpoint-\d", printed)
    assert printed.count("25 ± 0.40") == count  # no cell is folded


def test_an_empty_bench_prints_nothing_and_still_makes_a_page(
    capsys: pytest.CaptureFixture[str],
) -> None:
    empty = made_report(made_subject("plain", {}, problems=("out of memory",)), complete=False)
    print_summary(empty)
    assert capsys.readouterr().out == ""
    assert "Nothing was measured" in render_html(empty)
    assert "out of memory" in render_html(empty) and "out of memory" in render_markdown(empty)


def test_the_page_tells_everything(report: Report, html: str) -> None:
    text = Page(html).text
    for line in summarise(report):
        assert line.name in text
        for cell in line.cells:
            assert cell is not None
            assert cell.value in text and cell.ratio in text
    for fact in ("bit-identical", "sha256:e1e1", "abc123", "A CPU & more", "LlamaForCausalLM"):
        assert fact in text
    for name in BenchOptions.model_fields:
        assert name.replace("_", "-") in text
    for section in contents.sections(report, charts=True):
        for shown in (*section.tables, *section.charts):
            assert shown.title in text
    assert "Problems" not in text and "not complete" not in text


def test_the_page_needs_nothing_beside_it(html: str) -> None:
    loads = {"src", "srcset", "data", "action", "background", "poster"}
    elements = Page(html).elements
    for tag, attributes in elements:
        assert tag not in ("script", "iframe", "object", "embed", "audio", "video", "base")
        assert not loads & attributes.keys()
        links = [attributes[key] for key in ("href", "xlink:href") if key in attributes]
        assert all(link is not None and link.startswith(("#", "data:")) for link in links)
    assert "@import" not in html
    policies = [a["content"] for _, a in elements if "http-equiv" in a]
    assert policies == ["default-src 'none'; style-src 'unsafe-inline'; img-src data:"]


def test_ids_are_unique_in_the_page_and_links_lead_somewhere(html: str, hostile_html: str) -> None:
    for page in (html, hostile_html):
        elements = Page(page).elements
        ids = Counter(attributes["id"] for _, attributes in elements if "id" in attributes)
        assert [name for name, count in ids.items() if count > 1] == []
        for _, attributes in elements:
            link = attributes.get("href") or attributes.get("xlink:href") or "#summary"
            assert not link.startswith("#") or link[1:] in ids


def test_what_a_checkpoint_says_is_text_in_the_page_and_no_markup(hostile_html: str) -> None:
    assert "<script" not in hostile_html and r"\$" not in hostile_html
    assert Page(hostile_html).text.count(EVIL) >= 8  # name, source, surgery, steps, problem …


def test_what_a_checkpoint_says_is_no_markup_in_markdown(hostile: Report) -> None:
    text = render_markdown(hostile)
    html = MarkdownIt("commonmark").enable("table").render(text)
    assert "<script" not in html and "<em>" not in html.replace("<em></em>", "")
    assert "&lt;script&gt;alert('x')&lt;/script&gt;|`$a$`*b*_c_" in html
    header = next(line for line in text.splitlines() if line.startswith("|  |"))
    assert len(re.split(r"(?<!\\)\|", header)) == 5  # three columns: none of EVIL's bars is one


def test_problems_stand_before_the_figures(hostile: Report, hostile_html: str) -> None:
    text, page = render_markdown(hostile), Page(hostile_html).text
    assert "not complete" in page[: page.index("Summary")]
    assert EVIL in page[: page.index("Summary\n")]
    assert "Not complete" in text[: text.index("## Summary")]
    assert "alert" in text[: text.index("## Summary")]


def test_the_same_report_gives_the_same_bytes(report: Report, html: str) -> None:
    again = Report.model_validate(report.model_dump() | {"subjects": report.subjects})
    assert render_html(again) == html
    assert render_markdown(report) == render_markdown(again)


def test_the_reports_are_written_whole_and_can_be_read_again(tmp_path: Path) -> None:
    broken = made_perplexity(20.0).model_copy(update={"perplexity": math.inf})
    report = made_report(made_subject("broken", {"perplexity": broken}))
    folder = tmp_path / "new" / "folder"
    write_reports(report, folder)
    names = ["report.html", "report.json", "report.md"]
    assert sorted(path.name for path in folder.iterdir()) == names
    assert read_report(folder / "report.json") == report
    assert (folder / "report.html").read_text(encoding="utf-8") == render_html(report)
    assert (folder / "report.md").read_text(encoding="utf-8") == render_markdown(report)


def test_a_report_that_cannot_be_replaced_is_left_as_it_was(report: Report, tmp_path: Path) -> None:
    (tmp_path / "report.md").mkdir()  # a folder is no file that could be replaced
    (tmp_path / "report.html").write_text("old")
    with pytest.raises(OSError):
        write_reports(report, tmp_path)
    assert (tmp_path / "report.html").read_text() == "old"
    assert read_report(tmp_path / "report.json") == report


def test_the_documented_schema_is_the_code_s() -> None:
    documented = (ROOT / "docs" / "report.md").read_text(encoding="utf-8")
    assert documented == describe_schema(), "python -m difftool.bench.schema > docs/report.md"


def test_every_field_of_a_report_is_documented(report: Report) -> None:
    documented = (ROOT / "docs" / "report.md").read_text(encoding="utf-8")

    def names(value: Any) -> set[str]:
        if isinstance(value, list):
            return set().union(*map(names, value))
        if not isinstance(value, dict):
            return set()
        free = {"results", "versions", "linears", "depth", "metrics", "options", "unseen"}
        inner = [v for key, v in value.items() if key not in free]
        keys = {key for key in value if not key.isdigit()}  # a layer is no field
        return keys | set().union(*map(names, inner))

    content = report.model_dump(mode="json")
    found = names(content) | names(content["options"])
    for subject in content["subjects"]:
        for result in subject["results"].values():
            found |= names(result)
    assert [name for name in sorted(found) if f"| `{name}` |" not in documented] == []


def test_the_template_ships_with_the_package() -> None:
    assert (files("difftool.bench") / "template.html").is_file()
