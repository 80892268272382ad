"""Every family, converted to every target it allows, loaded where difftool cannot be imported."""

import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
import yaml
from safetensors import safe_open
from tiny_models import TINY, make_config, make_model, skip_if_missing

from difftool import __version__
from difftool.checkpoint import fingerprint, open_checkpoint
from difftool.errors import UserError
from difftool.surgery.convert import Converted, ConvertOptions, convert
from difftool.surgery.families import FAMILIES
from difftool.surgery.targets import modeling_file, target_names

# A matrix product summed in another order moves a logit by a few units in the last place of its
# largest term (1.2e-7 in float32, 4e-3 in bfloat16); a misplaced head moves it by its own size.
ROUNDING = {"float32": 1e-5, "bfloat16": 5e-2}

PAIRS = [
    (name, target)
    for name, tiny in TINY.items()
    for target in target_names()
    if target != "diffv2" or FAMILIES[tiny.family].no_diffv2 is None
]
BFLOAT16 = ["llama", "qwen2", "gemma2", "granitemoe", "gpt_oss", "olmo2"]
COMPOSED = [
    "llama",
    "phi3",
    "gemma2",
    "olmo2",
    "mixtral",
    "gpt_oss",
    "stablelm-parallel-query-norm",
]
PREFIX = {"diffv2": "DiffV2", "attnres": "AttnRes"}


def save_source(folder: Path, name: str, dtype: torch.dtype = torch.float32) -> Path:
    """Save a tiny model as transformers does."""
    skip_if_missing(name)
    make_model(name, dtype=dtype).save_pretrained(folder)
    return folder


def convert_to(target: str, source: Path, out: Path, **settings: Any) -> Converted:
    """Convert; attnres with blocks of two sublayers, so that there are several."""
    if target == "attnres":
        settings = {"block_size": 2, **settings}
    return convert(str(source), out, ConvertOptions(to=target, settings=settings))


def contents(folder: Path) -> dict[str, str]:
    """Return the digest of every file of a folder."""
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
    }


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    found = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            names = file.keys()
            found |= {name: file.get_tensor(name) for name in names}
    return found


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


# -- the process that cannot import difftool -------------------------------------------------------

Examine = Callable[..., dict[str, Any]]


@pytest.fixture(scope="session")
def examine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Examine]:
    """Start the process once, and return the function that gives it a job."""
    folder = tmp_path_factory.mktemp("without-difftool")
    environment = {
        **{name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
        "HF_MODULES_CACHE": str(folder / "modules"),
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": "1",
    }
    script = Path(__file__).with_name("run_without_difftool.py")
    errors = folder / "stderr"
    with errors.open("w") as stderr:
        process = subprocess.Popen(
            [sys.executable, "-I", script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            cwd=folder,
            env=environment,
            text=True,
        )

    def ask(source: Path, converted: Path, auto: str = "AutoModelForCausalLM") -> dict[str, Any]:
        resaved = converted.with_name(f"{converted.name}-resaved")
        job = {"source": source, "converted": converted, "resaved": resaved, "auto": auto}
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write(json.dumps(job, default=str) + "\n")
        process.stdin.flush()
        answer = process.stdout.readline()
        assert answer, errors.read_text()[-4000:]
        return json.loads(answer)

    yield ask
    assert process.stdin is not None and process.stdout is not None
    process.stdin.close()
    process.stdout.close()
    process.wait(timeout=60)


def assert_plain_transformers_agrees(
    answer: dict[str, Any], name: str, targets: tuple[str, ...]
) -> None:
    """Check the answer on a converted causal language model against all that it must be."""
    prefix = "".join(PREFIX[target] for target in targets)
    config = type(make_config(name)).__name__
    assert answer["difftool_modules"] == []
    assert "trust_remote_code=True" in answer["refusal"]
    assert answer["config_class"] == prefix + config
    assert answer["model_type"] == "_".join((*targets, TINY[name].family))
    assert answer["body_class"] == prefix + config.replace("Config", "Model")
    assert answer["unplaced"] == answer["resaved_unplaced"] == answer["resaved_tensors"] == []
    assert set(answer["resaved_differences"].values()) == {0}
    exact = FAMILIES[TINY[name].family].exact == "bits" or targets == ("attnres",)
    for what, difference in answer["differences"].items():
        dtype, kernel, observation = what.split()
        # sdpa multiplies the heads of a group as one matrix when it decodes under a mask.
        packed = observation == "decoding" and kernel != "eager" and targets != ("attnres",)
        if observation == "tokens" or (exact and not packed):
            assert difference == 0, what
        assert difference <= ROUNDING[dtype], what
    assert answer["body_differences"]["pass"] <= (0 if exact else ROUNDING["float32"])


# -- the contract ----------------------------------------------------------------------------------


def test_every_family_has_a_tiny_model_here() -> None:
    assert {TINY[name].family for name, _ in PAIRS} == set(FAMILIES)


@pytest.mark.parametrize(("name", "target"), PAIRS)
def test_plain_transformers_loads_a_converted_model_as_the_same_function(
    name: str, target: str, tmp_path: Path, examine: Examine
) -> None:
    source, out = save_source(tmp_path / "source", name), tmp_path / "out"
    before = contents(source)
    converted = convert_to(target, source, out)
    assert contents(source) == before
    assert sorted(path.name for path in tmp_path.iterdir() if path.is_dir()) == ["out", "source"]
    assert_verified(converted, name, target)
    answer = examine(source, out)
    assert_plain_transformers_agrees(answer, name, (target,))


REFUSED = [name for name, tiny in TINY.items() if FAMILIES[tiny.family].no_diffv2]


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_exact_is_refused_before_anything_is_written(
    name: str, tmp_path: Path
) -> None:
    source = save_source(tmp_path / "source", name)
    reason = FAMILIES[TINY[name].family].no_diffv2
    assert reason
    with pytest.raises(UserError, match=re.escape(reason)):
        convert_to("diffv2", source, tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def assert_verified(converted: Converted, name: str, target: str) -> None:
    """Check what the verification found; where it may be rounding, see `verify.PACKED`."""
    host = converted.plan.host
    windowed = getattr(make_config(name), "sliding_window", None) is not None
    exact = {"padded batch"} if windowed else {"padded batch", "cached decoding"}
    if target == "attnres":
        exact = {"padded batch", "cached decoding", "padded cached decoding"}
    assert converted.plan.exactness == ("bits" if target == "attnres" else host.family.exact)
    for comparison in converted.comparisons:
        assert comparison.greedy_equal and comparison.top1_agreement == 1
        for what, difference in comparison.differences.items():
            if what in exact and converted.plan.exactness == "bits":
                assert difference == 0, what
            assert difference <= ROUNDING[comparison.dtype] * comparison.max_logit, what


@pytest.mark.parametrize("target", target_names())
@pytest.mark.parametrize("name", BFLOAT16)
def test_a_bfloat16_model_is_verified_in_bfloat16_and_in_float32(
    name: str, target: str, tmp_path: Path, examine: Examine
) -> None:
    source, out = save_source(tmp_path / "source", name, torch.bfloat16), tmp_path / "out"
    converted = convert_to(target, source, out)
    assert [comparison.dtype for comparison in converted.comparisons] == ["bfloat16", "float32"]
    assert_verified(converted, name, target)
    stored = {str(tensor.dtype) for tensor in tensors(out).values()}
    assert stored == {str(tensor.dtype) for tensor in tensors(source).values()}
    assert_plain_transformers_agrees(examine(source, out), name, (target,))


@pytest.mark.parametrize("name", COMPOSED)
def test_both_targets_in_either_order_give_the_same_checkpoint(
    name: str, tmp_path: Path, examine: Examine
) -> None:
    source = save_source(tmp_path / "source", name)
    results = []
    for first, second in (("diffv2", "attnres"), ("attnres", "diffv2")):
        middle, out = tmp_path / first, tmp_path / f"{first}-{second}"
        convert_to(first, source, middle)
        converted = convert_to(second, middle, out)
        assert converted.plan.targets == ("diffv2", "attnres")
        assert all(comparison.greedy_equal for comparison in converted.comparisons)
        steps = read_json(out / "difftool.json")["steps"]
        assert [step["options"]["to"] for step in steps] == [first, second]
        results.append(out)
    one, two = (tensors(out) for out in results)
    assert one.keys() == two.keys()
    assert all(torch.equal(one[tensor], two[tensor]) for tensor in one)
    configs = [read_json(out / "config.json") for out in results]
    assert configs[0] == configs[1]
    one_code, two_code = (
        {path.name: path.read_text() for path in out.glob("*.py")} for out in results
    )
    assert one_code == two_code
    assert_plain_transformers_agrees(examine(source, results[0]), name, ("diffv2", "attnres"))


# -- what lies in the folder -----------------------------------------------------------------------


@pytest.mark.parametrize("target", target_names())
def test_the_folder_holds_the_config_code_and_record_of_what_was_done(
    target: str, tmp_path: Path
) -> None:
    source, out = save_source(tmp_path / "source", "llama"), tmp_path / "out"
    convert_to(target, source, out)
    prefix, module = PREFIX[target], f"modeling_{target}_llama"
    assert sorted(path.name for path in out.iterdir()) == sorted([
        "README.md",
        "config.json",
        "difftool.json",
        "generation_config.json",
        "model.safetensors",
        f"modeling_{target}.py",
        f"{module}.py",
    ])  # fmt: skip
    before, after = read_json(source / "config.json"), read_json(out / "config.json")
    assert after["model_type"] == f"{target}_llama"
    assert after["architectures"] == [f"{prefix}LlamaForCausalLM"]
    assert after["auto_map"] == {
        "AutoConfig": f"{module}.{prefix}LlamaConfig",
        "AutoModel": f"{module}.{prefix}LlamaModel",
        "AutoModelForCausalLM": f"{module}.{prefix}LlamaForCausalLM",
    }
    changed = {"model_type", "architectures"}
    if target == "diffv2":
        changed.add("num_attention_heads")
        assert after["num_attention_heads"] == 2 * before["num_attention_heads"] == 12
        assert after["diffv2"] == {"num_heads": 6, "lambda_bias": False}
    else:
        assert (after["attnres"]["block_size"], after["attnres"]["blocks"]) == (2, 3)
    assert {key for key in before if after[key] != before[key]} == changed
    with safe_open(out / "model.safetensors", "pt") as file:
        assert file.metadata()["format"] == "pt"


def test_the_modelling_code_is_shipped_verbatim(tmp_path: Path) -> None:
    source, out = save_source(tmp_path / "source", "llama"), tmp_path / "out"
    convert_to("diffv2", source, tmp_path / "middle")
    convert_to("attnres", tmp_path / "middle", out)
    for target in target_names():
        name = f"modeling_{target}.py"
        assert (out / name).read_bytes() == modeling_file(target).read_bytes()


def test_difftool_json_records_source_options_versions_and_figures(tmp_path: Path) -> None:
    source, out = save_source(tmp_path / "source", "llama"), tmp_path / "out"
    convert_to("diffv2", source, out)
    (step,) = read_json(out / "difftool.json")["steps"]
    assert step["stage"] == "convert"
    assert step["options"]["to"] == "diffv2" and step["options"]["start_gate"] == 0.5
    assert step["source"]["id"] == "source"
    assert step["source"]["fingerprint"] == fingerprint(open_checkpoint(source))
    assert step["output_fingerprint"] == fingerprint(open_checkpoint(out))
    assert step["versions"]["difftool"] == __version__
    assert step["versions"]["torch"] == torch.__version__
    assert step["seconds"] > 0
    assert step["metrics"]["exactness"] == "bits"
    (figures,) = step["metrics"]["verification"]
    assert figures["dtype"] == "float32" and figures["greedy_equal"]
    assert figures["differences"]["padded batch"] == figures["differences"]["cached decoding"] == 0
    assert str(tmp_path) not in (out / "difftool.json").read_text()


def test_the_model_card_names_the_base_model_the_targets_and_the_verification(
    tmp_path: Path,
) -> None:
    source, middle, out = (
        save_source(tmp_path / "base", "llama"),
        tmp_path / "mid",
        tmp_path / "out",
    )
    (source / "README.md").write_text(
        "---\nlicense: mit\nlanguage: [en]\ntags: [old]\nmodel-index: [1]\n---\n# Old text\n"
    )
    convert_to("diffv2", source, middle)
    card = (middle / "README.md").read_text()
    front = yaml.safe_load(card.split("---\n")[1])
    assert front == {
        "license": "mit",
        "language": ["en"],
        "base_model": "base",
        "library_name": "transformers",
        "tags": ["difftool", "diffv2"],
    }
    assert "Old text" not in card and str(tmp_path) not in card
    assert "| float32 | bit-identical" in card
    convert_to("attnres", middle, out)
    front = yaml.safe_load((out / "README.md").read_text().split("---\n")[1])
    assert front["license"] == "mit" and front["tags"] == ["difftool", "diffv2", "attnres"]


def test_files_beside_the_weights_come_along_and_pickles_and_code_do_not(
    tiny: Path, tmp_path: Path
) -> None:
    source, out = save_source(tmp_path / "source", "llama"), tmp_path / "out"
    carried = [
        "LICENSE.txt",
        "NOTICE",
        "additional_chat_templates/tool_use.jinja",
        "chat_template.jinja",
        "generation_config.json",
        "merges.txt",
        "special_tokens_map.json",
        "tokenizer.json",
        "tokenizer_config.json",
    ]
    left = ["pytorch_model.bin", "modeling_other.py", "training_args.bin", "notes.pdf"]
    (source / "additional_chat_templates").mkdir()
    transformers.AutoTokenizer.from_pretrained(tiny).save_pretrained(source)
    for name in [*carried, *left]:
        if not (source / name).exists():
            (source / name).write_text("{}" if name.endswith(".json") else f"text of {name}")
    options = ConvertOptions(to="attnres", settings={"blocks": 2}, verify=False)
    convert(str(source), out, options)
    before, after = contents(source), contents(out)
    assert {name: after.get(name) for name in carried} == {name: before[name] for name in carried}
    assert not after.keys() & set(left)
    assert "Not verified" in (out / "README.md").read_text()
    assert read_json(out / "difftool.json")["steps"][0]["metrics"]["verification"] == []


def test_the_same_conversion_gives_the_same_bytes(tmp_path: Path) -> None:
    source = save_source(tmp_path / "source", "llama")
    outs = [tmp_path / "one" / "same", tmp_path / "two" / "same"]
    for out in outs:
        convert_to("diffv2", source, out)
    one, two = (contents(out) for out in outs)
    varying = {"difftool.json"}  # has the seconds it took
    assert {name: one[name] for name in one.keys() - varying} == {
        name: two[name] for name in two.keys() - varying
    }


# -- heads, and other classes ----------------------------------------------------------------------


@pytest.mark.parametrize("target", target_names())
@pytest.mark.parametrize(
    "auto",
    ["AutoModel", "AutoModelForSequenceClassification", "AutoModelForTokenClassification"],
)
def test_models_without_a_language_head_convert_too(
    auto: str, target: str, tmp_path: Path, examine: Examine
) -> None:
    source, out = tmp_path / "source", tmp_path / "out"
    model = getattr(transformers, auto).from_config(make_config("llama", num_labels=3))
    model.save_pretrained(source)
    convert_to(target, source, out)
    answer = examine(source, out, auto)
    assert answer["unplaced"] == answer["resaved_unplaced"] == answer["resaved_tensors"] == []
    assert set(answer["differences"].values()) == {0}
    assert set(answer["resaved_differences"].values()) == {0}
    assert auto in read_json(out / "config.json")["auto_map"]
