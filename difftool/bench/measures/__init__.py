"""What can be measured: one file each, found by its name (`attention_bits.py`: attention-bits).

A measure `x` is `x.py` with

- TITLE, for people;
- `Result`, a `MeasureResult`: everything that was found, as it stands in report.json;
- `measure(subject, options, progress) -> Result`; a measure whose sides must take turns has
  `measure_together(sources, options, progress) -> list[Result]` instead;
- `check(options)`, if it has one, raises a UserError before anything is loaded;
- `headline(result) -> list[Figure]`, its lines in the summary;
- `tables(results) -> list[Table]`, what the report tells beyond that; `results` maps the name of
  each checkpoint to its `Result`, in the order in which they were named.

`difftool.bench.charts.x`, where it exists, has `charts(results) -> list[Chart]`.
"""

import importlib
from pathlib import Path
from types import ModuleType

from difftool.errors import UserError, did_you_mean

ORDER = ("perplexity", "tasks", "retrieval", "outliers", "attention-bits", "speed")
NOT_BY_DEFAULT = ("tasks",)  # runs where tasks are named


def measure_names() -> tuple[str, ...]:
    """Return the measures there are, without importing them; those in ORDER first."""
    files = Path(__file__).parent.glob("[!_]*.py")
    names = {path.stem.replace("_", "-") for path in files}
    return tuple(name for name in ORDER if name in names) + tuple(sorted(names - {*ORDER}))


def default_measures() -> tuple[str, ...]:
    """Return what a bench measures when nothing is named."""
    return tuple(name for name in measure_names() if name not in NOT_BY_DEFAULT)


def load_measure(name: str) -> ModuleType:
    """Import the measure called `name`; a UserError says which there are."""
    if name not in measure_names():
        raise UserError(
            f"unknown measure {name!r}",
            f"some of {', '.join(measure_names())}",
            did_you_mean(name, measure_names()).strip(),
        )
    return importlib.import_module(f"{__name__}.{name.replace('-', '_')}")
