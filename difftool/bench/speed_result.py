"""What timing found on one checkpoint, and the statistics of repeated timings."""

import statistics
from collections.abc import Callable, Sequence

from pydantic import BaseModel, ConfigDict, Field

from difftool.bench.result import MeasureResult
from difftool.bench.speed_timing import Cell, Trial


class Spread(BaseModel):
    """A figure of repeated timings, and its ratio to the first checkpoint's in the same round."""

    model_config = ConfigDict(frozen=True, extra="forbid", ser_json_inf_nan="strings")

    median: float
    low: float = Field(description="smallest")
    high: float = Field(description="largest")
    lower_quartile: float
    upper_quartile: float
    ratio: float | None = Field(
        description="median over the repetitions of the ratio to the first checkpoint; null where "
        "that one was not timed so"
    )
    ratio_low: float | None = Field(description="smallest of these ratios")
    ratio_high: float | None = Field(description="largest of these ratios")
    values: tuple[float, ...] = Field(description="a figure per repetition")

    @property
    def error(self) -> float | None:
        """Half the interquartile range; None for a single value, which has no spread."""
        return (self.upper_quartile - self.lower_quartile) / 2 if len(self.values) > 1 else None


class CellResult(BaseModel):
    """`batch` prompts of `context` tokens each, read and continued."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    batch: int
    context: int
    ttft_ms: Spread = Field(description="milliseconds from the prompts to the first tokens' ids")
    prefill: Spread = Field(description="tokens of the prompts read per second")
    decode: Spread = Field(
        description="tokens written per second: the batch by the median step's seconds"
    )
    peak_rss: int = Field(description="most resident bytes of the process, Python and torch too")
    peak_gpu: int | None = Field(description="most bytes of tensors on the GPU; null without CUDA")
    kv_bytes: int = Field(description="that the KV cache held after the prompts")

    @property
    def cell(self) -> Cell:
        return Cell(batch=self.batch, context=self.context)

    @property
    def kv_bytes_per_token(self) -> float:
        """Bytes of the KV cache per token in it."""
        return self.kv_bytes / (self.batch * self.context)


class Result(MeasureResult):
    """Speed and memory of one checkpoint, timed in turns with the others."""

    cells: tuple[CellResult, ...]
    skipped: tuple[str, ...] = Field(description="what was asked for and not timed, and why")
    parameters: int = Field(description="of the model in memory; tied ones count once")
    weight_bytes: int = Field(description="of the tensors on disk")
    start_rss: int = Field(description="resident bytes before the model was loaded")
    repetitions: int
    steps: int = Field(description="tokens decoded after each prompt")
    threads: int = Field(description="that torch used")
    dtype: str
    device: str
    attention: str = Field(description="transformers' name of the attention")
    kernels: tuple[str, ...] = Field(description="fused attention operators that torch called")
    compiled: bool = Field(description="whether it ran under torch.compile")

    @property
    def shown(self) -> CellResult:
        """The cell of the summary: the first batch size at the largest context."""
        first = [cell for cell in self.cells if cell.batch == self.cells[0].batch]
        return max(first, key=lambda cell: cell.context)


def spread(values: Sequence[float], firsts: Sequence[float] | None) -> Spread:
    """Summarise a figure per repetition.

    Args:
        values: of this checkpoint.
        firsts: of the first checkpoint in the same repetitions; None where it has none.
    """
    pairs = zip(values, firsts, strict=True) if firsts is not None else ()
    ratios = [value / first for value, first in pairs]
    lower, upper = _quartiles(values)
    return Spread(
        median=statistics.median(values),
        low=min(values),
        high=max(values),
        lower_quartile=lower,
        upper_quartile=upper,
        ratio=statistics.median(ratios) if ratios else None,
        ratio_low=min(ratios, default=None),
        ratio_high=max(ratios, default=None),
        values=tuple(values),
    )


def _quartiles(values: Sequence[float]) -> tuple[float, float]:
    """Return the first and third quartile, linear between the two nearest values."""
    if len(values) == 1:
        return values[0], values[0]
    lower, _, upper = statistics.quantiles(values, n=4, method="inclusive")
    return lower, upper


def summarise_cell(
    cell: Cell, trials: Sequence[Trial], firsts: Sequence[Trial] | None
) -> CellResult:
    """Summarise the trials of a checkpoint beside the first one's of the same repetitions."""

    def figure(of: Callable[[Trial], float]) -> Spread:
        beside = None if firsts is None else [of(trial) for trial in firsts]
        return spread([of(trial) for trial in trials], beside)

    on_gpu = [trial.peak_gpu for trial in trials if trial.peak_gpu is not None]
    return CellResult(
        batch=cell.batch,
        context=cell.context,
        ttft_ms=figure(lambda trial: trial.first_token * 1000),
        prefill=figure(lambda trial: cell.batch * cell.context / trial.prefill),
        decode=figure(lambda trial: cell.batch / statistics.median(trial.steps)),
        peak_rss=max(trial.peak_rss for trial in trials),
        peak_gpu=max(on_gpu, default=None),
        kv_bytes=trials[-1].kv_bytes,
    )
