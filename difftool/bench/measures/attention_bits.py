"""What low bits would do: attention logits, and all linears of the blocks, fake-quantised.

Attention logits are rounded as in Figure 8 of arXiv 2410.05258 (dynamic absmax). Linears have
symmetric weights, a scale per output channel, and dynamic symmetric activations; lambda projections
and routers stay in floating point, as do embeddings and the head. Windows run one by one, so that a
scale "per tensor" is one per sequence and the batch size does not matter. Every pass runs the same
attention formula, so that nothing but the rounding differs.
"""

import math
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Literal

import torch
from pydantic import Field

from difftool.bench.attention import Change, observed_attention
from difftool.bench.blocks import Linear, block_linears, other_matrices
from difftool.bench.fake_quant import Scheme, quantise_logits, quantised_linears
from difftool.bench.measures.perplexity import token_nats
from difftool.bench.options import BenchOptions
from difftool.bench.result import Figure, MeasureResult, Progress, Table
from difftool.bench.subject import Subject
from difftool.bench.summary import format_number
from difftool.bench.text import encode, read_text, text_name, whole_windows

TITLE = "Low bits"
WINDOWS = 8  # unless limited
LOGIT_BITS = (16, 8, 6, 4)
SCHEMES = (
    Scheme(8, 8, "tensor"),
    Scheme(8, 8, "token"),
    Scheme(4, 8, "tensor"),
    Scheme(4, 8, "token"),
    Scheme(4, 4, "tensor"),
    Scheme(4, 4, "token"),
)
LEFT_IN_FLOAT = ("lambda_proj", "router", "gate", "shared_expert_gate")  # small, and they decide
CELLS = ("accuracy#", "perplexity#", "× full#")


class Score(MeasureResult):
    """How well the next token is predicted."""

    perplexity: float
    perplexity_stderr: float | None = Field(description="over windows; None of one window")
    accuracy: float = Field(description="share of tokens that were held the likeliest")
    ratio: float = Field(description="of the perplexity to that in floating point")


class LinearScore(Score):
    """The score with all linears of the blocks quantised."""

    weight_bits: int
    activation_bits: int
    granularity: Literal["tensor", "token"] = Field(
        description="a scale of the activations for each: tensor (of one sequence) or token"
    )

    @property
    def scheme(self) -> Scheme:
        return Scheme(self.weight_bits, self.activation_bits, self.granularity)


class Result(MeasureResult):
    """Perplexity and next-token accuracy by bits."""

    text: str = Field(description="name of the file, or heldout.txt for the built-in one")
    windows: int
    seq_len: int
    full: Score = Field(description="nothing quantised")
    attention: dict[int, Score] = Field(description="by bits of the attention logits")
    linears: tuple[LinearScore, ...]
    quantised_parameters: int = Field(description="weights of linears in the blocks")
    left_parameters: dict[str, int] = Field(
        description="other matrices in the blocks, left as they are, by path in a layer: "
        "routers, lambda projections, experts that are fused into one tensor"
    )


def measure(subject: Subject, options: BenchOptions, progress: Progress) -> Result:
    """Score whole windows of the text, one by one, with this and that quantised.

    Raises:
        UserError: no tokenizer, a text shorter than one window, or a model not run by torch.
    """
    start, ids = encode(read_text(options.text), subject.require_tokenizer())
    windows = whole_windows(start, ids, options.seq_len)[: options.limit or WINDOWS]
    linears = _choose_linears(subject)
    schemes = SCHEMES if linears else ()  # a quantised model has none that could be rounded
    passes = 1 + len(LOGIT_BITS) + len(schemes)
    trial = _Trial(subject, windows, max(1, len(start)), progress, passes * len(windows))
    full = trial.run(nullcontext())
    attention = {bits: trial.run(nullcontext(), quantise_logits(bits)) for bits in LOGIT_BITS}
    by_scheme = {
        scheme: trial.run(quantised_linears(linears.values(), scheme)) for scheme in schemes
    }
    return Result(
        text=text_name(options.text),
        windows=len(windows),
        seq_len=options.seq_len,
        full=_score(full, full),
        attention={bits: _score(losses, full) for bits, losses in attention.items()},
        linears=tuple(
            LinearScore(**vars(scheme), **dict(_score(losses, full)))
            for scheme, losses in by_scheme.items()
        ),
        quantised_parameters=sum(linear.weight.numel() for linear in linears.values()),
        left_parameters=other_matrices(subject.module, linears),
    )


def _choose_linears(subject: Subject) -> dict[str, Linear]:
    """Return the linears to quantise, those that are plain ones in floating point."""
    return {
        name: linear
        for name, linear in block_linears(subject.module).items()
        if type(linear) in Linear.__args__
        and linear.weight.is_floating_point()
        and name.rpartition(".")[2] not in LEFT_IN_FLOAT
    }


@dataclass(frozen=True)
class _Losses:
    """Nats [N, T] of each token asked for, and 1.0 where it was the likeliest, else 0.0."""

    nats: torch.Tensor
    hits: torch.Tensor


@dataclass
class _Trial:
    """Scores the windows again and again, and tells how far it is."""

    subject: Subject
    windows: torch.Tensor
    first: int  # token of a window that is asked for
    progress: Progress
    total: int
    done: int = 0

    def run(self, changed: AbstractContextManager[None], change: Change | None = None) -> _Losses:
        losses = []
        with changed, observed_attention(self.subject.module, change=change):
            for window in self.windows:
                self.progress("attention-bits", self.done, self.total)
                losses.append(self._score_window(window))
                self.done += 1
        self.progress("attention-bits", self.done, self.total)
        return _Losses(
            torch.stack([loss.nats for loss in losses]), torch.stack([loss.hits for loss in losses])
        )

    def _score_window(self, window: torch.Tensor) -> _Losses:
        logits = self.subject.model.logits(window[None])[0, self.first - 1 : -1]  # [T, V]
        targets = window[self.first :]
        nats = token_nats(logits, targets).double()
        hits = (logits.argmax(-1).cpu() == targets).double()
        return _Losses(nats, hits.masked_fill(nats.isnan(), math.nan))


def _score(losses: _Losses, full: _Losses) -> Score:
    by_window = losses.nats.mean(1)
    nats = by_window.mean().item()
    perplexity = _exp(nats)
    stderr = None
    if len(by_window) > 1:
        stderr = perplexity * by_window.std().item() / math.sqrt(len(by_window))
    return Score(
        perplexity=perplexity,
        perplexity_stderr=stderr,
        accuracy=losses.hits.mean().item(),
        ratio=_exp(nats - full.nats.mean().item()),
    )


def _exp(nats: float) -> float:
    return math.inf if nats > 700 else math.exp(nats)


def headline(result: Result) -> list[Figure]:
    """Return what decides: 4-bit attention logits, W8A8 both ways, W4A4."""
    four = result.attention[4]
    figures = [
        Figure("accuracy, 4-bit attention logits", four.accuracy, better="higher"),
        _perplexity("perplexity, 4-bit attention logits", four),
    ]
    told = (Scheme(8, 8, "tensor"), Scheme(8, 8, "token"), Scheme(4, 4, "token"))
    figures += [
        _perplexity(f"perplexity, {score.scheme}", score)
        for score in result.linears
        if score.scheme in told
    ]
    return figures


def _perplexity(name: str, score: Score) -> Figure:
    return Figure(name, score.perplexity, stderr=score.perplexity_stderr, better="lower")


def tables(results: Mapping[str, Result]) -> list[Table]:
    """Return the scores by bits of attention logits, and by bits of linears."""
    return [_attention_table(results), _linears_table(results)]


def _attention_table(results: Mapping[str, Result]) -> Table:
    rows = []
    for name, result in results.items():
        rows.append((name, "full", *_cells(result.full)))
        rows += [(name, str(bits), *_cells(score)) for bits, score in result.attention.items()]
    return Table(
        "Attention logits in low bits",
        ("checkpoint", "bits", *CELLS),
        tuple(rows),
        "Logits that the mask allows to look at, rounded with one dynamic scale per layer and "
        "sequence (absmax), before the softmax; the accuracy is that of the next token.",
    )


def _linears_table(results: Mapping[str, Result]) -> Table:
    rows, left = [], []
    for name, result in results.items():
        rows.append((name, "full", *_cells(result.full)))
        rows += [(name, str(score.scheme), *_cells(score)) for score in result.linears]
        left.append(f"{name} {result.quantised_parameters:,} ({_left(result)})")
    return Table(
        "Linears of the blocks in low bits",
        ("checkpoint", "scheme", *CELLS),
        tuple(rows),
        "Round to nearest, symmetric, without calibration: weights with a scale per output "
        "channel, activations with a dynamic one per tensor of one sequence or per token. "
        f"Parameters quantised: {'; '.join(left)}.",
    )


def _left(result: Result) -> str:
    if not result.left_parameters:
        return "all matrices of the blocks"
    left = ", ".join(f"{path} {count:,}" for path, count in result.left_parameters.items())
    return f"left as they are: {left}"


def _cells(score: Score) -> tuple[str, ...]:
    numbers = (score.accuracy, score.perplexity, score.ratio)
    return tuple(format_number(number, 4) for number in numbers)
