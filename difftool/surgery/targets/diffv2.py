"""Differential Transformer V2: query heads split in two inside their GQA group, and a lambda.

Start: every query head beside its copy, lambda = 0 so that its gate is one half, and W_o times two:
a - a/2 = a/2, times two is a. All powers of two, so no bit of the logits moves.
Source: microsoft/unilm, Diff-Transformer/Diff-Transformer-V2/multihead_flashdiffv2.py.
"""

import hashlib
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field

from difftool.checkpoint import Checkpoint, Computed, Copied, Output, TensorInfo, read_tensor
from difftool.errors import UserError
from difftool.header import torch_dtype
from difftool.surgery.host import Host

CLASS_PREFIX = "DiffV2"
TITLE = "Differential Transformer V2"
IMPORTS = ("DiffV2Mixin", "check_by_pairs", "tensor_parallel_plan")
MIXIN = "DiffV2Mixin"
CONFIG_KEYS = ("num_heads", "lambda_bias")
CONFIG_BODY = (
    "base_model_tp_plan = tensor_parallel_plan({config}.base_model_tp_plan)",
    "validate = check_by_pairs({config}.validate)",
)


class Options(BaseModel):
    """Options of the diffv2 target.

    Attributes:
        start_gate: sigmoid(lambda) at the start. 0.5 needs no bias, which is the upstream shape,
            and is exact to the bit; other values add a lambda bias and are exact to rounding.
        noise: standard deviation of the noise on the second query head of each pair, relative to
            that of its weights; breaks the symmetry, and with it the exact start.
        seed: of the noise.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    start_gate: float = Field(0.5, gt=0, lt=1)
    noise: float = Field(0.0, ge=0, le=1)
    seed: int = 0


def refusal(host: Host) -> str | None:
    """Return why this model cannot become a diffv2, or None."""
    return host.family.no_diffv2


def exactness(host: Host, options: Options, dtype: str | None = None) -> str:
    """Return how close the result must be: "bits", "rounding", "weights", or "none" with noise."""
    if options.noise:
        return "none"
    if options.start_gate == 0.5:
        return host.family.exact
    return "weights" if (dtype or host.dtype) in ("BF16", "F16") else "rounding"


def configure(host: Host, options: Options) -> dict[str, Any]:
    """Return the config keys to set: twice the heads, and what was derived from them."""
    geometry = host.geometry
    return {
        "num_attention_heads": 2 * geometry.heads,
        "num_key_value_heads": geometry.kv_heads,
        "head_dim": geometry.head_dim,
        "diffv2": {"num_heads": geometry.heads, "lambda_bias": options.start_gate != 0.5},
    }


def double_heads(tensor: torch.Tensor, heads: int) -> torch.Tensor:
    """Put a copy of each head's rows behind them: [heads * n, ...] -> [2 * heads * n, ...]."""
    rows = tensor.reshape(heads, -1, *tensor.shape[1:])
    return rows.repeat_interleave(2, dim=0).reshape(2 * tensor.shape[0], *tensor.shape[1:])


def start_lambda_bias(gate: float, dtype: torch.dtype) -> tuple[float, float]:
    """Return the bias whose sigmoid is nearest `gate` in `dtype`, and that sigmoid as computed."""
    bias = torch.tensor(gate, dtype=torch.float64).logit().to(dtype)
    return bias.item(), bias.sigmoid().item()


def rewrite(
    host: Host, options: Options, source: Checkpoint, dtype: str | None = None
) -> dict[str, Output]:
    """Return every tensor of the converted model: copied, or computed when its turn comes.

    What is divided by the gate is rounded once, to the `dtype` asked for or else its own.
    """
    outputs: dict[str, Output] = {}
    for name, info in source.tensors.items():
        before, attention, part = name.partition(".self_attn.")
        if not (attention and before.startswith(host.layer_prefix)):
            outputs[name] = Copied(info, source.path / info.file)
        elif part.startswith("o_proj."):
            outputs |= _rewrite_output(
                host, options, source, info, before + attention, dtype or info.dtype
            )
        elif part.startswith("q_layernorm.norms."):
            outputs |= _double_norm_list(source, info, before + attention, part)
        elif part in host.family.query:
            outputs[name] = _doubled(host, options, source, info)
        else:
            outputs[name] = Copied(info, source.path / info.file)
    return outputs


def _rewrite_output(
    host: Host, options: Options, source: Checkpoint, info: TensorInfo, attention: str, result: str
) -> dict[str, Output]:
    inside = f"{attention}differential."
    part = info.name.removeprefix(attention)
    if part != "o_proj.weight":
        return {inside + part: Copied(info, source.path / info.file)}
    heads, hidden_size = host.geometry.heads, host.geometry.hidden_size
    dtype = torch_dtype(result)
    bias, gate = start_lambda_bias(options.start_gate, dtype)
    if gate == 1:
        raise UserError(
            f"start_gate={options.start_gate} is 1 in {result}", "a gate below 1, such as 0.9"
        )

    def compute() -> torch.Tensor:
        weight = read_tensor(source, info.name)
        scaled = weight.mul_(2) if gate == 0.5 else weight.double() / (1 - gate)
        return scaled.to(dtype)

    outputs: dict[str, Output] = {
        inside + part: Computed(result, info.shape, compute),
        f"{inside}lambda_proj.weight": Computed(
            result, (heads, hidden_size), lambda: torch.zeros(heads, hidden_size, dtype=dtype)
        ),
    }
    if options.start_gate != 0.5:
        outputs[f"{inside}lambda_proj.bias"] = Computed(
            result, (heads,), lambda: torch.full((heads,), bias, dtype=dtype)
        )
    return outputs


def _doubled(host: Host, options: Options, source: Checkpoint, info: TensorInfo) -> Computed:
    """Double the rows of the query heads; a fused projection keeps its key and value rows."""
    heads, fused = host.geometry.heads, ".qkv_proj." in info.name
    rows = heads * host.geometry.head_dim if fused else info.shape[0]

    def doubled() -> torch.Tensor:
        tensor = read_tensor(source, info.name)
        query = double_heads(tensor[:rows], heads)
        if options.noise and info.name.endswith("_proj.weight"):
            query = _add_noise(query, heads, options, info.name)
        return torch.cat([query, tensor[rows:]]) if fused else query

    return Computed(info.dtype, (info.shape[0] + rows, *info.shape[1:]), doubled)


def _add_noise(query: torch.Tensor, heads: int, options: Options, name: str) -> torch.Tensor:
    """Add noise to the second head of each pair; the seed and the name decide it."""
    digest = hashlib.sha256(f"{options.seed} {name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
    pairs = query.float().reshape(heads, 2, -1)
    noise = torch.randn(pairs[:, 1].shape, generator=generator)
    pairs[:, 1] += options.noise * pairs.std() * noise
    return pairs.reshape(query.shape).to(query.dtype)


def _double_norm_list(
    source: Checkpoint, info: TensorInfo, attention: str, part: str
) -> dict[str, Output]:
    """StableLM keeps a norm module per query head: number i becomes 2i and 2i + 1."""
    norms, number, rest = part.removeprefix("q_layernorm.").split(".", 2)
    copied = Copied(info, source.path / info.file)
    names = (f"{attention}q_layernorm.{norms}.{2 * int(number) + k}.{rest}" for k in (0, 1))
    return dict.fromkeys(names, copied)
