"""Perplexity on a text, in windows that slide by a stride; and bits per byte.

Every token is scored once, with the context that its window gives it, as in the strided evaluation
of Radford et al. (2019) and transformers' guide to perplexity. Bits per byte counts the bytes of
the scored text, so it compares models whose tokenizers differ.
"""

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from pydantic import Field
from transformers import PreTrainedTokenizerBase

from difftool.bench.options import BenchOptions
from difftool.bench.result import Figure, MeasureResult, Progress, Table
from difftool.bench.subject import Subject
from difftool.bench.text import Window, cut_windows, encode, read_text, text_name
from difftool.errors import UserError

TITLE = "Perplexity"
CHUNK = 2**24  # logits that are held in float32 at a time


class Result(MeasureResult):
    """Mean negative log-likelihood of the text and what follows from it."""

    perplexity: float = Field(description="exp of nats_per_token")
    perplexity_stderr: float = Field(description="from nats_stderr, to first order")
    nats_per_token: float
    nats_stderr: float = Field(description="of the mean, windows taken as independent")
    bits_per_byte: float
    tokens: int = Field(description="scored")
    bytes: int = Field(description="of UTF-8 that the scored tokens stand for")
    windows: int
    seq_len: int
    stride: int
    text: str = Field(description="name of the file")


def measure(subject: Subject, options: BenchOptions, progress: Progress) -> Result:
    """Score the text; `options.limit` keeps the first so many windows.

    Raises:
        UserError: no tokenizer, or a text of less than two tokens.
    """
    tokenizer = subject.require_tokenizer()
    text = read_text(options.text)
    start, ids = encode(text, tokenizer)
    stride = min(options.stride or options.seq_len // 2, options.seq_len - len(start))
    windows = list(cut_windows(start, ids, options.seq_len, stride))[: options.limit]
    if not windows:
        raise UserError(f"the text {text_name(options.text)} has no token to score")
    losses = list(score_windows(subject, windows, options.batch_size, progress))
    tokens = sum(window.scored for window in windows)
    nats = math.fsum(math.fsum(loss.tolist()) for loss in losses)
    size = _scored_bytes(text, ids, tokens, tokenizer, has_start=bool(start))
    stderr = clustered_stderr([(float(loss.sum()), len(loss)) for loss in losses])
    perplexity = _exp(nats / tokens)
    return Result(
        perplexity=perplexity,
        perplexity_stderr=perplexity * stderr,
        nats_per_token=nats / tokens,
        nats_stderr=stderr,
        bits_per_byte=nats / math.log(2) / size,
        tokens=tokens,
        bytes=size,
        windows=len(windows),
        seq_len=options.seq_len,
        stride=stride,
        text=text_name(options.text),
    )


def headline(result: Result) -> list[Figure]:
    """Perplexity and bits per byte."""
    relative = result.nats_stderr / result.nats_per_token if result.nats_per_token else 0.0
    return [
        Figure("perplexity", result.perplexity, result.perplexity_stderr, "lower", 5),
        Figure("bits per byte", result.bits_per_byte, result.bits_per_byte * relative, "lower", 4),
    ]


def tables(results: Mapping[str, Result]) -> list[Table]:
    """Return every figure of every checkpoint."""
    rows = [
        (
            name,
            f"{r.nats_per_token:.5f} ± {r.nats_stderr:.5f}",
            f"{r.perplexity:.4f} ± {r.perplexity_stderr:.4f}",
            f"{r.bits_per_byte:.5f}",
            f"{r.tokens:,}",
            f"{r.bytes:,}",
        )
        for name, r in results.items()
    ]
    one = next(iter(results.values()))
    note = f"{one.text}, {one.windows} windows of {one.seq_len} tokens, {one.stride} apart."
    columns = ("checkpoint", "nats/token#", "perplexity#", "bits/byte#", "tokens#", "bytes#")
    return [Table("Perplexity", columns, tuple(rows), note)]


def score_windows(
    subject: Subject, windows: Sequence[Window], batch_size: int, progress: Progress
) -> Iterator[torch.Tensor]:
    """Yield for each window the nats [scored] of its scored tokens, in float32 on the CPU.

    Windows of one length run together; padding would make rounding depend on the batch.
    """
    done = 0
    for batch in _batches(windows, batch_size):
        tokens = torch.stack([window.tokens for window in batch])
        logits = subject.model.logits(tokens)
        for row, window in enumerate(batch):
            first = len(window.tokens) - window.scored
            yield token_nats(logits[row, first - 1 : -1], window.tokens[first:])
        done += len(batch)
        progress("perplexity", done, len(windows))


def _batches(windows: Sequence[Window], batch_size: int) -> Iterator[list[Window]]:
    batch: list[Window] = []
    for window in windows:
        if batch and (len(batch) == batch_size or len(batch[0].tokens) != len(window.tokens)):
            yield batch
            batch = []
        batch.append(window)
    yield batch


def token_nats(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Return -log p [T] of targets [T] under logits [T, V], few float32 logits at a time."""
    rows = max(1, CHUNK // logits.shape[-1])
    parts = [
        torch.nn.functional.cross_entropy(part.float(), target.to(part.device), reduction="none")
        for part, target in zip(torch.split(logits, rows), torch.split(targets, rows), strict=True)
    ]
    return torch.cat(parts).cpu()


def clustered_stderr(clusters: Sequence[tuple[float, int]]) -> float:
    """Return the standard error of the mean of all items, those of a cluster being dependent.

    Each cluster is (sum, count). The ratio estimator's variance (Cochran 1977, eq. 6.13):
    n/(n-1) Σ (sum_i - mean·count_i)² / (Σ count_i)²; NaN for fewer than two clusters.
    """
    n = len(clusters)
    if n < 2:
        return math.nan
    count = sum(c for _, c in clusters)
    mean = math.fsum(s for s, _ in clusters) / count
    spread = math.fsum((s - mean * c) ** 2 for s, c in clusters)
    return math.sqrt(n / (n - 1) * spread) / count


def _scored_bytes(
    text: str, ids: list[int], tokens: int, tokenizer: PreTrainedTokenizerBase, *, has_start: bool
) -> int:
    """Return the UTF-8 bytes of the scored tokens: all of the text, unless it was cut short."""
    unscored = 0 if has_start else 1
    end = unscored + tokens
    whole = len(text.encode()) if end == len(ids) else _decoded_bytes(ids[:end], tokenizer)
    return whole - _decoded_bytes(ids[:unscored], tokenizer)


def _decoded_bytes(ids: list[int], tokenizer: PreTrainedTokenizerBase) -> int:
    decoded = tokenizer.decode(ids, clean_up_tokenization_spaces=False)
    assert isinstance(decoded, str)
    return len(decoded.encode())


def _exp(nats: float) -> float:
    """Return exp, infinite where a float cannot hold it; NaN stays NaN."""
    return math.inf if nats > 700 else math.exp(nats)
