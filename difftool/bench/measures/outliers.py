"""Outliers: how large the largest activations are, by layer; attention sinks; what surgery added.

Maximum and kurtosis are both told, for they can move apart (arXiv 2306.12929 judges by the two).
Outputs of layers and attention logits are listed as in Table 5 of arXiv 2410.05258.
"""

from collections.abc import Mapping
from itertools import chain

import torch

from difftool.bench.activations import Activations, observe
from difftool.bench.blocks import block_linears, other_matrices
from difftool.bench.options import BenchOptions
from difftool.bench.outlier_result import (
    RANKS,
    SHARES,
    SINK,
    Columns,
    Differential,
    Magnitudes,
    Result,
    Sinks,
    largest,
)
from difftool.bench.outlier_tables import tables
from difftool.bench.result import Figure, Progress
from difftool.bench.statistics import ColumnStatistics, Statistics, merge_all, quantile
from difftool.bench.subject import Subject
from difftool.bench.text import encode, read_text, text_name, whole_windows

__all__ = ["TITLE", "Result", "headline", "measure", "tables"]

TITLE = "Outliers"
WINDOWS = 16  # unless limited


def measure(subject: Subject, options: BenchOptions, progress: Progress) -> Result:
    """Run whole windows of the text through the model and watch.

    Raises:
        UserError: no tokenizer, a text shorter than one window, or a model not run by torch.
    """
    start, ids = encode(read_text(options.text), subject.require_tokenizer())
    windows = whole_windows(start, ids, options.seq_len)[: options.limit or WINDOWS]
    model = subject.module
    found = observe(model, windows, options.batch_size, progress)
    stream = [found.stream[passed] for passed in sorted(found.stream)]
    return Result(
        text=text_name(options.text),
        windows=len(windows),
        seq_len=options.seq_len,
        stream=tuple(_magnitudes(part) for part in stream),
        logits={layer: _magnitudes(part) for layer, part in found.logits.items()},
        linears={name: _magnitudes(part) for name, part in found.linears.items()},
        hidden_states=_magnitudes(merge_all(stream[1:])),
        attention_logits=_magnitudes(merge_all(found.logits.values())),
        sinks=_sinks(found.first),
        context_rms=_columns(found.context),
        differential=_differential(found) if found.gates else None,
        depth={name: tuple(part.means.tolist()) for name, part in found.depth.items()},
        unseen=other_matrices(model, block_linears(model)),
    )


def _differential(found: Activations) -> Differential:
    return Differential(
        gates=_columns(found.gates),
        cosines=_columns(found.cosines),
        context_rms=_columns(found.difference_context),
        sinks=_sinks(found.difference_first),
    )


def _magnitudes(part: Statistics) -> Magnitudes:
    return Magnitudes(
        count=part.moments.count,
        kurtosis=part.moments.kurtosis,
        top=tuple(part.top(rank) for rank in RANKS),
        median=part.median,
    )


def _columns(parts: Mapping[int, ColumnStatistics]) -> Columns:
    layers = list(parts.values())
    return Columns(
        means={layer: tuple(part.means.tolist()) for layer, part in parts.items()},
        deviations={layer: tuple(part.deviations.tolist()) for layer, part in parts.items()},
        mean=float(torch.cat([part.means for part in layers]).mean()),
        quantiles=tuple(quantile(layers, share) for share in SHARES),
    )


def _sinks(parts: Mapping[int, ColumnStatistics]) -> Sinks:
    means = {layer: tuple(part.means.tolist()) for layer, part in parts.items()}
    every = torch.tensor(list(chain.from_iterable(means.values())), dtype=torch.float64)
    share = torch.where(every.isnan(), every, (every > SINK).double()).mean()
    return Sinks(first_token=means, share=float(share))


def headline(result: Result) -> list[Figure]:
    """Return the largest of any layer, and what surgery added."""
    inputs = [value.maximum for value in result.linears.values()]
    kurtosis = largest([value.kurtosis for value in result.stream])
    figures = [
        _lower("residual stream, max |x|", largest([value.maximum for value in result.stream])),
        _lower("residual stream, kurtosis", kurtosis),
        _lower("input of a linear, max |x|", largest(inputs)),
        _lower("attention logits, max |x|", result.attention_logits.maximum),
        _lower("sink heads, share", result.sinks.share),
    ]
    if result.differential:
        pairs = result.differential
        figures += [
            _lower("sink pairs of heads, share", pairs.sinks.share),
            Figure("λ gate, mean", pairs.gates.mean),
            Figure("cosine of paired heads, mean", pairs.cosines.mean),
        ]
    if result.depth:
        figures.append(Figure("depth weights, distance from even", _unevenness(result)))
    return figures


def _lower(name: str, value: float) -> Figure:
    return Figure(name, value, better="lower")


def _unevenness(result: Result) -> float:
    """Return the mean over reads of sum |alpha - 1/n| / 2: 0 for the plain stream, below 1."""
    distances = [
        sum(abs(weight - 1 / len(weights)) for weight in weights) / 2
        for weights in result.depth.values()
    ]
    return round(sum(distances) / len(distances), 9)  # alpha is computed in float32
