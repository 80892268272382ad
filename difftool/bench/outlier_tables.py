"""The tables of the measure of outliers."""

import math
from collections.abc import Iterator, Mapping, Sequence

from difftool.bench.outlier_result import (
    RANKS,
    SHARES,
    SINK,
    Columns,
    Differential,
    Result,
    largest,
)
from difftool.bench.result import Table
from difftool.bench.summary import MISSING, format_number

LISTED = 8  # linears with the largest inputs


def tables(results: Mapping[str, Result]) -> list[Table]:
    """Return Table 5 of all checkpoints, then each one's layers and what surgery added."""
    found = [_table_5(results)]
    for name, result in results.items():
        found += [_layers(name, result), _inputs(name, result)]
        if result.differential:
            found.append(_pairs(name, result.differential))
        if result.depth:
            found.append(_depth(name, result))
    return found


def _number(value: float) -> str:
    return MISSING if math.isnan(value) else format_number(value, 4)


def _table_5(results: Mapping[str, Result]) -> Table:
    kinds = ("attention_logits", "hidden_states")
    rows = [
        (name, kind.replace("_", " "), *map(_number, (*part.top, part.median)))
        for kind in kinds
        for name, part in ((name, getattr(result, kind)) for name, result in results.items())
    ]
    return Table(
        "Largest activations",
        ("checkpoint", "activation", *(f"top-{rank}#" for rank in RANKS), "median#"),
        tuple(rows),
        "Magnitudes over all layers, in the form of Table 5 of arXiv 2410.05258: attention logits "
        "are scaled and not masked out, hidden states are what layers give.",
    )


def _layers(name: str, result: Result) -> Table:
    embedding = result.stream[0]
    rows = [("embedding", *map(_number, (embedding.maximum, embedding.kurtosis)), *[MISSING] * 4)]
    rows += [(str(layer), *_layer(result, layer)) for layer in range(result.layers)]
    stream, attention = ("stream max#", "kurtosis#"), ("logits max#", "sinks#", "context RMS#")
    return Table(
        f"Layers of {name}",
        ("layer", *stream, "linear input max#", *attention),
        tuple(rows),
        "The residual stream after the layer; the largest input of its linears; its attention "
        f"logits; the share of its heads that give more than {SINK} of their weight to the first "
        "token; the mean over queries of the root of the sum of squared weights.",
    )


def _layer(result: Result, layer: int) -> Iterator[str]:
    after = result.stream[layer + 1]
    yield _number(after.maximum)
    yield _number(after.kurtosis)
    yield _number(largest([part.maximum for part in result.inputs_of(layer).values()]))
    if layer not in result.logits:  # it has no softmax attention
        yield from [MISSING] * 3
        return
    yield _number(result.logits[layer].maximum)
    yield _number(_mean([head > SINK for head in result.sinks.first_token[layer]]))
    yield _number(_mean(result.context_rms.means[layer]))


def _inputs(name: str, result: Result) -> Table:
    largest_first = sorted(result.linears.items(), key=lambda item: -item[1].maximum)[:LISTED]
    rows = [
        (path, *map(_number, (part.maximum, part.top[-1], part.median, part.kurtosis)))
        for path, part in largest_first
    ]
    unseen = sum(result.unseen.values())
    note = "The linears with the largest inputs, by layer and path."
    if unseen:
        paths = ", ".join(result.unseen)
        note += f" Not measured, as they are no linear modules: {unseen:,} parameters in {paths}."
    columns = ("linear", "max#", f"top-{RANKS[-1]}#", "median#", "kurtosis#")
    return Table(f"Inputs of linears of {name}", columns, tuple(rows), note)


def _pairs(name: str, pairs: Differential) -> Table:
    columns = ("λ mean#", "least#", "greatest#", "deviation#", "cosine#", "context RMS#", "sinks#")
    rows = [(str(layer), *_pair(pairs, layer)) for layer in pairs.gates.means]
    quantiles = "; ".join(
        f"{what} {_quantiles(found)}"
        for what, found in (("λ", pairs.gates), ("cosines", pairs.cosines))
    )
    return Table(
        f"Pairs of heads of {name}",
        ("layer", *columns),
        tuple(rows),
        "The gate σ(λ): its mean, the least and the greatest mean of a pair, and how it varies "
        "over tokens; the cosine between the outputs of the two heads; context RMS and sinks of "
        f"the pair's map. Quantiles {', '.join(map(str, SHARES))} of all: {quantiles}.",
    )


def _pair(pairs: Differential, layer: int) -> Iterator[str]:
    gates, deviations = pairs.gates.means[layer], pairs.gates.deviations[layer]
    heads = pairs.sinks.first_token[layer]
    yield from map(_number, (_mean(gates), min(gates), max(gates), _mean(deviations)))
    yield _number(_mean(pairs.cosines.means[layer]))
    yield _number(_mean(pairs.context_rms.means[layer]))
    yield _number(_mean([head > SINK for head in heads]))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _quantiles(columns: Columns) -> str:
    return ", ".join(format_number(value, 3) for value in columns.quantiles)


def _depth(name: str, result: Result) -> Table:
    rows = [
        (read, str(len(weights)), *map(_number, (weights[0], weights[-1], max(weights))))
        for read, weights in result.depth.items()
    ]
    return Table(
        f"Depth weights of {name}",
        ("read", "sources#", "α of embedding#", "α of newest#", "greatest α#"),
        tuple(rows),
        "What each read over depth gives its sources, mean over tokens; 1/sources each is the "
        "plain residual stream.",
    )
