"""matplotlib's SVG, made fit to stand inside an HTML page: in its ink and font, ids of its own."""

import io
import re
from xml.etree import ElementTree

from matplotlib.figure import Figure

SVG = "http://www.w3.org/2000/svg"
LINK = "{http://www.w3.org/1999/xlink}href"
REFERENCE = re.compile(r"(?<=url\(#)[^)]+")
FONT = re.compile(r"font-family: [^;]+;? ?")
NUMBER = re.compile(r"-?\d+\.\d{3,}")
NOTHING = dict.fromkeys(("Creator", "Date", "Format", "Type"))


def to_svg(drawing: Figure, prefix: str, title: str) -> str:
    """Return a drawing as one `<svg>` element, the same bytes for the same drawing.

    Text stays text, in the page's font. What is black takes the colour of the page's text, and
    nothing lies behind it.

    Args:
        drawing: the whole figure.
        prefix: of all ids, so that they are unique in a page.
        title: what a screen reader says.
    """
    file = io.BytesIO()
    drawing.savefig(file, format="svg", transparent=True, metadata=NOTHING)
    root = ElementTree.fromstring(file.getvalue())
    for parent in list(root.iter()):
        for child in [one for one in parent if one.tag == f"{{{SVG}}}style"]:
            parent.remove(child)
    used = {name for element in root.iter() for name in _references(element)}
    for element in root.iter():
        _rewrite(element, used, prefix)
    del root.attrib["width"], root.attrib["height"]
    root.attrib |= {"role": "img", "aria-label": title, "fill": "currentColor"}
    return _to_text(root)


def _references(element: ElementTree.Element) -> list[str]:
    link = element.get(LINK, "")
    named = [name for value in element.attrib.values() for name in REFERENCE.findall(value)]
    return [*named, link[1:]] if link.startswith("#") else named


def _rewrite(element: ElementTree.Element, used: set[str], prefix: str) -> None:
    """Prefix ids and references, drop ids that nothing refers to, drop indentation."""
    name = element.attrib.pop("id", None)
    for key, value in element.attrib.items():
        element.attrib[key] = _attribute(key, value, prefix)
    if name in used:
        element.attrib["id"] = f"{prefix}-{name}"
    if not (element.text or "").strip():
        element.text = None
    element.tail = None


def _attribute(key: str, value: str, prefix: str) -> str:
    """Return an attribute's value in the page: two decimals, the page's ink, its ids."""
    match key:
        case "style":
            value = value.replace(": #000000", ": currentColor")
            return REFERENCE.sub(lambda found: f"{prefix}-{found[0]}", FONT.sub("", value))
        case "clip-path":
            return REFERENCE.sub(lambda found: f"{prefix}-{found[0]}", value)
        case "d" | "points":
            return NUMBER.sub(lambda number: f"{float(number[0]):.2f}", " ".join(value.split()))
        case _ if key == LINK:
            return f"#{prefix}-{value[1:]}" if value[0] == "#" else "".join(value.split())
    return value


def _to_text(root: ElementTree.Element) -> str:
    ElementTree.register_namespace("", SVG)
    ElementTree.register_namespace("xlink", LINK[1:].partition("}")[0])
    return ElementTree.tostring(root, encoding="unicode")
