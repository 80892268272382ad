"""Charts of a report as SVG: the same each time, fit for a page, and safe from names."""

import math
import re
from xml.etree import ElementTree

import matplotlib
import pytest
from made_reports import EVIL

from difftool.bench.charts import LONGEST, draw_charts, short_names, style
from difftool.bench.charts.svg import to_svg


def drawn(*labels: str) -> str:
    with matplotlib.rc_context(style.SETTINGS):
        figure, axes = style.new_figure()
        for index, label in enumerate(labels or ("one",)):
            axes.plot([1, 2, 3], [1, 10, 100 + index], label=label, **style.series(index))
        axes.bar([1, 2], [3, 4], hatch=style.hatch(1))
        axes.set_yscale("log")
        axes.set_title("a <b> & c")
        style.legend(axes)
        return to_svg(figure, "here-0", "What & <why>")


def test_a_drawing_is_the_same_bytes_each_time() -> None:
    assert drawn() == drawn()


def test_a_drawing_keeps_text_as_text_and_takes_the_ink_of_the_page() -> None:
    svg = drawn()
    root = ElementTree.fromstring(svg)
    texts = ["".join(element.itertext()) for element in root.iter() if element.tag.endswith("text")]
    assert "a <b> & c" in texts and "one" in texts
    assert "102" in texts  # a power of ten, its exponent raised
    assert "#000000" not in svg and "currentColor" in svg and root.get("fill") == "currentColor"
    assert "font-family" not in svg and "<style" not in svg and "<metadata" not in svg
    assert root.get("aria-label") == "What & <why>"
    assert "width" not in root.attrib and "viewBox" in root.attrib


def test_every_reference_inside_a_drawing_has_its_id_and_every_id_its_prefix() -> None:
    svg = drawn()
    ids = re.findall(r'\bid="([^"]+)"', svg)
    references = set(re.findall(r'(?:xlink:href="#|url\(#)([^")]+)', svg))
    assert references == set(ids) and len(ids) == len(set(ids))
    assert ids and all(name.startswith("here-0-") for name in ids)


def test_names_in_charts_are_short_different_and_no_formulas() -> None:
    names = [
        "plain",
        "_hidden",
        "a$b$c",
        "x" * 90,
        "x" * 90 + "y",
        "x" * 91,
        "bad\x00\n",
        " ",
        EVIL,
    ]
    short = short_names(names)
    assert short[:3] == ["plain", "·_hidden", r"a\$b\$c"]
    assert len(set(short)) == len(names)
    assert all(len(name) <= LONGEST + 8 and name.isprintable() for name in short)
    shown = "".join(ElementTree.fromstring(drawn(*short)).itertext())
    assert all(name.replace(r"\$", "$") in shown for name in short)


def test_a_heat_map_leaves_out_nan_and_keeps_its_limits() -> None:
    figure, axes = style.new_figure()
    image = style.heat_map(axes, [[0.25, math.nan]], label="λ", limits=(0, 1))
    assert image.get_clim() == (0, 1)
    colours = image.to_rgba(image.get_array())
    assert colours[0, 0, 3] == 1 and colours[0, 1, 3] == 0  # the second cell is transparent
    assert figure.axes[1].get_ylabel() == "λ"


@pytest.mark.parametrize(
    ("values", "expected", "refused"),
    [((1, 27_600), "10,000", "$"), ((3.1, 3.9), "3.4", "×"), ((1e-7, 1e-2), "1e−5", "$")],
)
def test_a_logarithmic_scale_has_plain_numbers(
    values: tuple[float, float], expected: str, refused: str
) -> None:
    figure, axes = style.new_figure()
    axes.plot(values)
    style.use_log_scale(axes)
    figure.draw_without_rendering()
    labels = [label.get_text() for label in axes.get_yticklabels(which="both")]
    assert expected in labels and refused not in "".join(labels)


def test_series_that_are_equal_all_show() -> None:
    widths = [style.series(index)["linewidth"] for index in range(3)]
    assert widths == sorted(widths, reverse=True) and len(set(widths)) == 3


def test_series_differ_in_colour_line_or_marker_and_bars_in_hatching() -> None:
    seven = range(len(style.COLOURS))
    assert len({style.colour(i) for i in seven}) == len({style.marker(i) for i in seven}) == 7
    assert len({style.hatch(i) for i in seven}) == 7
    assert len({tuple(style.series(i).values()) for i in range(28)}) == 28


def test_a_measure_without_drawings_has_none() -> None:
    assert draw_charts("no-such-measure", {}) == []
