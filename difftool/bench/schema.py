"""docs/report.md: every field of report.json, as the types in the code describe it.

`python -m difftool.bench.schema > docs/report.md` writes it again.
"""

import re
from collections.abc import Iterator
from typing import Any

from difftool.bench.measures import load_measure, measure_names
from difftool.bench.report import SCHEMA, Report
from difftool.bench.result import MeasureResult

Schema = dict[str, Any]

INTRODUCTION = f"""# report.json

`difftool bench` writes three files into its output folder: `report.json`, which holds everything
that was found; `report.md` and `report.html`, which show it. This page lists the fields of
`report.json`, schema version {SCHEMA}; a reader refuses every other version.

Numbers that are not finite stand as strings: `"NaN"`, `"Infinity"`, `"-Infinity"`.

This page is generated: `python -m difftool.bench.schema > docs/report.md`."""


def describe_schema() -> str:
    """Return docs/report.md: the report's own fields, then each measure's result."""
    blocks = [INTRODUCTION, *_describe_model(Report.model_json_schema(), "The report", "##")]
    for name in measure_names():
        module = load_measure(name)
        heading = f"{module.TITLE}: `results.{name}`"
        blocks += _describe_model(module.Result.model_json_schema(), heading, "##")
    return "\n\n".join(blocks) + "\n"


def _describe_model(schema: Schema, heading: str, level: str) -> Iterator[str]:
    """Yield headings, sentences and tables of a model and of every model inside it."""
    yield f"{level} {heading}"
    yield from _describe_fields(schema)
    for name, inner in schema.get("$defs", {}).items():
        if name != MeasureResult.__name__:
            yield f"{level}# {name}"
            yield from _describe_fields(inner)


def _describe_fields(schema: Schema) -> Iterator[str]:
    if "description" in schema:
        yield _prose(schema["description"].partition("\n\n")[0])
    rows = [
        f"| `{name}` | {_type(field)} | {_prose(field.get('description', ''))} |"
        for name, field in schema.get("properties", {}).items()
    ]
    if rows:
        yield "\n".join(["| field | type | meaning |", "| :--- | :--- | :--- |", *rows])


def _type(field: Schema) -> str:
    """Return a type in words: "array of integer", "string or null", "object of Step"."""
    if "anyOf" in field:
        return " or ".join(_type(choice) for choice in field["anyOf"])
    if "enum" in field:
        return " or ".join(f"`{value}`" for value in field["enum"])
    if "$ref" in field:
        name: str = field["$ref"].rpartition("/")[2]
        return "a measure's result" if name == MeasureResult.__name__ else name
    kind: str = field.get("type", "anything")
    if "prefixItems" in field:
        return f"{kind} of {', '.join(_type(item) for item in field['prefixItems'])}"
    inside = field.get("items") or field.get("additionalProperties")
    return f"{kind} of {_type(inside)}" if isinstance(inside, dict) else kind


def _prose(text: str) -> str:
    """Return a sentence from the code on one line, its backticks as they are."""
    return re.sub(r"([<>|*\[\]])", r"\\\1", " ".join(text.split()))


if __name__ == "__main__":
    print(describe_schema(), end="")
