"""What measures return and reports print: figures, tables, charts."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict

if TYPE_CHECKING:
    from matplotlib.figure import Figure as Drawing

Progress = Callable[[str, int, int], None]  # what is under way, how many are done, of how many


class MeasureResult(BaseModel):
    """What one measure found on one checkpoint; NaN and infinities stay visible in JSON."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")


@dataclass(frozen=True)
class Figure:
    """One line of the summary.

    Attributes:
        name: what it is, with its unit if it has one: "decode, tokens/s".
        value: of this checkpoint.
        stderr: standard error, or half the spread of repeated timings; None where there is none.
        better: which way is better; "" where neither is.
        digits: significant digits to print.
        ratio: to the first checkpoint, where it was taken in turns and is not just that of the
            two values.
    """

    name: str
    value: float
    stderr: float | None = None
    better: Literal["lower", "higher", ""] = ""
    digits: int = 4
    ratio: float | None = None


@dataclass(frozen=True)
class Table:
    """A table of the report; columns whose name ends in `#` hold numbers, as in `terminal`."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    note: str = ""


@dataclass(frozen=True)
class Chart:
    """A drawing of the report, with a sentence that says what to see in it."""

    title: str
    drawing: "Drawing"
    caption: str = field(default="")
