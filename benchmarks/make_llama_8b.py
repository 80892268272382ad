"""Write a synthetic checkpoint with the shape of Llama 3.1 8B: 16 GB of bf16 in four shards.

The weights are random and small, so that a forward pass stays finite. Each tensor is cut from one
pool of random values, at another place for each, so that writing is as fast as the disk.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from difftool.checkpoint import Checkpoint, Computed, Output
from difftool.folder import new_folder
from difftool.shards import plan_shards, write_shards

POOL = 2**24 + 43  # values; prime, so that no row length of a model divides it
STEP = 7_919_123  # how far apart in the pool two tensors begin
SHARD = 5 * 10**9  # bytes, as the Hub's checkpoints are cut

CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 128000,
    "eos_token_id": 128001,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 14336,
    "max_position_embeddings": 131072,
    "mlp_bias": False,
    "model_type": "llama",
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "num_key_value_heads": 8,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.43.0.dev0",
    "use_cache": True,
    "vocab_size": 128256,
}
SCALED = ("hidden_size", "intermediate_size", "vocab_size")


def make_config(*, layers: int = 32, scale: float = 1.0, tied: bool = False) -> dict[str, Any]:
    """Return the config with fewer layers, widths times `scale`, and heads as wide as they fit."""
    sizes = {name: int(CONFIG[name] * scale) // 64 * 64 for name in SCALED}
    sizes["head_dim"] = sizes["hidden_size"] // CONFIG["num_attention_heads"]
    tokens = {
        name: min(CONFIG[name], sizes["vocab_size"] - 1) for name in CONFIG if "token_id" in name
    }
    return {
        **CONFIG,
        **sizes,
        **tokens,
        "num_hidden_layers": layers,
        "tie_word_embeddings": tied,
    }


def llama_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return name and shape of every tensor, in the order of the Hub's shards."""
    width, inner = config["hidden_size"], config["intermediate_size"]
    queries = config["num_attention_heads"] * config["head_dim"]
    keys = config["num_key_value_heads"] * config["head_dim"]
    layer = {
        "self_attn.q_proj": (queries, width),
        "self_attn.k_proj": (keys, width),
        "self_attn.v_proj": (keys, width),
        "self_attn.o_proj": (width, queries),
        "mlp.gate_proj": (inner, width),
        "mlp.up_proj": (inner, width),
        "mlp.down_proj": (width, inner),
        "input_layernorm": (width,),
        "post_attention_layernorm": (width,),
    }
    embedding = (config["vocab_size"], width)
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": embedding}
    for number in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{number}.{name}.weight": shape for name, shape in layer.items()}
    shapes["model.norm.weight"] = (width,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = embedding
    return shapes


def make_llama(
    out: Path,
    *,
    layers: int = 32,
    scale: float = 1.0,
    tied: bool = False,
    shard_size: int = SHARD,
    force: bool = False,
) -> Path:
    """Write the checkpoint and return its folder; memory holds the pool and one tensor.

    Args:
        out: the new folder.
        layers: decoder layers.
        scale: of the widths and the vocabulary; 1 is Llama 3.1 8B.
        tied: whether the embeddings are also the head.
        shard_size: bytes of a shard.
        force: replace an existing checkpoint.
    """
    config = make_config(layers=layers, scale=scale, tied=tied)
    pool = torch.randn(POOL, generator=torch.Generator().manual_seed(0)).mul_(0.02).bfloat16()
    outputs: dict[str, Output] = {
        name: Computed("BF16", shape, lambda n=number, s=shape: _cut(pool, n, s))  # type: ignore[misc]
        for number, (name, shape) in enumerate(llama_shapes(config).items())
    }
    with new_folder(out, force=force) as folder:
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        nothing = Checkpoint(folder, config, {}, (), None)
        plan = plan_shards(outputs, nothing, shard_size=shard_size)
        write_shards(folder, plan, check_finite=False)
    return out


def _cut(pool: torch.Tensor, number: int, shape: tuple[int, ...]) -> torch.Tensor:
    """Return a norm near one, or a matrix of values that begin at a place of their own."""
    size = torch.Size(shape).numel()
    start = number * STEP % len(pool)
    if len(shape) == 1:
        return 1 + pool[:size]
    repeated = pool.repeat(-(-(start + size) // len(pool)))
    return repeated[start : start + size].reshape(shape)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--scale", type=float, default=1.0, help="of widths and vocabulary")
    parser.add_argument("--tied", action="store_true", help="the embeddings are the head too")
    parser.add_argument("--force", action="store_true", help="replace an existing checkpoint")
    options = parser.parse_args()
    folder = make_llama(
        options.out,
        layers=options.layers,
        scale=options.scale,
        tied=options.tied,
        force=options.force,
    )
    print(folder)


if __name__ == "__main__":
    main()
