"""What real checkpoints do differently: each must convert to the same function, or be refused."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tiny_models import make_batch, make_config, make_model, randomise
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from difftool.checkpoint import fingerprint, open_checkpoint
from difftool.errors import UserError
from difftool.surgery.convert import Converted, ConvertOptions, convert

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
BOTH = pytest.mark.parametrize("target", ["diffv2", "attnres"])
LLAMA3 = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


# -- making sources --------------------------------------------------------------------------------


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A tiny Llama, one file, without a tokenizer."""
    return save(tmp_path / "source", "llama")


def save(folder: Path, name: str, dtype: torch.dtype = torch.float32, **changes: Any) -> Path:
    make_model(name, dtype=dtype, **changes).save_pretrained(folder)
    return folder


def read_json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def edit_config(folder: Path, *absent: str, **changes: Any) -> None:
    """Set keys of config.json, and take others out."""
    path = folder / "config.json"
    config = {key: value for key, value in read_json(path).items() if key not in absent}
    path.write_text(json.dumps({**config, **changes}))


Tensors = dict[str, torch.Tensor]


def edit_weights(
    folder: Path,
    change: Callable[[Tensors], Tensors],
    metadata: dict[str, str] | None = {"format": "pt"},  # noqa: B006, it stays as it is
) -> None:
    """Write the only weights file anew."""
    tensors = change(load_file(folder / SINGLE))
    (folder / SINGLE).unlink()
    save_file({name: t.contiguous() for name, t in tensors.items()}, folder / SINGLE, metadata)


def shard(folder: Path) -> list[str]:
    """Save the model of a folder anew in many files; return their names."""
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    (folder / SINGLE).unlink()
    model.save_pretrained(folder, max_shard_size="40KB")
    names = sorted(path.name for path in folder.glob("*.safetensors"))
    assert len(names) > 3
    return names


def tensors_of(folder: Path) -> Tensors:
    found: Tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        found |= load_file(path)
    return found


# -- converting and comparing ----------------------------------------------------------------------


def convert_to(target: str, source: Path, out: Path | None = None, **options: Any) -> Converted:
    """Convert, with the target's options under `settings`; two sublayers in a block of attnres."""
    settings = options.pop("settings", {"block_size": 2} if target == "attnres" else {})
    out = out or source.with_name(f"{source.name}-{target}")
    return convert(str(source), out, ConvertOptions(to=target, settings=settings, **options))


def load(folder: Path, auto: str = "AutoModelForCausalLM", **options: Any) -> PreTrainedModel:
    """Load as a user would; every weight in memory of its own, see `loading._align`."""
    model, found = getattr(transformers, auto).from_pretrained(
        folder, trust_remote_code=True, output_loading_info=True, **options
    )
    assert not found["missing_keys"] and not found["mismatched_keys"]
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    return model.eval()


@torch.no_grad()
def outputs(folder: Path, auto: str = "AutoModelForCausalLM", **options: Any) -> torch.Tensor:
    """Return what the model of a folder says of a left-padded batch."""
    ids, mask = make_batch()
    output = load(folder, auto, **options)(ids, attention_mask=mask)
    if "logits" not in output:
        return output.last_hidden_state[mask.bool()]
    return output.logits[mask.bool()] if output.logits.dim() == 3 else output.logits


def assert_same_function(
    source: Path, converted: Converted, auto: str = "AutoModelForCausalLM", dtype: Any = "auto"
) -> None:
    """Check with plain transformers, apart from the verification, that no bit differs."""
    assert converted.plan.exactness == "bits" and converted.comparisons
    before, after = outputs(source, auto, dtype=dtype), outputs(converted.path, auto, dtype=dtype)
    assert before.dtype == after.dtype and torch.equal(before, after)


def refuse(target: str, source: Path, match: str) -> UserError:
    """Check that the conversion is refused in these words, with nothing left behind."""
    before = sorted(source.parent.iterdir())
    with pytest.raises(UserError, match=match) as caught:
        convert_to(target, source)
    assert sorted(source.parent.iterdir()) == before
    return caught.value


# -- geometry --------------------------------------------------------------------------------------


@BOTH
def test_a_config_without_num_key_value_heads_means_full_multi_head(
    target: str, tmp_path: Path
) -> None:
    source = save(tmp_path / "source", "llama-full-multi-head")
    edit_config(source, "num_key_value_heads")
    converted = convert_to(target, source)
    assert converted.plan.host.geometry.kv_heads == converted.plan.host.geometry.heads == 6
    assert_same_function(source, converted)
    if target == "diffv2":
        assert load(converted.path).config.num_key_value_heads == 6


@BOTH
def test_a_config_without_head_dim_means_hidden_size_over_heads(target: str, source: Path) -> None:
    edit_config(source, "head_dim")
    converted = convert_to(target, source)
    assert_same_function(source, converted)
    if target == "diffv2":
        assert read_json(converted.path / "config.json")["head_dim"] == 48 // 6


@BOTH
@pytest.mark.parametrize(("name", "head_dim"), [
    ("llama-wide-heads-and-biases", 16),
    ("llama-narrow-heads", 4),
])  # fmt: skip
def test_a_head_dim_that_is_not_hidden_size_over_heads_is_kept(
    name: str, head_dim: int, target: str, tmp_path: Path
) -> None:
    source = save(tmp_path / "source", name)
    converted = convert_to(target, source)
    assert converted.plan.host.geometry.head_dim == head_dim
    assert_same_function(source, converted)
    query = tensors_of(converted.path)["model.layers.0.self_attn.q_proj.weight"]
    assert query.shape == ((12 if target == "diffv2" else 6) * head_dim, 48)


def test_twice_the_heads_need_not_divide_the_hidden_size(tmp_path: Path) -> None:
    source = save(tmp_path / "source", "llama", num_attention_heads=16, head_dim=8)
    converted = convert_to(
        "diffv2", source
    )  # transformers itself asks that heads divide it: 48 / 16
    assert_same_function(source, converted)
    load(converted.path).save_pretrained(tmp_path / "again")
    assert torch.equal(outputs(tmp_path / "again"), outputs(source))


# -- positions -------------------------------------------------------------------------------------

ROPE: dict[str, dict[str, Any]] = {
    "base": {"rope_theta": 500.0, "rope_scaling": None},
    "old-linear": {"rope_theta": 10000.0, "rope_scaling": {"type": "linear", "factor": 4.0}},
    "old-dynamic": {
        "rope_theta": 10000.0,
        "rope_scaling": {"type": "dynamic", "factor": 4.0},
        "max_position_embeddings": 16,
    },
    "old-llama3": {"rope_theta": 10000.0, "rope_scaling": {"type": "llama3", **LLAMA3}},
    "both-llama3": {
        "rope_theta": 10000.0,
        "rope_scaling": {"type": "llama3", "rope_type": "llama3", **LLAMA3},
    },
    "scaling-llama3": {"rope_theta": 10000.0, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
    "scaling-yarn": {
        "rope_theta": 10000.0,
        "rope_scaling": {
            "rope_type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    },
    "new-llama3": {
        "rope_parameters": {"rope_type": "llama3", "rope_theta": 10000.0, **LLAMA3},
    },
    "new-linear": {
        "rope_parameters": {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
    },
}


@BOTH
@pytest.mark.parametrize("spelling", ROPE)
def test_rope_is_understood_and_kept_in_every_spelling(
    spelling: str, target: str, source: Path
) -> None:
    plain = outputs(source)
    edit_config(source, "rope_parameters", **ROPE[spelling])
    assert not torch.equal(outputs(source), plain)  # or the test would see nothing
    converted = convert_to(target, source)
    assert_same_function(source, converted)
    config = read_json(converted.path / "config.json")
    assert {key: config.get(key) for key in ROPE[spelling]} == ROPE[spelling]
    (step,) = read_json(converted.path / "difftool.json")["steps"]
    assert step["source"]["fingerprint"] == fingerprint(open_checkpoint(source))


def test_phi3_keeps_its_longrope_in_the_old_spelling(tmp_path: Path) -> None:
    source = save(tmp_path / "source", "phi3-longrope")
    factors = {"short_factor": [1.0] * 4, "long_factor": [1.5, 2.0, 3.0, 4.0]}
    scaling = {"type": "longrope", **factors}
    edit_config(source, "rope_parameters", rope_theta=10000.0, rope_scaling=scaling)
    converted = convert_to("diffv2", source)
    assert_same_function(source, converted)
    assert read_json(converted.path / "config.json")["rope_scaling"] == scaling
    load(converted.path).save_pretrained(tmp_path / "again")
    assert torch.equal(outputs(tmp_path / "again"), outputs(source))


# -- dtypes ----------------------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize(("key", "other"), [("torch_dtype", "dtype"), ("dtype", "torch_dtype")])
def test_the_dtype_stays_under_the_key_that_the_config_has(
    key: str, other: str, target: str, tmp_path: Path
) -> None:
    source = save(tmp_path / "source", "llama", torch.bfloat16)
    edit_config(source, "dtype", "torch_dtype", **{key: "bfloat16"})
    kept = read_json(convert_to(target, source).path / "config.json")
    assert kept[key] == "bfloat16" and other not in kept
    changed = convert_to(target, source, tmp_path / "changed", dtype="float32")
    config = read_json(changed.path / "config.json")
    assert config[key] == "float32" and other not in config


@BOTH
def test_a_config_without_a_dtype_leaves_the_weights_theirs(target: str, tmp_path: Path) -> None:
    source = save(tmp_path / "source", "llama", torch.bfloat16)
    edit_config(source, "dtype", "torch_dtype")
    converted = convert_to(target, source)
    assert {tensor.dtype for tensor in tensors_of(converted.path).values()} == {torch.bfloat16}
    assert_same_function(source, converted)


@BOTH
def test_every_tensor_of_a_mixed_model_keeps_its_own_dtype(target: str, tmp_path: Path) -> None:
    source = save(tmp_path / "source", "llama", torch.bfloat16)
    edit_weights(source, lambda old: {n: t.float() if "norm" in n else t for n, t in old.items()})
    converted = convert_to(target, source)
    before, after = tensors_of(source), tensors_of(converted.path)
    for name in before.keys() & after.keys():
        assert after[name].dtype == before[name].dtype, name
    new = {tensor.dtype for name, tensor in after.items() if name not in before}
    assert new == {torch.bfloat16}
    assert_same_function(source, converted)


@BOTH
def test_a_float16_model_is_verified_in_float16(target: str, tmp_path: Path) -> None:
    source = save(tmp_path / "source", "llama", torch.float16)
    converted = convert_to(target, source)
    assert [comparison.dtype for comparison in converted.comparisons] == ["float16", "float32"]
    assert_same_function(source, converted)


@BOTH
@pytest.mark.parametrize(("stored", "wanted"), [
    (torch.bfloat16, "float32"),
    (torch.float32, "bfloat16"),
    (torch.float32, "float16"),
])  # fmt: skip
def test_dtype_casts_every_weight_and_nothing_else(
    stored: torch.dtype, wanted: str, target: str, tmp_path: Path
) -> None:
    source = save(tmp_path / "source", "llama", stored)
    converted = convert_to(target, source, dtype=wanted)
    dtype = getattr(torch, wanted)
    before, after = tensors_of(source), tensors_of(converted.path)
    assert {tensor.dtype for tensor in after.values()} == {dtype}
    unchanged = [name for name in before if name in after and "q_proj" not in name]
    assert unchanged
    for name in unchanged:
        assert torch.equal(after[name], before[name].to(dtype)), name
    assert read_json(converted.path / "config.json")["dtype"] == wanted
    assert converted.comparisons[0].dtype == wanted
    assert_same_function(source, converted, dtype=dtype)


# -- heads and embeddings --------------------------------------------------------------------------


@BOTH
def test_a_tied_head_that_is_stored_all_the_same_is_carried(target: str, tmp_path: Path) -> None:
    source = save(tmp_path / "source", "llama-tied")
    edit_weights(
        source, lambda old: {**old, "lm_head.weight": old["model.embed_tokens.weight"].clone()}
    )
    converted = convert_to(target, source)
    after = tensors_of(converted.path)
    assert torch.equal(after["lm_head.weight"], after["model.embed_tokens.weight"])
    assert_same_function(source, converted)


@BOTH
def test_tied_embeddings_are_stored_once_as_they_were(target: str, tmp_path: Path) -> None:
    source = save(tmp_path / "source", "llama-tied")
    assert "lm_head.weight" not in tensors_of(source)
    converted = convert_to(target, source)
    assert "lm_head.weight" not in tensors_of(converted.path)
    assert_same_function(source, converted)


@BOTH
def test_an_untied_model_without_a_head_is_refused_with_both_remedies(
    target: str, source: Path
) -> None:
    edit_weights(source, lambda old: {n: t for n, t in old.items() if n != "lm_head.weight"})
    error = refuse(target, source, "'lm_head.weight' is missing")
    assert "tie_word_embeddings" in error.fix and "restore the head" in error.fix


@BOTH
def test_without_architectures_the_names_tell_a_language_model(target: str, source: Path) -> None:
    edit_config(source, "architectures")
    converted = convert_to(target, source)
    prefix = {"diffv2": "DiffV2", "attnres": "AttnRes"}[target]
    assert load(converted.path).config.architectures == [f"{prefix}LlamaForCausalLM"]
    assert_same_function(source, converted)


@BOTH
@pytest.mark.parametrize("architectures", [["LlamaModel"], None])
def test_a_base_model_has_names_without_a_prefix(
    architectures: list[str] | None, target: str, tmp_path: Path
) -> None:
    source = tmp_path / "source"
    make_model("llama").model.save_pretrained(source)
    edit_config(source, "architectures")
    if architectures:
        edit_config(source, architectures=architectures)
    assert "layers.0.self_attn.q_proj.weight" in tensors_of(source)
    converted = convert_to(target, source)
    assert "layers.0.self_attn.q_proj.weight" in tensors_of(converted.path)
    assert converted.plan.host.architecture == "LlamaModel"
    assert_same_function(source, converted, "AutoModel")


@BOTH
def test_a_language_model_may_be_stored_under_the_names_of_its_base_model(
    target: str, tmp_path: Path
) -> None:
    source = save(tmp_path / "source", "llama-tied")  # as the first GPT-2 on the hub is
    edit_weights(source, lambda old: {n.removeprefix("model."): t for n, t in old.items()})
    converted = convert_to(target, source)
    assert "layers.0.self_attn.q_proj.weight" in tensors_of(converted.path)
    assert_same_function(source, converted)


def test_gpt2_as_the_hub_has_it_with_its_mask_buffers_and_no_prefix(tmp_path: Path) -> None:
    source = save(tmp_path / "source", "gpt2")
    mask = torch.ones(1, 1, 128, 128).tril()
    buffers = {f"h.{layer}.attn.bias": mask.clone() for layer in range(3)}
    edit_weights(
        source,
        lambda old: {**{n.removeprefix("transformer."): t for n, t in old.items()}, **buffers},
    )
    converted = convert_to("attnres", source)
    assert set(converted.plan.unused) == set(buffers)
    assert "h.0.self_attention_res_proj.weight" in tensors_of(converted.path)
    assert_same_function(source, converted)


@BOTH
def test_a_sequence_classifier_is_converted_in_its_body(target: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    config = make_config("llama", num_labels=3, pad_token_id=0)
    model = transformers.LlamaForSequenceClassification(config)
    randomise(model)
    model.save_pretrained(source)
    converted = convert_to(target, source)
    assert torch.equal(
        tensors_of(source)["score.weight"], tensors_of(converted.path)["score.weight"]
    )
    assert converted.comparisons[0].differences == {"padded batch": 0}
    assert converted.comparisons[0].tokens == 2  # of two texts, the last real token
    assert_same_function(source, converted, "AutoModelForSequenceClassification")


@BOTH
@pytest.mark.parametrize("model_type", ["gemma3", "llava", "qwen2_5_vl"])
def test_a_vision_language_wrapper_is_refused_with_the_reason(
    model_type: str, target: str, tmp_path: Path
) -> None:
    folder = tmp_path / "wrapper"
    folder.mkdir()
    inner = make_config("gemma3_text").to_dict()
    config = {"model_type": model_type, "text_config": inner, "vision_config": {}}
    (folder / "config.json").write_text(json.dumps(config))
    save_file({"language_model.model.x": torch.ones(1)}, folder / SINGLE, {"format": "pt"})
    error = refuse(target, folder, f"{model_type} wraps a language model .*gemma3_text")
    assert "Save the language model alone" in error.fix


# -- what lies beside ------------------------------------------------------------------------------


@BOTH
def test_leftover_rotary_buffers_are_carried_and_harm_nothing(target: str, source: Path) -> None:
    names = [f"model.layers.{layer}.self_attn.rotary_emb.inv_freq" for layer in range(3)]
    edit_weights(source, lambda old: {**old, **{name: torch.rand(4) for name in names}})
    converted = convert_to(target, source)
    assert sorted(converted.plan.unused) == names
    before, after = tensors_of(source), tensors_of(converted.path)
    assert all(torch.equal(after[name], before[name]) for name in names)
    assert_same_function(source, converted)


@BOTH
@pytest.mark.parametrize("metadata", [None, {"made_by": "somebody"}])
def test_weights_without_format_metadata_get_it(
    metadata: dict[str, str] | None, target: str, source: Path
) -> None:
    edit_weights(source, lambda old: old, metadata)
    converted = convert_to(target, source)
    with safe_open(converted.path / SINGLE, "pt") as file:
        assert file.metadata() == {**(metadata or {}), "format": "pt"}
    assert {name: t.tolist() for name, t in tensors_of(source).items() if "norm" in name} == {
        name: t.tolist()
        for name, t in tensors_of(converted.path).items()
        if "norm" in name and "_res_" not in name
    }


@BOTH
def test_many_shards_and_an_index_that_counts_wrong(target: str, source: Path) -> None:
    names = shard(source)
    index = read_json(source / INDEX)
    index["metadata"]["total_size"] = 7
    (source / INDEX).write_text(json.dumps(index))
    converted = convert_to(target, source)
    kept = sorted(path.name for path in converted.path.glob("*.safetensors"))
    assert [name for name in kept if name in names] == names
    written = read_json(converted.path / INDEX)
    stored = tensors_of(converted.path)
    assert written["metadata"]["total_size"] == sum(t.nbytes for t in stored.values())
    assert written["weight_map"].keys() == stored.keys()
    for name, file in index["weight_map"].items():
        if name in stored and "q_proj" not in name:
            assert written["weight_map"][name] == file
    assert_same_function(source, converted)


@BOTH
def test_shard_size_packs_the_tensors_anew(target: str, source: Path) -> None:
    converted = convert_to(target, source, shard_size=20_000)
    files = sorted(converted.path.glob("*.safetensors"))
    assert [file.name for file in files] == [
        f"model-{number:05}-of-{len(files):05}.safetensors" for number in range(1, len(files) + 1)
    ]
    for file in files:
        sizes = [tensor.nbytes for tensor in load_file(file).values()]
        assert sum(sizes) <= 20_000 or len(sizes) == 1
    assert_same_function(source, converted)


def save_tokenizer(folder: Path, words: str) -> None:
    """Save a tokenizer that knows a handful of words."""
    vocabulary = {word: number for number, word in enumerate(["<unk>", *words.split()])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(folder)


@BOTH
def test_a_vocabulary_padded_beyond_the_tokenizer_stays_padded(target: str, source: Path) -> None:
    save_tokenizer(source, "The capital of France is def return if n < 2")
    converted = convert_to(target, source)
    assert tensors_of(converted.path)["lm_head.weight"].shape == (128, 48)
    assert (converted.path / "tokenizer.json").read_bytes() == (
        source / "tokenizer.json"
    ).read_bytes()
    assert converted.comparisons[0].tokens < 40  # the two prompts, word by word
    assert_same_function(source, converted)


@BOTH
def test_a_folder_without_a_tokenizer_is_verified_on_random_tokens(
    target: str, source: Path
) -> None:
    converted = convert_to(target, source)
    assert not list(converted.path.glob("tokenizer*"))
    assert converted.comparisons[0].tokens == 24 + 16
    assert_same_function(source, converted)


# -- quantised sources -----------------------------------------------------------------------------


@BOTH
@pytest.mark.parametrize("method", ["bitsandbytes", "gptq", "awq", "fp8"])
def test_a_quantised_source_is_refused(method: str, target: str, source: Path) -> None:
    edit_config(source, quantization_config={"quant_method": method, "bits": 4})
    refuse(target, source, f"already quantised \\({method}\\)")


MXFP4 = {
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
    "quant_method": "mxfp4",
}


def save_mxfp4(folder: Path) -> Path:
    """Save a tiny GPT-OSS like the real ones: attention in bf16, experts packed, 32 to a scale."""
    save(folder, "gpt_oss", torch.bfloat16, hidden_size=64, intermediate_size=64)
    generator = torch.Generator().manual_seed(2)

    def pack(old: Tensors) -> Tensors:
        new = {}
        for name, tensor in old.items():
            if name.endswith((".gate_up_proj", ".down_proj")):  # [experts, in, out]
                experts, width, height = tensor.shape
                blocks, groups = (experts, height, width // 32, 16), (experts, height, width // 32)
                draw = torch.randint(0, 256, blocks, generator=generator)
                new[f"{name}_blocks"] = draw.to(torch.uint8)
                draw = torch.randint(118, 124, groups, generator=generator)  # 2**-9 to 2**-4
                new[f"{name}_scales"] = draw.to(torch.uint8)
            else:
                new[name] = tensor
        return new

    edit_weights(folder, pack)
    edit_config(folder, quantization_config=MXFP4)
    return folder


@BOTH
def test_mxfp4_experts_pass_through_untouched(target: str, tmp_path: Path) -> None:
    source = save_mxfp4(tmp_path / "source")
    converted = convert_to(target, source)
    before, after = tensors_of(source), tensors_of(converted.path)
    packed = [name for name in before if name.endswith(("_blocks", "_scales"))]
    assert len(packed) == 3 * 4
    for name in packed:
        assert after[name].dtype == torch.uint8 and torch.equal(after[name], before[name])
    assert read_json(converted.path / "config.json")["quantization_config"] == MXFP4
    assert_same_function(source, converted, dtype=torch.bfloat16)


def test_dtype_leaves_packed_experts_alone(tmp_path: Path) -> None:
    source = save_mxfp4(tmp_path / "source")
    converted = convert_to("diffv2", source, dtype="float32", verify=False)
    before, after = tensors_of(source), tensors_of(converted.path)
    for name, tensor in before.items():
        if tensor.dtype == torch.uint8:
            assert torch.equal(after[name], tensor)
    assert {t.dtype for t in after.values()} == {torch.uint8, torch.float32}


# -- files that need not change --------------------------------------------------------------------


def test_attnres_leaves_every_shard_as_it_was(source: Path) -> None:
    names = shard(source)
    converted = convert_to("attnres", source)
    for name in names:
        assert (converted.path / name).read_bytes() == (source / name).read_bytes()
        assert (converted.path / name).stat().st_nlink == 1
    new = {path.name for path in converted.path.glob("*.safetensors")} - set(names)
    assert new == {"model-attnres.safetensors"}
    assert {converted.ways[name] for name in names} <= {"copy", "reflink"}
    assert_same_function(source, converted)


def test_link_shares_the_shards_that_do_not_change(source: Path) -> None:
    names = shard(source)
    converted = convert_to("attnres", source, link=True)
    for name in names:
        assert (converted.path / name).samefile(source / name)
        assert (converted.path / name).stat().st_nlink == 2
        assert converted.ways[name] == "link"
    assert (converted.path / "model-attnres.safetensors").stat().st_nlink == 1
    assert_same_function(source, converted)


def test_link_shares_a_lone_file_as_the_first_of_two(source: Path) -> None:
    converted = convert_to("attnres", source, link=True)
    first, second = (converted.path / f"model-0000{n}-of-00002.safetensors" for n in (1, 2))
    assert first.samefile(source / SINGLE) and first.stat().st_nlink == 2
    assert all("_res_" in name for name in load_file(second))
    assert not (converted.path / SINGLE).exists()
    assert_same_function(source, converted)


def test_link_writes_a_file_that_lacks_its_format_anew(source: Path) -> None:
    edit_weights(source, lambda old: old, None)
    converted = convert_to("attnres", source, link=True)
    assert all(path.stat().st_nlink == 1 for path in converted.path.glob("*.safetensors"))
    assert_same_function(source, converted)


def test_diffv2_links_only_shards_without_attention(source: Path) -> None:
    names = shard(source)
    converted = convert_to("diffv2", source, link=True)
    weight_map = read_json(source / INDEX)["weight_map"]
    touched = {file for name, file in weight_map.items() if "q_proj" in name or "o_proj" in name}
    assert touched != set(names)
    for name in names:
        shared = (converted.path / name).samefile(source / name)
        assert shared == (name not in touched), name
    assert_same_function(source, converted)


# -- the targets' options --------------------------------------------------------------------------


def test_another_start_gate_adds_a_bias_and_is_exact_to_rounding(source: Path) -> None:
    converted = convert_to("diffv2", source, settings={"start_gate": 0.3})
    after = tensors_of(converted.path)
    bias = after["model.layers.0.self_attn.differential.lambda_proj.bias"]
    assert bias.shape == (6,)
    torch.testing.assert_close(bias.sigmoid(), torch.full((6,), 0.3))
    assert converted.plan.exactness == "rounding"
    assert read_json(converted.path / "config.json")["diffv2"]["lambda_bias"] is True
    one, two = outputs(source), outputs(converted.path)
    assert not torch.equal(one, two)
    # a - 0.3 a is rounded before it meets W_o / 0.7: some 1e-7 of the largest logit, a few times
    torch.testing.assert_close(two, one, rtol=0, atol=1e-5 * one.abs().max().item())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_another_start_gate_shows_the_rounding_of_half_precision_weights(
    dtype: torch.dtype, tmp_path: Path
) -> None:
    source = save(tmp_path / "source", "llama", dtype)
    converted = convert_to("diffv2", source, settings={"start_gate": 0.3})
    assert converted.plan.exactness == "weights"
    one, two = outputs(source).float(), outputs(converted.path).float()
    # each weight of W_o / 0.7 is off by up to half a unit in the last place, as is every activation
    unit = torch.finfo(dtype).eps
    torch.testing.assert_close(two, one, rtol=0, atol=5 * unit * one.abs().max().item())


def test_noise_moves_the_second_head_of_each_pair_and_no_other(source: Path) -> None:
    settings = {"noise": 0.1, "seed": 3}
    converted = convert_to("diffv2", source, settings=settings)
    assert converted.plan.exactness == "none"
    assert converted.comparisons[0].max_difference > 1e-3
    before, after = tensors_of(source), tensors_of(converted.path)
    name = "model.layers.1.self_attn.q_proj.weight"
    pairs = after[name].reshape(6, 2, 8, 48)
    old = before[name].reshape(6, 8, 48)
    assert torch.equal(pairs[:, 0], old)
    shift = pairs[:, 1] - old
    assert 0.05 < (shift.std() / old.std()).item() < 0.15
    assert all(head.abs().max() > 0 for head in shift)
    others = [n for n in before if n in after and "q_proj" not in n]
    assert all(torch.equal(after[n], before[n]) for n in others)
    again = convert_to("diffv2", source, source.with_name("again"), settings=settings)
    assert (again.path / SINGLE).read_bytes() == (converted.path / SINGLE).read_bytes()
    other = convert_to("diffv2", source, source.with_name("other"), settings={"noise": 0.1})
    assert not torch.equal(tensors_of(other.path)[name], after[name])


@pytest.mark.parametrize(("settings", "block_size", "blocks"), [
    ({"blocks": "full"}, 1, 6),
    ({"blocks": 1}, 6, 1),
    ({"blocks": 3}, 2, 3),
    ({"blocks": 4}, 2, 3),
    ({"blocks": 6}, 1, 6),
    ({}, 1, 6),
    ({"block_size": 4}, 4, 2),
    ({"block_size": 6}, 6, 1),
])  # fmt: skip
def test_blocks_divide_the_sublayers(
    settings: dict[str, Any], block_size: int, blocks: int, source: Path
) -> None:
    converted = convert_to("attnres", source, settings=settings)
    written = read_json(converted.path / "config.json")["attnres"]
    assert (written["block_size"], written["blocks"]) == (block_size, blocks)
    assert_same_function(source, converted)


@pytest.mark.parametrize("settings", [{"blocks": 7}, {"blocks": 0}, {"block_size": 7}])
def test_more_blocks_than_sublayers_are_refused(settings: dict[str, Any], source: Path) -> None:
    with pytest.raises(UserError, match="1 to 6, its number of sublayers"):
        convert_to("attnres", source, settings=settings)
    assert [path.name for path in source.parent.iterdir()] == ["source"]


@BOTH
def test_a_model_already_converted_to_the_target_is_refused(target: str, source: Path) -> None:
    once = convert_to(target, source, verify=False).path
    refuse(target, once, f"already converted to {target}")
    other = "attnres" if target == "diffv2" else "diffv2"
    both = convert_to(other, once, verify=False).path
    refuse(target, both, f"already converted to {target}")
    refuse(other, both, f"already converted to {other}")
