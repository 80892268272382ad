"""Tiny random models, at least one per family: real architectures, weights that hide nothing.

Two or three layers of width 48, so that a hundred of them run in seconds; weights, norms, biases,
attention sinks and routers are all random, windows are shorter than `SEQUENCE`, and the variants
hold what real checkpoints do differently (head geometry, rope scaling, tying, parallel branches).
"""

import copy
import functools
import inspect
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from reference.diffv2 import exact_start
from transformers import DynamicCache, PretrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

from difftool.surgery.families import FAMILIES
from difftool.surgery.targets.modeling_attnres import AttnResMixin
from difftool.surgery.targets.modeling_diffv2 import DiffV2Mixin

VOCABULARY, SEQUENCE, PADDING = 128, 20, 5

_BASE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_WINDOW = {
    "sliding_window": 8,
}
_MIXED = {
    **_WINDOW,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
_EXPERTS = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
}
_ROUTED = {
    **_EXPERTS,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
}
_LATENT = {
    **_ROUTED,
    "num_hidden_layers": 2,
    "num_key_value_heads": 6,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "first_k_dense_replace": 1,
}
_GPT2 = {
    "n_embd": 48,
    "n_layer": 3,
    "n_head": 6,
    "n_positions": 128,
}


def _rope(rope_type: str, **options: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": rope_type, "rope_theta": 10000.0, **options}}


@dataclass(frozen=True)
class TinyModel:
    """One tiny model: its family (`model_type`) and what its config says beyond the common base.

    Attributes:
        prefix_stable: False if a longer sequence changes earlier tokens (dynamic rope).
    """

    family: str
    options: dict[str, Any] = field(default_factory=dict)
    prefix_stable: bool = True


TINY: dict[str, TinyModel] = {
    "llama": TinyModel("llama"),
    "llama-full-multi-head": TinyModel(
        "llama",
        {
            "num_key_value_heads": None,
        },
    ),
    "llama-one-kv-head": TinyModel(
        "llama",
        {
            "num_key_value_heads": 1,
        },
    ),
    "llama-wide-heads-and-biases": TinyModel(
        "llama",
        {
            "head_dim": 16,
            "attention_bias": True,
            "mlp_bias": True,
        },
    ),
    "llama-narrow-heads": TinyModel(
        "llama",
        {
            "head_dim": 4,
        },
    ),
    "llama-tied": TinyModel(
        "llama",
        {
            "tie_word_embeddings": True,
        },
    ),
    "llama-rope-linear": TinyModel("llama", _rope("linear", factor=4.0)),
    "llama-rope-dynamic": TinyModel(
        "llama",
        {
            **_rope("dynamic", factor=4.0),
            "max_position_embeddings": 16,
        },
        prefix_stable=False,
    ),
    "llama-rope-yarn": TinyModel(
        "llama", _rope("yarn", factor=4.0, original_max_position_embeddings=16)
    ),
    "llama-rope-llama3": TinyModel(
        "llama",
        _rope(
            "llama3",
            factor=8.0,
            low_freq_factor=1.0,
            high_freq_factor=4.0,
            original_max_position_embeddings=16,
        ),
    ),
    "mistral": TinyModel("mistral", _WINDOW),
    "ministral": TinyModel("ministral", _MIXED),
    "ministral3": TinyModel("ministral3"),
    "qwen2": TinyModel("qwen2"),
    "qwen2-sliding": TinyModel(
        "qwen2",
        {
            **_WINDOW,
            "use_sliding_window": True,
            "max_window_layers": 1,
        },
    ),
    "qwen3": TinyModel(
        "qwen3",
        {
            "attention_bias": True,
        },
    ),
    "smollm3": TinyModel(
        "smollm3",
        {
            "no_rope_layer_interval": 2,
        },
    ),
    "phi3": TinyModel("phi3"),
    "phi3-longrope": TinyModel(
        "phi3",
        {
            **_rope("longrope", short_factor=[1.0] * 4, long_factor=[1.5, 2.0, 3.0, 4.0]),
            "original_max_position_embeddings": 16,
        },
        prefix_stable=False,
    ),
    "gemma": TinyModel("gemma"),
    "gemma2": TinyModel(
        "gemma2",
        {
            **_MIXED,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 10.0,
            "query_pre_attn_scalar": 16,
        },
    ),
    "gemma3_text": TinyModel(
        "gemma3_text",
        {
            **_MIXED,
            "query_pre_attn_scalar": 16,
        },
    ),
    "olmo": TinyModel(
        "olmo",
        {
            "clip_qkv": 2.0,
        },
    ),
    "olmo2": TinyModel("olmo2"),
    "olmo3": TinyModel("olmo3", _MIXED),
    "olmoe": TinyModel(
        "olmoe",
        {
            **_EXPERTS,
            "num_key_value_heads": 6,
        },
    ),
    "granite": TinyModel(
        "granite",
        {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.3,
            "attention_multiplier": 0.2,
            "logits_scaling": 2.0,
        },
    ),
    "granitemoe": TinyModel(
        "granitemoe",
        {
            **_EXPERTS,
            "residual_multiplier": 0.3,
        },
    ),
    "granitemoeshared": TinyModel(
        "granitemoeshared",
        {
            **_EXPERTS,
            "shared_intermediate_size": 16,
            "residual_multiplier": 0.3,
        },
    ),
    "mixtral": TinyModel("mixtral", _EXPERTS),
    "qwen2_moe": TinyModel(
        "qwen2_moe",
        {
            **_EXPERTS,
            "shared_expert_intermediate_size": 16,
            "decoder_sparse_step": 1,
        },
    ),
    "qwen3_moe": TinyModel("qwen3_moe", _EXPERTS),
    "phimoe": TinyModel(
        "phimoe",
        {
            **_EXPERTS,
            "attention_bias": True,
        },
    ),
    "gpt_oss": TinyModel(
        "gpt_oss",
        {
            **_EXPERTS,
            **_MIXED,
        },
    ),
    "starcoder2": TinyModel("starcoder2", _WINDOW),
    "cohere": TinyModel(
        "cohere",
        {
            "logit_scale": 1.0,
        },
    ),
    "cohere-query-norm": TinyModel(
        "cohere",
        {
            "logit_scale": 1.0,
            "use_qk_norm": True,
        },
    ),
    "cohere2": TinyModel(
        "cohere2",
        {
            **_MIXED,
            "logit_scale": 1.0,
        },
    ),
    "glm": TinyModel("glm"),
    "glm4": TinyModel(
        "glm4",
        {
            "attention_bias": True,
        },
    ),
    "glm4_moe": TinyModel(
        "glm4_moe",
        {
            **_ROUTED,
            "use_qk_norm": True,
            "attention_bias": True,
        },
    ),
    "exaone4": TinyModel("exaone4", _MIXED),
    "nemotron": TinyModel("nemotron"),
    "stablelm": TinyModel(
        "stablelm",
        {
            "use_qkv_bias": True,
        },
    ),
    "stablelm-parallel-query-norm": TinyModel(
        "stablelm",
        {
            "use_parallel_residual": True,
            "qk_layernorm": True,
        },
    ),
    "helium": TinyModel("helium"),
    "arcee": TinyModel("arcee"),
    "apertus": TinyModel("apertus"),
    "ernie4_5": TinyModel(
        "ernie4_5",
        {
            "use_bias": True,
        },
    ),
    "hunyuan_v1_dense": TinyModel("hunyuan_v1_dense"),
    "seed_oss": TinyModel(
        "seed_oss",
        {
            "attention_out_bias": True,
        },
    ),
    "deepseek_v2": TinyModel("deepseek_v2", _LATENT),
    "deepseek_v3": TinyModel("deepseek_v3", _LATENT),
    "gpt_neox": TinyModel("gpt_neox"),
    "gpt_neox-sequential": TinyModel(
        "gpt_neox",
        {
            "use_parallel_residual": False,
        },
    ),
    "gpt2": TinyModel("gpt2", _GPT2),
}


def why_missing(name: str) -> str | None:
    """Return why the installed transformers cannot build this model, or None if it can."""
    family = TINY[name].family
    return None if family in CONFIG_MAPPING else f"this transformers has no {family}"


def make_config(name: str, **changes: Any) -> PretrainedConfig:
    """Return the config of a tiny model, a new object at each call."""
    tiny = TINY[name]
    return CONFIG_MAPPING[tiny.family](**{**_BASE, **tiny.options, **changes})


def make_model(
    name: str, *, seed: int = 0, dtype: torch.dtype = torch.float32, **changes: Any
) -> PreTrainedModel:
    """Return the causal language model of a tiny model in evaluation mode, with random weights."""
    config = make_config(name, **changes)
    model = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config).eval()
    randomise(model, seed=seed)
    return model.to(dtype)


@torch.no_grad()
def randomise(model: torch.nn.Module, *, seed: int = 0) -> None:
    """Draw every parameter, and every router's correction, from a seeded normal distribution."""
    generator = torch.Generator().manual_seed(seed)
    corrections = [item for item in model.named_buffers() if "correction_bias" in item[0]]
    for name, tensor in [*model.named_parameters(), *corrections]:
        noise = torch.randn(tensor.shape, generator=generator)
        if tensor.dim() > 1:
            tensor.copy_(0.2 * noise)
        elif name.endswith("bias"):
            tensor.copy_(0.4 * noise)
        else:
            tensor.copy_(1 + 0.3 * noise)


def make_batch(
    seed: int = 0, *, batch: int = 2, length: int = SEQUENCE, padding: int = PADDING
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return token ids and their mask, [batch, length]; the first row is padded on the left."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, VOCABULARY, (batch, length), generator=generator)
    mask = torch.ones_like(ids)
    mask[0, :padding] = 0
    ids[0, :padding] = 0
    return ids, mask


MIXINS = {"diffv2": DiffV2Mixin, "attnres": AttnResMixin}


@functools.cache
def grafted_class(host: type[PreTrainedModel], *targets: str) -> type[PreTrainedModel]:
    """Return the host's class with the targets' mixins before it."""
    bases = (*(MIXINS[target] for target in targets), host)
    return type("".join(targets) + host.__name__, bases, {})


def head_geometry(config: PretrainedConfig) -> tuple[int, int]:
    """Return query heads and head_dim."""
    heads = config.num_attention_heads
    return heads, getattr(config, "head_dim", None) or config.hidden_size // heads


def graft(
    source: PreTrainedModel,
    *targets: str,
    block_size: int = 2,
    start_gate: float | None = None,
    **changes: Any,
) -> PreTrainedModel:
    """Return a new model of the source's class with `targets` grafted on, at its exact start.

    Args:
        source: any head on any family.
        targets: "diffv2", "attnres", or both.
        block_size: sublayers in a block of attnres.
        start_gate: sigmoid of lambda at the start, through a bias; None: one half without.
        changes: further settings of the new config.
    """
    config = copy.deepcopy(source.config)
    family = FAMILIES[config.model_type]
    state = source.state_dict()
    if "diffv2" in targets:
        heads, head_dim = head_geometry(config)
        config.num_attention_heads, config.head_dim = 2 * heads, head_dim
        config.diffv2 = {"lambda_bias": start_gate is not None}
        state = exact_start(state, heads, head_dim, start_gate)
    if "attnres" in targets:
        parallel = getattr(config, "use_parallel_residual", False) and family.parallel_readers
        readers = family.parallel_readers if parallel else family.readers
        config.attnres = {
            "block_size": block_size,
            "layers": family.layers,
            "readers": [list(reader) for reader in readers],
            "final_norm": family.final_norm,
        }
    for name, value in changes.items():
        setattr(config, name, value)
    model = grafted_class(type(source), *targets)(config).to(source.dtype).eval()
    result = model.load_state_dict(state, strict=False)
    missing = [name for name in result.missing_keys if "_res_" not in name]
    assert not missing and not result.unexpected_keys, (missing, result.unexpected_keys)
    return model


def assert_near(actual: torch.Tensor, expected: torch.Tensor, share: float, what: str = "") -> None:
    """Fail if an element is off by more than `share` of the largest expected one."""
    bound = share * expected.abs().max().item()
    torch.testing.assert_close(
        actual.to(expected.dtype), expected, rtol=0, atol=bound, msg=lambda text: f"{what} {text}"
    )


def skip_if_missing(name: str) -> None:
    """Skip the test under way, saying why, if this transformers cannot build the model."""
    reason = why_missing(name)
    if reason:
        pytest.skip(reason)


@torch.no_grad()
def logits_of(
    model: torch.nn.Module, ids: torch.Tensor, mask: torch.Tensor, **options: Any
) -> torch.Tensor:
    """Return the logits [batch, length, vocabulary] of one full forward."""
    return model(ids, attention_mask=mask, **options).logits


@torch.no_grad()
def stepwise_logits(
    model: PreTrainedModel, ids: torch.Tensor, mask: torch.Tensor, *, prefill: int
) -> torch.Tensor:
    """Return the same logits from a prefill, then one token at a time over a growing cache."""
    parameters = inspect.signature(model.forward).parameters
    cache = {
        "cache" if "cache" in parameters else "past_key_values": DynamicCache(config=model.config)
    }
    pieces, start = [], 0
    for end in range(prefill, ids.shape[1] + 1):
        output = model(ids[:, start:end], attention_mask=mask[:, :end], use_cache=True, **cache)
        pieces.append(output.logits)
        start = end
    return torch.cat(pieces, dim=1)


def greedy(model: PreTrainedModel, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return the prompt and six tokens more."""
    return model.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False)


def project(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Return a loss: a fixed random projection of the real tokens' values [B, T, width]."""
    generator = torch.Generator().manual_seed(7)
    weights = torch.randn(values.shape, generator=generator)
    return (values * weights * mask[..., None]).sum()


def backward(
    model: torch.nn.Module, values: torch.Tensor, mask: torch.Tensor
) -> dict[str, torch.Tensor]:
    """Return the gradients that `project` leaves on the model's parameters."""
    model.zero_grad()
    project(values, mask).backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    return gradients


def export(model: PreTrainedModel, *, strict: bool = False) -> Any:
    """Return the model as an exported program's module, with any batch and any length."""
    ids, mask = make_batch()
    axes = {0: torch.export.Dim("batch", max=64), 1: torch.export.Dim("length", max=64)}
    program = torch.export.export(
        model,
        (),
        {"input_ids": ids, "attention_mask": mask, "use_cache": False},
        dynamic_shapes={"input_ids": axes, "attention_mask": axes, "use_cache": None},
        strict=strict,
    )
    return program.module()
