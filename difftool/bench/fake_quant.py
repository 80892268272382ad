"""Fake quantisation: numbers are rounded to a few even levels, and computed with in floating point.

Symmetric and dynamic: the largest magnitude of a group gets the highest level, 2^(bits - 1) - 1
steps from zero, and every number the nearest one.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch.nn import functional as F
from transformers.pytorch_utils import Conv1D

from difftool.bench.attention import Change
from difftool.bench.blocks import Linear


@dataclass(frozen=True)
class Scheme:
    """Bits of weights (a scale per output channel) and activations (per tensor or per token)."""

    weight_bits: int
    activation_bits: int
    granularity: Literal["tensor", "token"]

    def __str__(self) -> str:
        return f"W{self.weight_bits}A{self.activation_bits} per {self.granularity}"


def fake_quantise(values: torch.Tensor, bits: int, dims: tuple[int, ...]) -> torch.Tensor:
    """Return the values rounded, in float32; each group that spans `dims` has a scale of its own.

    A group with a NaN or an infinity becomes NaN.
    """
    numbers = values.float()
    scale: torch.Tensor = numbers.abs().amax(dims, keepdim=True) / (2 ** (bits - 1) - 1)
    scale = scale.masked_fill(scale == 0, 1)
    return (numbers / scale).round() * scale


def quantise_logits(bits: int) -> Change:
    """Return a change that rounds attention logits, with one scale per layer and sequence.

    Only logits that the mask allows to look at count; a learned sink keeps its precision.
    """

    def change(logits: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
        return fake_quantise(logits.masked_fill(~allowed, 0), bits, (1, 2, 3))  # [B, H, T, S]

    return change


@contextmanager
def quantised_linears(linears: Iterable[Linear], scheme: Scheme) -> Iterator[None]:
    """Let linear modules round their weights and inputs for as long as the context lasts.

    The weights themselves are not touched: each forward pass computes with a rounded copy. One
    scale "per tensor" spans all that a module gets at once, so batches of one sequence make it one
    per sequence.
    """
    changed: list[Linear] = []
    try:
        for linear in linears:
            linear.forward = partial(_forward, linear, scheme)  # type: ignore[method-assign]
            changed.append(linear)
        yield
    finally:
        for linear in changed:
            del linear.forward  # which uncovers that of the class


def _forward(linear: Linear, scheme: Scheme, inputs: torch.Tensor) -> torch.Tensor:
    """Return a rounded input times the rounded weight, in float32 and cast once."""
    weight = linear.weight.T if isinstance(linear, Conv1D) else linear.weight  # [out, in]
    dims = (-1,) if scheme.granularity == "token" else tuple(range(inputs.dim()))
    output = F.linear(
        fake_quantise(inputs, scheme.activation_bits, dims),
        fake_quantise(weight, scheme.weight_bits, (1,)),
        None if linear.bias is None else linear.bias.float(),
    )
    return output.to(inputs.dtype)
