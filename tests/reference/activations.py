"""Every activation of a transformers model, collected whole, and statistics of it by the book."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface, eager_mask

Array = np.ndarray
Rounding = Callable[[Array], Array]  # of the logits of one sequence [H, T, S], NaN where forbidden


def kurtosis(values: Array) -> float:
    values = values.astype(np.float64).ravel()
    deviations = values - values.mean()
    return float((deviations**4).mean() / (deviations**2).mean() ** 2)


def largest(values: Array, rank: int) -> float:
    return float(np.sort(np.abs(values.ravel()))[-rank])


def median(values: Array) -> float:
    ordered = np.sort(np.abs(values.ravel()))
    return float(ordered[(len(ordered) - 1) // 2])


def round_to_levels(values: Array, bits: int) -> Array:
    """Symmetric absmax of one group, by the midpoints between levels; NaN does not count."""
    top = 2 ** (bits - 1) - 1
    levels = np.arange(-top, top + 1) * (np.nanmax(np.abs(values)) / top)
    nearest = levels[np.digitize(values, (levels[1:] + levels[:-1]) / 2)]
    return np.where(np.isnan(values), values, nearest)


def attend(
    query: Array, key: Array, scaling: float, softcap: float | None, allowed: Array
) -> Array:
    """Logits [T, S] of one head, NaN where it must not look."""
    logits = np.full((len(query), len(key)), math.nan)
    for t in range(len(query)):
        for s in range(len(key)):
            if allowed[t, s]:
                logit = float(query[t] @ key[s]) * scaling
                logits[t, s] = logit if softcap is None else softcap * math.tanh(logit / softcap)
    return logits


def softmax(logits: Array, sink: float | None) -> Array:
    """Weights [T, S] of one head; a row that may look nowhere gets zeros."""
    weights = np.zeros_like(logits)
    for t, row in enumerate(logits):
        seen = ~np.isnan(row)
        if seen.any():
            top = max(row[seen].max(), -math.inf if sink is None else sink)
            exponentials = np.exp(row[seen] - top)
            total = exponentials.sum() + (0 if sink is None else math.exp(sink - top))
            weights[t, seen] = exponentials / total
    return weights


@dataclass
class Kernel:
    """An attention kernel that keeps, by layer, logits and weights [H, T, S] of each sequence."""

    rounding: Rounding | None = None
    logits: dict[int, list[Array]] = field(default_factory=dict)
    weights: dict[int, list[Array]] = field(default_factory=dict)
    outputs: dict[int, list[Array]] = field(default_factory=dict)  # [H, T, D]

    def __call__(
        self,
        module: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor,
        scaling: float,
        softcap: float | None = None,
        s_aux: torch.Tensor | None = None,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        per_group = query.shape[1] // key.shape[1]
        batch = []
        for b in range(len(query)):
            q, k, v = (x[b].double().numpy() for x in (query, key, value))
            allowed = mask[b, 0].numpy() == 0
            heads = range(len(q))
            logits = np.stack(
                [attend(q[h], k[h // per_group], scaling, softcap, allowed) for h in heads]
            )
            if self.rounding:
                logits = self.rounding(logits)
            sinks = [None if s_aux is None else s_aux[h].item() for h in heads]
            weights = np.stack([softmax(logits[h], sinks[h]) for h in heads])
            output = np.stack([weights[h] @ v[h // per_group] for h in heads])
            for kept, what in (
                (self.logits, logits),
                (self.weights, weights),
                (self.outputs, output),
            ):
                kept.setdefault(module.layer_idx, []).append(what)
            batch.append(torch.from_numpy(output))
        return torch.stack(batch).transpose(1, 2).to(value.dtype).contiguous(), None


@contextmanager
def kernel_of(model: nn.Module, kernel: Kernel) -> Iterator[None]:
    """Let the model attend with `kernel` for a while."""
    AttentionInterface.register("reference_kernel", kernel)
    AttentionMaskInterface.register("reference_kernel", eager_mask)
    before = model.config._attn_implementation
    model.config._attn_implementation = "reference_kernel"
    try:
        yield
    finally:
        model.config._attn_implementation = before


@dataclass
class Everything:
    """What flowed through a model: whole arrays, by layer or by module."""

    stream: list[Array]
    inputs: dict[str, Array]
    kernel: Kernel


@torch.no_grad()
def collect(model: nn.Module, layers: nn.ModuleList, windows: torch.Tensor) -> Everything:
    """Run token ids [N, T] at once and keep everything."""
    inputs: dict[str, Array] = {}
    changed = []
    for number, layer in enumerate(layers):
        for path, module in layer.named_modules():
            if isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D":
                module.forward = _recording(inputs, f"{number}.{path}", module.forward)
                changed.append(module)
    last: list[Array] = []
    names = ("norm", "final_layer_norm", "ln_f")
    body = model.base_model
    norm = next(getattr(body, name) for name in names if hasattr(body, name))
    hook = norm.register_forward_pre_hook(lambda _, args: last.append(args[0].numpy()))
    kernel = Kernel()
    with kernel_of(model, kernel):
        states = body(windows, output_hidden_states=True, use_cache=False).hidden_states
    hook.remove()
    for module in changed:
        del module.forward
    return Everything([state.numpy() for state in states[:-1]] + last, inputs, kernel)


def _recording(inputs: dict[str, Array], name: str, forward: Any) -> Any:
    def record(x: torch.Tensor) -> torch.Tensor:
        inputs[name] = x.numpy()
        return forward(x)

    return record
