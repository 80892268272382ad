"""Differential attention V2, grafted onto a transformers model. Needs torch and transformers only.

The host runs its own attention once, with 2h query heads over its h_kv key/value heads; heads 2i
and 2i+1 form a pair inside one GQA group, and (microsoft/unilm, Diff-Transformer-V2):

    y = a[0::2] - sigmoid(x W_lambda) * a[1::2]        out = y W_o

Difftool writes this file beside the weights. Positions, q/k norms, biases, masks, the KV cache and
the attention kernel stay the host's; its output projection moves into `DifferentialOutput`.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

if TYPE_CHECKING:
    from transformers import PreTrainedModel as HostModel
else:
    HostModel = object  # a mixin, in front of the host's own class


class DifferentialOutput(nn.Module):
    """Subtract each pair's second head, gated per token, and project back to the stream.

    Args:
        hidden_size: D, width of the stream.
        heads: h, pairs of query heads (half of the host's heads).
        head_dim: d.
        bias: whether the output projection has one.
        lambda_bias: whether lambda has one (a start gate other than one half needs it).
    """

    def __init__(
        self, hidden_size: int, heads: int, head_dim: int, *, bias: bool, lambda_bias: bool
    ) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.lambda_proj = nn.Linear(hidden_size, heads, bias=lambda_bias)
        self.o_proj = nn.Linear(heads * head_dim, hidden_size, bias=bias)

    def forward(self, hidden_states: torch.Tensor, attention: torch.Tensor) -> torch.Tensor:
        """Return [..., D] from the attention's input [..., D] and its heads [..., 2h * d]."""
        gate = self.lambda_proj(hidden_states).sigmoid().unsqueeze(-1)  # [..., h, 1]
        pairs = attention.reshape(*attention.shape[:-1], -1, 2, self.head_dim)  # [..., h, 2, d]
        difference = pairs[..., 0, :] - gate * pairs[..., 1, :]
        projected: torch.Tensor = self.o_proj(difference.flatten(-2))
        return projected


def _subtract_pairs(
    attention: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
) -> Any:
    """Forward hook of the host's attention: its first output, [..., 2h * d], lacks W_o so far."""
    hidden_states = args[0] if args else kwargs["hidden_states"]
    if isinstance(output, torch.Tensor):
        return attention.differential(hidden_states, output)
    return (attention.differential(hidden_states, output[0]), *output[1:])


def _resize(attention: Any, config: Any) -> None:
    """Rebuild the projections of a host that derives head_dim from D / heads (StableLM)."""
    heads, kv_heads, head_dim = (
        config.num_attention_heads,
        config.num_key_value_heads,
        config.head_dim,
    )
    rotary_share = attention.rotary_ndims / attention.head_dim
    for name, count in (("q_proj", heads), ("k_proj", kv_heads), ("v_proj", kv_heads)):
        old = getattr(attention, name)
        new = nn.Linear(config.hidden_size, count * head_dim, bias=old.bias is not None)
        setattr(attention, name, new)
    for name, count in (("q_layernorm", heads), ("k_layernorm", kv_heads)):
        if hasattr(attention, name):
            norm = type(getattr(attention, name))(head_dim, count, eps=config.layer_norm_eps)
            setattr(attention, name, norm)
    attention.head_dim = head_dim
    attention.scaling = head_dim**-0.5
    attention.rotary_ndims = int(head_dim * rotary_share)


def _graft_attention(attention: Any, config: Any, lambda_bias: bool) -> None:
    if attention.head_dim != config.head_dim:
        _resize(attention, config)
    attention.differential = DifferentialOutput(
        config.hidden_size,
        config.num_attention_heads // 2,
        config.head_dim,
        bias=attention.o_proj.bias is not None,
        lambda_bias=lambda_bias,
    )
    attention.o_proj = nn.Identity()
    attention.register_forward_hook(_subtract_pairs, with_kwargs=True)


def tensor_parallel_plan(host_plan: dict[str, str] | None) -> dict[str, str] | None:
    """Return the host's plan with its output projection moved and lambda split by head."""
    if host_plan is None:
        return None
    plan = {}
    for module, style in host_plan.items():
        if module.endswith(".self_attn.o_proj"):
            inside = module.removesuffix("o_proj") + "differential."
            plan[inside + "lambda_proj"], plan[inside + "o_proj"] = "colwise", style
        else:
            plan[module] = style
    return plan


def check_by_pairs(validate: Callable[[Any], None]) -> Callable[[Any], None]:
    """Return a host config's check of itself, run as if each pair of query heads were one head.

    Some hosts check sizes against hidden_size / num_attention_heads, which doubling would halve.
    """

    def checked(config: Any) -> None:
        heads = config.num_attention_heads
        config.num_attention_heads = heads // 2
        try:
            validate(config)
        finally:
            config.num_attention_heads = heads

    return checked


class DiffV2Mixin(HostModel):
    """A model class whose every attention ends in `DifferentialOutput`.

    Reads `config.diffv2`: {"lambda_bias": bool}; `config.num_attention_heads` is 2h.
    """

    def __init__(self, config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(config, *args, **kwargs)
        body: Any = self.base_model
        if body is self or not isinstance(body, DiffV2Mixin):  # else AutoModel grafted it already
            layers: Any = body.layers
            for layer in layers:
                _graft_attention(layer.self_attn, config, config.diffv2["lambda_bias"])
