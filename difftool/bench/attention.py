"""Look at, or change, the attention logits of any transformers model that uses its interface.

The model's attention kernel is replaced for a while by the plain formula, written out so that the
logits and the weights can be seen:

    weights = softmax(cap(q kᵀ · scaling) + mask [, sink])        out = weights v
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface, eager_mask

from difftool.errors import UserError

NAME = "difftool_observed"


@dataclass(frozen=True)
class AttentionCall:
    """One layer's attention in one forward pass.

    Attributes:
        layer: index of the decoder layer.
        logits: [B, H, T, S] scaled and capped, not masked; in the model's dtype unless changed.
        allowed: [B, 1, T, S], False where the mask forbids to look (causality, window, padding).
        weights: [B, H, T, S] in float32; rows add up to 1, less what a learned sink takes.
        output: [B, T, H, D], the weighted values.
    """

    layer: int
    logits: torch.Tensor
    allowed: torch.Tensor
    weights: torch.Tensor
    output: torch.Tensor


See = Callable[[AttentionCall], None]
Change = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # logits, allowed -> logits


@dataclass
class _Observer:
    see: See | None
    change: Change | None
    calls: int = 0


_observer: ContextVar[_Observer] = ContextVar("observer")


def _attention(  # noqa: PLR0913, PLR0917, the interface of transformers
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention for query [B, H, T, D], key and value [B, H_kv, S, D]; returns [B, T, H, D]."""
    observer = _observer.get()
    observer.calls += 1
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    logits = query @ key.transpose(-1, -2) * scaling  # [B, H, T, S]
    if softcap is not None:
        logits = torch.tanh(logits / softcap) * softcap
    allowed = _allowed(attention_mask, logits)
    if observer.change is not None:
        logits = observer.change(logits, allowed)
    weights = _softmax(logits, allowed, s_aux)
    output = (weights.to(value.dtype) @ value).transpose(1, 2).contiguous()
    if observer.see is not None:
        observer.see(AttentionCall(module.layer_idx, logits, allowed, weights, output))
    return output, None


def _softmax(
    logits: torch.Tensor, allowed: torch.Tensor, sinks: torch.Tensor | None
) -> torch.Tensor:
    """Return the weights in float32; `sinks` [H] take their part and have no value."""
    masked = logits.float().masked_fill(~allowed, torch.finfo(torch.float32).min)
    if sinks is None:
        return masked.softmax(-1)
    column = sinks.float().view(1, -1, 1, 1).expand(*masked.shape[:-1], 1)
    return torch.cat([masked, column], dim=-1).softmax(-1)[..., :-1]


def _allowed(mask: torch.Tensor | None, logits: torch.Tensor) -> torch.Tensor:
    """Return the mask as booleans [B, 1, T, S]; without one, attention is causal."""
    batch, _, queries, keys = logits.shape
    if mask is None:
        ones = torch.ones(queries, keys, dtype=torch.bool, device=logits.device)
        return ones.tril(keys - queries).expand(batch, 1, -1, -1)
    mask = mask[..., :keys].expand(batch, 1, -1, -1)
    return mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2


@contextmanager
def observed_attention(
    model: PreTrainedModel, *, see: See | None = None, change: Change | None = None
) -> Iterator[None]:
    """Run the model's attention in the open for as long as the context lasts.

    Args:
        model: any that calls transformers' attention interface.
        see: gets every layer's `AttentionCall`.
        change: returns the logits to use in place of those it gets; `see` is shown the result.

    Raises:
        UserError: the model ran and never called the interface.
    """
    AttentionInterface.register(NAME, _attention)
    AttentionMaskInterface.register(NAME, eager_mask)
    config: Any = model.config
    kernel = config._attn_implementation
    observer = _Observer(see, change)
    token = _observer.set(observer)
    # Not set_attn_implementation: it reads a class's source, and a grafted class has no file.
    config._attn_implementation = NAME
    try:
        yield
    finally:
        config._attn_implementation = kernel
        _observer.reset(token)
    if not observer.calls:
        raise UserError(
            f"{type(model).__name__} does not use transformers' attention interface, so its "
            "attention logits cannot be measured"
        )
