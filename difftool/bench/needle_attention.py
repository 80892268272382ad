"""Where a model looks when it is asked for a needle: at the answer, or at noise.

After Table 3 of Differential Transformer (arXiv 2410.05258): the attention of the last query before
the number, by what it falls on, each row divided by its sum, averaged over heads and layers. Where
two heads form a pair (Differential Transformer V2), their common row is

    d = a[2i] - sigmoid(lambda_i) · a[2i + 1]

which has negative entries. They count by their size, |d| / sum |d|: what is subtracted is read as
much as what is added. At the exact start d is a/2, so a conversion leaves the figures as they were.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from difftool.bench.attention import AttentionCall, observed_attention
from difftool.bench.blocks import decoder_layers

GATE = "differential.lambda_proj"


@torch.no_grad()
def last_query_attention(model: PreTrainedModel, tokens: torch.Tensor) -> torch.Tensor:
    """Return the share of its attention that the last token gives to each, [layers, tokens].

    Args:
        model: any that calls transformers' attention interface.
        tokens: [T] token ids.

    Raises:
        UserError: the model does not call the interface.
    """
    rows: dict[int, torch.Tensor] = {}  # [H, T] by layer

    def see(call: AttentionCall) -> None:
        rows[call.layer] = call.weights[0, :, -1].clone()

    with _last_gates(model) as gates, observed_attention(model, see=see):
        model(tokens[None].to(model.device), use_cache=False)
    return torch.stack([_share(rows[layer], gates.get(layer)) for layer in sorted(rows)]).cpu()


def _share(row: torch.Tensor, gate: torch.Tensor | None) -> torch.Tensor:
    """Return the normalised attention [T] of a layer's heads [H, T], gated [H / 2] if in pairs."""
    if gate is not None:
        row = row[0::2] - gate[:, None] * row[1::2]
    size = row.abs()
    return (size / size.sum(-1, keepdim=True)).mean(0)


@contextmanager
def _last_gates(model: PreTrainedModel) -> Iterator[dict[int, torch.Tensor]]:
    """Yield what gets, when the model runs, sigmoid(lambda) [h] of the last token by layer."""
    gates: dict[int, torch.Tensor] = {}

    def keep(layer: int, module: nn.Module, inputs: Any, output: torch.Tensor) -> None:
        gates[layer] = output[0, -1].float().sigmoid()

    handles = [
        module.register_forward_hook(partial(keep, number))
        for number, layer in enumerate(decoder_layers(model))
        for path, module in layer.named_modules()
        if path.endswith(GATE)
    ]
    try:
        yield gates
    finally:
        for handle in handles:
            handle.remove()
