"""Differential attention V2 and a whole Llama from the formulas, one sequence and head at a time.

    y_i = a_{2i} - sigmoid(lambda_i) a_{2i+1}      out = y W_o      (unilm, Diff-Transformer-V2)

2h query heads read h_kv key/value heads; query head j reads group j // (2h / h_kv). A state is a
dict of tensors under transformers' names, in float64.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

State = Mapping[str, Tensor]
Pairing = Callable[[int], list[tuple[int, int]]]  # h -> the (positive, negative) head of each pair


def neighbours(heads: int) -> list[tuple[int, int]]:
    """The paper's pairs: heads 2i and 2i+1, which share a key/value group."""
    return [(2 * i, 2 * i + 1) for i in range(heads)]


def halves(heads: int) -> list[tuple[int, int]]:
    """The wrong pairs of block-concatenated duplicates: heads i and i + h, of different groups."""
    return [(i, i + heads) for i in range(heads)]


def attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    softcap: float | None = None,
    sink: Tensor | None = None,
) -> Tensor:
    """One head: scaled query [T, d] on key and value [S, d] under an additive mask [T, S]."""
    rows = []
    for token in range(query.shape[0]):
        scores = key @ query[token]  # [S]
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        scores = scores + mask[token]
        top = scores.max().detach()
        weights = (scores - top).exp()
        total = weights.sum()
        if sink is not None:  # a column of its own in the softmax, without a value
            total = total + (sink - top).exp()
        rows.append((weights / total) @ value)
    return torch.stack(rows)


def heads_of_attention(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor, *, scaling: float, **options: Any
) -> list[Tensor]:
    """Every head of one sequence: query [H, T, d] on key and value [h_kv, S, d]; `sinks` is [H]."""
    sinks = options.pop("sinks", None)
    per_group = query.shape[0] // key.shape[0]
    heads = []
    for j in range(query.shape[0]):
        group, sink = j // per_group, None if sinks is None else sinks[j]
        head = attend(query[j] * scaling, key[group], value[group], mask, sink=sink, **options)
        heads.append(head)
    return heads


def subtract(
    heads: list[Tensor],
    hidden: Tensor,
    lambda_weight: Tensor,
    lambda_bias: Tensor | None,
    pairing: Pairing = neighbours,
) -> Tensor:
    """Return y [T, h * d] from the 2h heads [T, d] and the attention's normed input [T, D]."""
    differences = []
    for i, (positive, negative) in enumerate(pairing(len(heads) // 2)):
        gate = hidden @ lambda_weight[i]  # [T]
        if lambda_bias is not None:
            gate = gate + lambda_bias[i]
        sigmoid = 1 / (1 + torch.exp(-gate))
        differences.append(heads[positive] - sigmoid[:, None] * heads[negative])
    return torch.cat(differences, dim=-1)


def causal_mask(padding: Tensor) -> Tensor:
    """Additive mask [T, T] of one sequence; `padding` [T] is 0 where there is no token."""
    length = padding.shape[0]
    mask = torch.full((length, length), -math.inf, dtype=torch.float64)
    for query in range(length):
        for key in range(query + 1):
            if padding[key] or key == query:  # a padded row sees itself: any number but NaN will do
                mask[query, key] = 0
    return mask


def linear(state: State, name: str, x: Tensor) -> Tensor:
    """Pass x [T, in] through the named weight and, where there is one, its bias."""
    y = x @ state[f"{name}.weight"].T
    return y + state[f"{name}.bias"] if f"{name}.bias" in state else y


def rotate(x: Tensor, theta: float) -> Tensor:
    """Rotary positions on [T, d], dimension i paired with i + d/2."""
    length, width = x.shape
    frequency = theta ** (-torch.arange(0, width, 2, dtype=x.dtype) / width)
    angle = torch.arange(length, dtype=x.dtype)[:, None] * frequency  # [T, d/2]
    first, second = x[:, : width // 2], x[:, width // 2 :]
    return torch.cat(
        [first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()], -1
    )


class Llama:
    """A Llama for one sequence [T, D], its sublayers apart; differential if it has lambdas."""

    def __init__(
        self, state: State, config: Any, mask: Tensor, pairing: Pairing = neighbours
    ) -> None:
        self.state, self.config, self.mask, self.pairing = state, config, mask, pairing

    def embed(self, ids: Tensor) -> Tensor:
        return self.state["model.embed_tokens.weight"][ids]

    def norm(self, name: str, x: Tensor) -> Tensor:
        rms = (x.pow(2).mean(-1, keepdim=True) + self.config.rms_norm_eps).sqrt()
        return self.state[f"{name}.weight"] * x / rms

    def attention(self, layer: int, stream: Tensor) -> Tensor:
        name = f"model.layers.{layer}.self_attn"
        x = self.norm(f"model.layers.{layer}.input_layernorm", stream)
        q, k, v = (
            linear(self.state, f"{name}.{p}_proj", x).split(self.config.head_dim, -1) for p in "qkv"
        )
        theta = self.config.rope_parameters["rope_theta"]
        heads = heads_of_attention(
            torch.stack([rotate(head, theta) for head in q]),
            torch.stack([rotate(head, theta) for head in k]),
            torch.stack(v),
            self.mask,
            scaling=1 / math.sqrt(self.config.head_dim),
        )
        gate = f"{name}.differential.lambda_proj"
        if f"{gate}.weight" not in self.state:
            return linear(self.state, f"{name}.o_proj", torch.cat(heads, -1))
        bias = self.state.get(f"{gate}.bias")
        y = subtract(heads, x, self.state[f"{gate}.weight"], bias, self.pairing)
        return linear(self.state, f"{name}.differential.o_proj", y)

    def mlp(self, layer: int, stream: Tensor) -> Tensor:
        name = f"model.layers.{layer}.mlp"
        x = self.norm(f"model.layers.{layer}.post_attention_layernorm", stream)
        gate = linear(self.state, f"{name}.gate_proj", x)
        return linear(
            self.state,
            f"{name}.down_proj",
            gate * torch.sigmoid(gate) * linear(self.state, f"{name}.up_proj", x),
        )

    def head(self, stream: Tensor) -> Tensor:
        name = "model.embed_tokens" if self.config.tie_word_embeddings else "lm_head"
        return self.norm("model.norm", stream) @ self.state[f"{name}.weight"].T

    def logits(self, ids: Tensor) -> Tensor:
        """The plain residual stream: [T] token ids to [T, vocabulary]."""
        stream = self.embed(ids)
        for layer in range(self.config.num_hidden_layers):
            stream = stream + self.attention(layer, stream)
            stream = stream + self.mlp(layer, stream)
        return self.head(stream)


def duplicate(rows: Tensor, heads: int) -> Tensor:
    """[q0, q1, ...] -> [q0, q0, q1, q1, ...] for a tensor whose first axis is made of heads."""
    return torch.cat([part for head in rows.chunk(heads) for part in (head, head)])


def exact_start(
    state: State, heads: int, head_dim: int, gate: float | None = None
) -> dict[str, Tensor]:
    """The differential state that computes what the plain `state` computes.

    Query heads are duplicated next to themselves, lambda's weight is zero and the output weight is
    divided by 1 - sigmoid(lambda): one half, or `gate` through a bias.
    """
    new: dict[str, Tensor] = {}
    for name, value in state.items():
        layer, _, part = name.rpartition("self_attn.")
        if part in ("q_proj.weight", "q_proj.bias", "sinks"):
            new[name] = duplicate(value, heads)
        elif part in ("qkv_proj.weight", "qkv_proj.bias"):
            rows = heads * head_dim
            new[name] = torch.cat([duplicate(value[:rows], heads), value[rows:]])
        elif part == "q_norm.weight" and value.shape[0] != head_dim:  # one gain per head
            new[name] = duplicate(value, heads)
        elif part.startswith("q_layernorm.norms."):
            index, leaf = part.removeprefix("q_layernorm.norms.").split(".")
            for twin in (2 * int(index), 2 * int(index) + 1):
                new[f"{layer}self_attn.q_layernorm.norms.{twin}.{leaf}"] = value
        elif part.startswith("o_proj."):
            inside = f"{layer}self_attn.differential."
            is_weight = part == "o_proj.weight"
            new[inside + part] = value / (1 - (gate or 0.5)) if is_weight else value
            if is_weight:
                new[f"{inside}lambda_proj.weight"] = value.new_zeros(heads, value.shape[0])
                if gate is not None:
                    logit = math.log(gate / (1 - gate))
                    new[f"{inside}lambda_proj.bias"] = value.new_full((heads,), logit)
        else:
            new[name] = value
    return new
