"""Configs of real checkpoints, without their weights: planned from config and index, or refused."""

import json
import math
import time
from dataclasses import dataclass
from pathlib import Path

import pytest

from difftool.checkpoint import Computed, Output, TensorInfo
from difftool.errors import UserError
from difftool.sources import Source
from difftool.surgery.convert import ConvertOptions, plan_source
from difftool.surgery.plan import Plan


@dataclass(frozen=True)
class Sizes:
    """Sizes of one real model, from its published config.

    Attributes:
        per_head: numbers that a query head has in each layer besides its rows: a bias, a sink.
        query_tensors: tensors of a layer that twice the heads change.
        fused: whether query, key and value are one tensor.
    """

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    per_head: int = 0
    query_tensors: int = 1
    fused: bool = False


PLANNED = {
    "devstral-small-mistral": Sizes(40, 5120, 32, 8, 128),
    "gemma-2b": Sizes(18, 2048, 8, 1, 256),
    "gpt-oss-120b": Sizes(36, 2880, 64, 8, 64, per_head=64 + 1, query_tensors=3),
    "llama-3.2-1b": Sizes(16, 2048, 32, 8, 64),
    "llama-3.2-3b-presharded": Sizes(28, 3072, 24, 8, 128),
    "mistral-7b-instruct-v0.3": Sizes(32, 4096, 32, 8, 128),
    "mixtral-8x22b-wizardlm2": Sizes(56, 6144, 48, 8, 128),
    "phi-3-mini": Sizes(32, 3072, 32, 32, 96, fused=True),
    "qwen2.5-14b": Sizes(48, 5120, 40, 8, 128, per_head=128, query_tensors=2),
    "qwen3-8b": Sizes(36, 4096, 32, 8, 128),
    "qwen3-moe-1layer": Sizes(1, 2048, 32, 4, 128),
    "smollm3-3b": Sizes(36, 2048, 16, 4, 128),
}
ATTNRES_ONLY = {"gpt2-large": (36, 1280)}  # layers, hidden size
REFUSED = {
    "gpt-neox-pythia-1.4b": "gpt_neox_reward_model is not supported: neither transformers nor",
    "llama-2-70b-gptq": r"already quantised \(gptq\)",
    "llama-3.1-8b-bnb": r"already quantised \(bitsandbytes\)",
    "llama-3.1-8b-instruct": r"already quantised \(bitsandbytes\)",  # in spite of its name
}
INDEXED = [
    "devstral-small-mistral",
    "gemma-2b",
    "llama-3.2-3b-presharded",
    "mixtral-8x22b-wizardlm2",
    "phi-3-mini",
    "qwen2.5-14b",
    "smollm3-3b",
]
SECONDS = 10  # of the processor, for a model of any size; it takes less than one


@pytest.fixture
def configs(shared_data: Path) -> Path:
    return shared_data / "configs"


def plan(folder: Path, target: str, **settings: int) -> Plan:
    """Plan as `--dry-run` does, in a moment, writing nothing."""
    before = sorted(folder.iterdir())
    source = Source(folder.name, folder.name, None, folder, "folder")
    started = time.process_time()
    made = plan_source(source, ConvertOptions(to=target, settings=settings))
    assert time.process_time() - started < SECONDS
    assert sorted(folder.iterdir()) == before
    assert not made.source.complete
    return made


def count(tensors: dict[str, TensorInfo] | dict[str, Output]) -> int:
    return sum(math.prod(tensor.shape) for tensor in tensors.values())


def added(made: Plan) -> int:
    return count(made.outputs) - count(made.source.tensors)


def new_names(made: Plan) -> list[str]:
    return [name for name in made.outputs if name not in made.source.tensors]


def changed_names(made: Plan) -> list[str]:
    return [
        name
        for name, output in made.outputs.items()
        if name in made.source.tensors and isinstance(output, Computed)
    ]


def test_every_config_that_is_there_has_its_expectation(configs: Path) -> None:
    folders = {path.name for path in configs.iterdir()}
    assert folders == PLANNED.keys() | ATTNRES_ONLY.keys() | REFUSED.keys()


@pytest.mark.parametrize("name", PLANNED)
def test_diffv2_doubles_the_query_heads_of_every_layer(name: str, configs: Path) -> None:
    sizes, made = PLANNED[name], plan(configs / name, "diffv2")
    width = sizes.heads * sizes.head_dim
    query = "qkv_proj" if sizes.fused else "q_proj"
    rows = 2 * width + (2 * sizes.kv_heads * sizes.head_dim if sizes.fused else 0)
    for layer in range(sizes.layers):
        attention = f"model.layers.{layer}.self_attn."
        assert made.outputs[f"{attention}{query}.weight"].shape == (rows, sizes.hidden)
        inside = f"{attention}differential."
        assert made.outputs[f"{inside}o_proj.weight"].shape == (sizes.hidden, width)
        assert made.outputs[f"{inside}lambda_proj.weight"].shape == (sizes.heads, sizes.hidden)
        assert f"{attention}o_proj.weight" not in made.outputs
    assert f"model.layers.{sizes.layers}.self_attn.{query}.weight" not in made.outputs
    assert len(changed_names(made)) == sizes.query_tensors * sizes.layers
    assert added(made) == sizes.layers * (
        (width + sizes.heads) * sizes.hidden + sizes.heads * sizes.per_head
    )
    assert made.config["num_attention_heads"] == 2 * sizes.heads
    assert made.config["num_key_value_heads"] == sizes.kv_heads
    assert made.config["head_dim"] == sizes.head_dim
    assert made.exactness == "bits"


@pytest.mark.parametrize("name", [*PLANNED, *ATTNRES_ONLY])
def test_attnres_adds_two_vectors_for_every_read_and_changes_nothing(
    name: str, configs: Path
) -> None:
    sizes = PLANNED.get(name)
    layers, hidden = (sizes.layers, sizes.hidden) if sizes else ATTNRES_ONLY[name]
    made = plan(configs / name, "attnres", blocks=2)
    reads = 2 * layers + 1
    assert changed_names(made) == [] and made.source.tensors.keys() <= made.outputs.keys()
    assert len(new_names(made)) == 2 * reads
    assert added(made) == 2 * reads * hidden
    body = "transformer.h" if name == "gpt2-large" else "model.layers"
    for layer in range(layers):
        for read in ("self_attention_res", "mlp_res"):
            assert made.outputs[f"{body}.{layer}.{read}_norm.weight"].shape == (hidden,)
            assert made.outputs[f"{body}.{layer}.{read}_proj.weight"].shape == (1, hidden)
    assert made.config["attnres"]["block_size"] == layers


@pytest.mark.parametrize("target", ["diffv2", "attnres"])
@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_converted_is_refused_with_the_reason(
    name: str, target: str, configs: Path
) -> None:
    with pytest.raises(UserError, match=REFUSED[name]):
        plan(configs / name, target)


def test_gpt2_has_no_diffv2_and_the_reason_is_its_layout(configs: Path) -> None:
    with pytest.raises(UserError, match="fused query-key-value projection"):
        plan(configs / "gpt2-large", "diffv2")


def test_a_model_of_one_layer_has_a_block_per_sublayer(configs: Path) -> None:
    made = plan(configs / "qwen3-moe-1layer", "attnres")
    assert (made.config["attnres"]["block_size"], made.config["attnres"]["blocks"]) == (1, 2)
    with pytest.raises(UserError, match="blocks=8 does not fit this model"):
        plan(configs / "qwen3-moe-1layer", "attnres", blocks=8)


@pytest.mark.parametrize("name", INDEXED)
def test_a_plan_covers_every_tensor_and_byte_that_the_index_names(name: str, configs: Path) -> None:
    written = json.loads((configs / name / "model.safetensors.index.json").read_text())
    listed = written["weight_map"]
    made = plan(configs / name, "attnres")
    missing = [tensor for tensor in listed if tensor not in made.outputs]
    assert all(".experts." in tensor for tensor in missing)  # planned merged, as they are loaded
    files = {info.file for info in made.source.tensors.values()}
    assert files <= set(listed.values())
    assert made.source.nbytes == written["metadata"]["total_size"]
