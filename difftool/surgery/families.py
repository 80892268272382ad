"""Where things are in each model family: one line of data per `model_type`.

The host's code stays transformers' own, so a line says only what the surgery must know: the tensors
of a query head, the modules that read the residual stream, and what rules a target out.
"""

from dataclasses import dataclass
from typing import Literal

Readers = tuple[tuple[str, ...], ...]

PRE_NORM: Readers = (("input_layernorm",), ("post_attention_layernorm",))
SANDWICH: Readers = (("input_layernorm",), ("pre_feedforward_layernorm",))
POST_NORM: Readers = (("self_attn",), ("mlp",))
ONE_BRANCH: Readers = (("input_layernorm",),)
TWO_NORMS_ONE_BRANCH: Readers = (("input_layernorm", "post_attention_layernorm"),)


@dataclass(frozen=True)
class Family:
    """How one model family is laid out.

    Attributes:
        readers: for each sublayer of a decoder layer, the modules that take the stream as input.
        parallel_readers: the same where the config says `use_parallel_residual`.
        layers: path of the decoder layers in the base model.
        final_norm: path of the norm before the head.
        query: tensors of `self_attn` with rows per query head (of `qkv_proj`, its first rows).
        exact: "bits", or "rounding" where a norm spans all heads, which doubling them reorders.
        no_diffv2: why diffv2 cannot be had, or None.
    """

    readers: Readers = PRE_NORM
    parallel_readers: Readers | None = None
    layers: str = "layers"
    final_norm: str = "norm"
    query: tuple[str, ...] = ("q_proj.weight", "q_proj.bias")
    exact: Literal["bits", "rounding"] = "bits"
    no_diffv2: str | None = None


_Q = ("q_proj.weight", "q_proj.bias")
_Q_NORM_ALL_HEADS = (*_Q, "q_norm.weight")
_LATENT = (
    "multi-head latent attention expands one key and value per query head out of a shared latent, "
    "so there is no GQA group whose key and value a second query head could share"
)
_FUSED = (
    "its fused query-key-value projection carries one key and value head per query head and its "
    "attention has no grouped form, so a second query head would have no key and value to share"
)

FAMILIES: dict[str, Family] = {
    "apertus": Family(readers=(("attention_layernorm",), ("feedforward_layernorm",))),
    "arcee": Family(),
    "cohere": Family(readers=ONE_BRANCH, query=_Q_NORM_ALL_HEADS),
    "cohere2": Family(readers=ONE_BRANCH),
    "deepseek_v2": Family(no_diffv2=_LATENT),
    "deepseek_v3": Family(no_diffv2=_LATENT),
    "ernie4_5": Family(),
    "exaone4": Family(readers=POST_NORM),
    "gemma": Family(),
    "gemma2": Family(readers=SANDWICH),
    "gemma3_text": Family(readers=SANDWICH),
    "glm": Family(),
    "glm4": Family(),
    "glm4_moe": Family(),
    "gpt2": Family(readers=(("ln_1",), ("ln_2",)), layers="h", final_norm="ln_f", no_diffv2=_FUSED),
    "gpt_neox": Family(
        parallel_readers=TWO_NORMS_ONE_BRANCH, final_norm="final_layer_norm", no_diffv2=_FUSED
    ),
    "gpt_oss": Family(query=(*_Q, "sinks")),
    "granite": Family(),
    "granitemoe": Family(),
    "granitemoeshared": Family(),
    "helium": Family(),
    "hunyuan_v1_dense": Family(),
    "llama": Family(),
    "ministral": Family(),
    "ministral3": Family(),
    "mistral": Family(),
    "mixtral": Family(),
    "nemotron": Family(),
    "olmo": Family(),
    "olmo2": Family(readers=POST_NORM, query=_Q_NORM_ALL_HEADS, exact="rounding"),
    "olmo3": Family(readers=POST_NORM, query=_Q_NORM_ALL_HEADS, exact="rounding"),
    "olmoe": Family(
        no_diffv2="its q_norm is built as wide as the hidden size, not as the query heads, so the "
        "doubled heads have no norm to pass through"
    ),
    "phi3": Family(query=("qkv_proj.weight", "qkv_proj.bias")),
    "phimoe": Family(),
    "qwen2": Family(),
    "qwen2_moe": Family(),
    "qwen3": Family(),
    "qwen3_moe": Family(),
    "seed_oss": Family(),
    "smollm3": Family(),
    "stablelm": Family(parallel_readers=ONE_BRANCH, query=(*_Q, "q_layernorm.norms")),
    "starcoder2": Family(),
}

NO_STREAM = {
    "bert": "a post-norm encoder normalises the stream itself, so it is no sum of sublayers",
    "gemma3n": "AltUp keeps several streams, so there is no one residual sum",
    "gemma3n_text": "AltUp keeps several streams, so there is no one residual sum",
    "qwen3_next": "most of its layers are linear attention, which has no softmax to subtract",
    "mamba": "it has no attention",
    "mamba2": "it has no attention",
}


def families_table() -> str:
    """Return README's table: the families, gathered by what each target gives them."""
    to_rounding = "to fp32 rounding: its query norm spans all heads"
    rows: dict[tuple[str, str], list[str]] = {}
    for name, family in FAMILIES.items():
        diffv2 = "bit-identical" if family.exact == "bits" else to_rounding
        if family.no_diffv2:
            diffv2 = f"refused: {family.no_diffv2}"
        rows.setdefault((diffv2, "bit-identical"), []).append(name)
    for name, why in NO_STREAM.items():
        rows.setdefault((f"refused: {why}", "refused"), []).append(name)
    lines = [
        f"| {', '.join(names)} | {diffv2} | {attnres} |"
        for (diffv2, attnres), names in rows.items()
    ]
    return "\n".join(["| `model_type` | diffv2 | attnres |", "|---|---|---|", *lines])
