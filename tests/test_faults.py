"""Bad input to `difftool convert`: one clear error, the source untouched, nothing left behind."""

import json
import os
import pickle
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from command_line import Runner, contents, edit_json, write_tokenizer
from safetensors.torch import load_file, save_file
from tiny_models import VOCABULARY, make_model
from transformers import CONFIG_MAPPING, AutoTokenizer

ROOT = Path(__file__).parents[1]
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
TARGETS = {"diffv2": ("--to", "diffv2"), "attnres": ("--to", "attnres", "--set", "blocks=3")}
TO_DIFFV2, TO_ATTNRES = TARGETS.values()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Hold a random model as `single` and as `sharded`, and `converted`, the first as diffv2."""
    from difftool.surgery.convert import ConvertOptions, convert

    folder = tmp_path_factory.mktemp("made")
    model = make_model("llama", dtype=torch.bfloat16)
    model.save_pretrained(folder / "single")
    model.save_pretrained(folder / "sharded", max_shard_size="40KB")
    options = ConvertOptions(to="diffv2", verify=False)
    convert(str(folder / "single"), folder / "converted", options)
    return folder


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Enter an empty folder."""
    folder = tmp_path / "work"
    folder.mkdir()
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def source(made: Path, work: Path) -> Path:
    return Path(shutil.copytree(made / "single", work / "source"))


@pytest.fixture
def sharded(made: Path, work: Path) -> Path:
    return Path(shutil.copytree(made / "sharded", work / "source"))


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Runner:
    return Runner(capfd)


def refuse(run: Runner, *words: object, status: int = 1) -> str:
    """Run what must fail with one message and leave all that is here as it was; return it."""
    before = contents(Path.cwd())
    ran = run(*words)
    assert contents(Path.cwd()) == before
    assert (ran.status, ran.out) == (status, "")
    assert "Traceback" not in ran.err
    if status == 1:
        assert ran.err.startswith("Error: ") and ran.err.endswith((".\n", "?\n"))
        assert ran.err.count("\n") == 1
    return ran.message


Damage = Callable[[Path], object]


def tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Damage:
    """Change tensors of the one weight file."""

    def damage(source: Path) -> None:
        held = load_file(source / SINGLE)
        change(held)
        save_file({name: tensor.contiguous() for name, tensor in held.items()}, source / SINGLE)

    return damage


def put(value: float, name: str) -> Damage:
    """Put a value at the very end of a tensor."""
    return tensors(lambda held: held[name].view(-1)[-1:].fill_(value))


def config(**changes: Any) -> Damage:
    return lambda source: edit_json(source / "config.json", **changes)


def text(name: str, content: str) -> Damage:
    return lambda source: (source / name).write_text(content)


def cut(size: int) -> Damage:
    """Cut the weight file down to a size, or by as much if that is negative."""
    return lambda source: os.truncate(
        source / SINGLE, size if size >= 0 else (source / SINGLE).stat().st_size + size
    )


def overwrite(offset: int, data: bytes) -> Damage:
    def damage(source: Path) -> None:
        held = bytearray((source / SINGLE).read_bytes())
        held[offset : offset + len(data)] = data
        (source / SINGLE).write_bytes(held)

    return damage


def pickles_only(source: Path) -> None:
    (source / SINGLE).unlink()
    (source / "pytorch_model.bin").write_bytes(pickle.dumps(Trap(source.parents[1] / "ran")))


class Trap:
    """An object whose pickle makes a file when it is opened."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.marker,)


MLP = "model.layers.1.mlp.down_proj.weight"
QUERY, EMBEDDING = "model.layers.2.self_attn.q_proj.weight", "model.embed_tokens.weight"
STEP = {
    "stage": "convert",
    "options": {},
    "source": {"id": "x", "fingerprint": "sha256:0"},
    "output_fingerprint": "sha256:0",
    "versions": {},
    "seconds": 1.0,
}

FAULTS: dict[str, tuple[Damage, str]] = {
    "a shard without its end": (cut(-1), "truncated: .* is the first that is not whole"),
    "a shard cut in its header": (cut(100), "truncated: it ends inside its header"),
    "an empty shard": (cut(0), "truncated"),
    "a shard that is no safetensors": (overwrite(0, b"PK\3\4\0\0\0\0"), "truncated|corrupt"),
    "a header that is not JSON": (overwrite(8, b"!"), "the header of .* is corrupt"),
    "a header with a wrong offset": (overwrite(70, b"9999"), "corrupt"),
    "a missing tensor": (tensors(lambda held: held.pop(MLP)), f"'{MLP}' is missing"),
    "a missing head": (tensors(lambda held: held.pop("lm_head.weight")), "an output head, or tie"),
    "a missing layer": (
        tensors(lambda held: [held.pop(name) for name in list(held) if ".layers.2." in name]),
        "and 8 more is missing",
    ),
    "no layers at all": (
        tensors(lambda held: [held.pop(name) for name in list(held) if ".layers." in name]),
        "no tensor of a decoder layer",
    ),
    "a shape unlike the config": (
        tensors(lambda held: held.update({MLP: held[MLP][:, :-2]})),
        r"has the shape \[48, 62\]. Expected the shape \[48, 64\], as config.json says",
    ),
    "a config unlike the shapes": (config(intermediate_size=96), "has the shape .* Expected"),
    "more heads than the weights": (config(num_key_value_heads=6), "k_proj.* has the shape"),
    "more layers than the weights": (config(num_hidden_layers=4), "and 8 more is missing"),
    "NaN in a tensor that changes": (put(float("nan"), QUERY), f"'{QUERY}' .* NaN"),
    "NaN in one that does not": (put(float("nan"), EMBEDDING), f"'{EMBEDDING}' .* NaN"),
    "infinity": (put(float("inf"), MLP), f"'{MLP}' .* infinite"),
    "minus infinity": (put(float("-inf"), "model.norm.weight"), "infinite"),
    "pickles only": (pickles_only, "only as pickles .* Expected safetensors"),
    "no weights": (lambda source: (source / SINGLE).unlink(), "has a config.json but no weights"),
    "no config": (lambda source: (source / "config.json").unlink(), "has no config.json"),
    "a config that is not JSON": (
        text("config.json", '{"model_type": "llama",'),
        "not valid JSON: .* line 1, column",
    ),
    "a config that is a list": (text("config.json", "[]"), "holds a JSON list"),
    "no model_type": (config(model_type=...), "has no model_type. Expected one of .*llama"),
    "a misspelt model_type": (config(model_type="lama"), "nor difftool knows.* mean 'llama'"),
    "an unknown class": (config(architectures=["Ghost"]), "names the architecture Ghost"),
    "a class that is no list": (config(architectures=7), "names the architecture 7"),
    "no heads": (config(num_attention_heads=0), "transformers rejects the config.json"),
    "no key-value heads": (config(num_key_value_heads=0), "transformers rejects"),
    "a negative size": (config(vocab_size=-1), "transformers rejects the config.json"),
    "a size in words": (config(hidden_size="big"), "transformers rejects .*'hidden_size'"),
    "an unknown activation": (config(hidden_act="ghost"), "transformers rejects .*'ghost'"),
    "a quantised model": (
        config(quantization_config={"quant_method": "gptq"}),
        "already quantised .gptq.. .* Convert the model it was made from",
    ),
    "an unknown quantisation": (config(quantization_config="4bit"), "quantised .4bit"),
    "a wrapper": (config(text_config={"model_type": "llama"}), "wraps a language model .llama"),
    "another project's diffv2": (config(diffv2=True), "'diffv2' in config.json is not what diff"),
    "half an attnres": (config(attnres={"blocks": 2}), "'attnres' in config.json is not what"),
    "a tokenizer cut short": (text("tokenizer.json", '{"version":'), "tokenizer.json is not valid"),
    "a tokenizer of no kind": (text("tokenizer.json", "{}"), "tokenizer .* cannot be loaded"),
    "provenance cut short": (text("difftool.json", '{"steps": ['), "difftool.json cannot be read"),
    "provenance of something else": (
        text("difftool.json", '{"steps": [{"stage": "convert"}]}'),
        "cannot be read as a chain of steps.* Restore it, or remove it",
    ),
    "provenance with figures of another kind": (
        text("difftool.json", json.dumps({"steps": [STEP | {"metrics": {"verification": 1}}]})),
        "cannot be read as a chain of steps",
    ),
}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_faulty_source_is_refused(fault: str, target: str, source: Path, run: Runner) -> None:
    damage, message = FAULTS[fault]
    damage(source)
    refused = refuse(run, "convert", source, *TARGETS[target], "-o", "out")
    assert_matches(message, refused)
    assert not (source.parents[1] / "ran").exists()


def assert_matches(pattern: str, message: str) -> None:
    assert re.search(pattern, message), message


def weight_map(change: Callable[[dict[str, str]], object]) -> Damage:
    def damage(source: Path) -> None:
        index = json.loads((source / INDEX).read_text())
        change(index["weight_map"])
        (source / INDEX).write_text(json.dumps(index))

    return damage


def place(name: str) -> Damage:
    """Let the index put a tensor somewhere else."""
    return weight_map(lambda files: files.update({EMBEDDING: name}))


def shard(source: Path, number: int) -> Path:
    return sorted(source.glob("model-*.safetensors"))[number]


def store_twice(source: Path) -> None:
    first, second = (load_file(shard(source, number)) for number in (0, 1))
    name = next(iter(first))
    save_file({**second, name: first[name]}, shard(source, 1))


SHARD_FAULTS: dict[str, tuple[Damage, str]] = {
    "a missing shard": (lambda source: shard(source, 1).unlink(), "lacks the shard model-00002"),
    "an index naming a shard that never was": (place("ghost.safetensors"), "lacks the shard ghost"),
    "an index naming the wrong shard": (
        weight_map(lambda files: files.update({EMBEDDING: max(files.values())})),
        "which lacks it; it lies in model-",
    ),
    "an index that forgets a tensor": (
        weight_map(lambda files: files.pop(EMBEDDING)),
        f"'{EMBEDDING}' lies in .* but not in the index",
    ),
    "an index that leaves its folder": (place("../other.safetensors"), "Do not use this checkp"),
    "an index with an absolute path": (place("/etc/passwd"), "the plain name of a file"),
    "an index naming a pickle": (place("pytorch_model.bin"), "Expected a .safetensors file"),
    "an index that is not JSON": (text(INDEX, "{"), "is not valid JSON"),
    "an index without a map": (text(INDEX, "{}"), "has no weight_map"),
    "a doubly stored tensor": (store_twice, "is stored twice .* model-00001.* and in model-00002"),
    "a truncated shard": (
        lambda source: os.truncate(shard(source, 2), 3000),
        "model-00003.* is truncated",
    ),
}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("fault", SHARD_FAULTS)
def test_faulty_shards_are_refused(fault: str, target: str, sharded: Path, run: Runner) -> None:
    damage, message = SHARD_FAULTS[fault]
    (sharded.parent / "other.safetensors").write_bytes(shard(sharded, 0).read_bytes())
    damage(sharded)
    assert_matches(message, refuse(run, "convert", sharded, *TARGETS[target], "-o", "out"))


@pytest.mark.parametrize("options", [(), ("--link",)])
def test_nan_in_a_shard_that_is_taken_whole_is_refused(
    options: tuple[str, ...], sharded: Path, run: Runner
) -> None:
    """Linked bytes are not read when they are written; the verification sees what they do."""
    file = next(path for path in sharded.glob("model-*") if QUERY in load_file(path))
    held = load_file(file)
    held[QUERY][0, 0] = float("nan")
    save_file(held, file, {"format": "pt"})
    assert "NaN" in refuse(run, "convert", sharded, *TO_ATTNRES, *options, "-o", "out")


REQUESTS: dict[str, tuple[tuple[str, ...], str]] = {
    "target": (("--to", "difv2"), "unknown target 'difv2'.* Did you mean 'diffv2'"),
    "option": ((*TO_DIFFV2, "--set", "start_gat=0.3"), "Did you mean 'start_gate'"),
    "other target's option": ((*TO_DIFFV2, "--set", "blocks=2"), "diffv2 has no option 'blocks'"),
    "open gate": ((*TO_DIFFV2, "--set", "start_gate=1"), "start_gate=1 cannot .* less than 1"),
    "shut gate": ((*TO_DIFFV2, "--set", "start_gate=0"), "start_gate=0 .* greater than 0"),
    "gate in words": ((*TO_DIFFV2, "--set", "start_gate=half"), "start_gate='half' cannot be used"),
    "gate that rounds to 1": ((*TO_DIFFV2, "--set", "start_gate=0.99999"), "is 1 in BF16"),
    "negative noise": ((*TO_DIFFV2, "--set", "noise=-1"), "noise=-1 .* greater than or equal to 0"),
    "NaN noise": ((*TO_DIFFV2, "--set", "noise=.nan"), "noise=nan cannot be used"),
    "seed": ((*TO_DIFFV2, "--set", "seed=x"), "seed='x' cannot be used"),
    "no blocks": (("--to", "attnres", "--set", "blocks=0"), "blocks=0 does not fit .* 1 to 6"),
    "too many blocks": (
        ("--to", "attnres", "--set", "blocks=8"),
        "blocks=8 does not fit .* --set blocks=full",
    ),
    "blocks twice": (
        ("--to", "attnres", "--set", "blocks=2", "--set", "block_size=3"),
        "options blocks, block_size do not go together.* Either blocks or block_size, not both",
    ),
    "many blocks": (("--to", "attnres", "--set", "blocks=many"), "integer, .* or .* 'full'"),
    "block size": (("--to", "attnres", "--set", "block_size=9"), "block_size=9 does not fit"),
}
USAGES: dict[str, tuple[tuple[str, ...], str]] = {
    "no target": (("source",), "Missing option '--to'"),
    "no source": (TO_DIFFV2, "Missing argument 'SRC'"),
    "unknown flag": (("source", *TO_DIFFV2, "--forse"), "No such option '--forse'.*--force"),
    "setting": (("source", *TO_DIFFV2, "--set", "x"), "'x' is not of the form key=value"),
    "setting without a key": (("source", *TO_DIFFV2, "--set", "=1"), "not of the form key=value"),
    "setting in bad YAML": (("source", *TO_DIFFV2, "--set", "a=["), "is not a number or a word"),
    "shard size": (("source", *TO_DIFFV2, "--shard-size", "x"), "not a size such as 5GB"),
    "no shard size": (("source", *TO_DIFFV2, "--shard-size", "0"), "'0' is not a size"),
    "memory": (("source", *TO_DIFFV2, "--max-memory", "-1"), "'-1' is not a size"),
    "dtype": (
        ("source", *TO_DIFFV2, "--dtype", "fp8"),
        "'fp8' is not one of 'float32'",
    ),
}


@pytest.mark.parametrize("request_", REQUESTS)
def test_what_cannot_be_had_is_refused(request_: str, source: Path, run: Runner) -> None:
    words, message = REQUESTS[request_]
    assert_matches(message, refuse(run, "convert", source, *words, "-o", "out"))


@pytest.mark.parametrize("usage", USAGES)
def test_what_cannot_be_understood_is_a_usage_error(usage: str, work: Path, run: Runner) -> None:
    words, message = USAGES[usage]
    assert_matches(message, refuse(run, "convert", *words, status=2))


def test_a_misspelt_command_is_a_usage_error_with_the_right_one(work: Path, run: Runner) -> None:
    message = refuse(run, "convrt", "source", status=2)
    assert "No such command 'convrt'. Did you mean 'convert'?" in message


def test_float16_that_cannot_hold_a_weight_is_refused(source: Path, run: Runner) -> None:
    put(1e30, MLP)(source)
    message = refuse(run, "convert", source, *TO_DIFFV2, "--dtype", "float16", "-o", "out")
    assert "float16 cannot hold. Use --dtype bfloat16" in message


def write_config(folder: Path, name: str) -> None:
    CONFIG_MAPPING[name]().save_pretrained(folder)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("bert", "normalises the stream itself"),
        ("gemma3n", "AltUp keeps several streams"),
        ("gemma3n_text", "AltUp keeps several streams"),
        ("qwen3_next", "linear attention, which has no softmax"),
        ("mamba", "it has no attention"),
        ("llava", "wraps a language model .* together with other towers"),
        ("falcon", "no line in difftool's table of families"),
    ],
)
def test_an_unsupported_family_is_refused_with_its_reason(
    family: str, reason: str, target: str, work: Path, run: Runner
) -> None:
    write_config(work / "source", family)
    for more in ((), ("--dry-run",)):
        assert_matches(reason, refuse(run, "convert", "source", *TARGETS[target], *more))
    assert_matches(reason, refuse(run, "inspect", "source"))


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("gpt2", "fused query-key-value projection"),
        ("gpt_neox", "fused query-key-value projection"),
        ("deepseek_v3", "multi-head latent attention"),
        ("olmoe", "its q_norm is built as wide as the hidden size"),
    ],
)
def test_a_family_without_diffv2_says_why_and_takes_attnres(
    family: str, reason: str, work: Path, run: Runner
) -> None:
    make_model(family).save_pretrained(work / "source")
    assert reason in refuse(run, "convert", "source", *TO_DIFFV2, "-o", "out")
    assert reason in " ".join(run.succeed("inspect", "source").split())
    blocks = ("--to", "attnres", "--set", "blocks=2", "--no-verify")
    assert "AttnRes" in run.succeed("convert", "source", *blocks, "-o", "out")


def test_a_source_that_is_already_converted_is_refused(made: Path, work: Path, run: Runner) -> None:
    shutil.copytree(made / "converted", work / "source")
    message = refuse(run, "convert", "source", *TO_DIFFV2, "-o", "out")
    assert "it is already converted to diffv2" in message


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("./soruce", r"There is no folder ./soruce. .* Did you mean 'source'\?"),
        ("nothing", "no folder, no alias and no hub id"),
        ("llama-8", r"`difftool models` lists the aliases. Did you mean 'llama-8b'\?"),
        ("source/config.json", "is a file. .* Name its folder"),
        ("source/model.bin", "is a pickle, which is never opened"),
        ("missing.gguf", "There is no file missing.gguf"),
        ("empty", "has no config.json"),
        ("meta-llama/Llama-3.1-8B", r"out of reach .offline mode is on.*`hf download meta-llama/"),
        ("llama-8b", "meta-llama/Llama-3.1-8B cannot be fetched.*and name that folder"),
    ],
)
def test_a_source_that_is_not_there_is_refused(
    name: str, message: str, source: Path, run: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(source.parents[1] / "cache"))
    (source.parent / "empty").mkdir()
    (source / "model.bin").touch()
    for command in (("convert", name, *TO_DIFFV2), ("inspect", name), ("generate", name, "w3")):
        assert_matches(message, refuse(run, *command))


def test_an_existing_output_is_refused_and_replaced_only_by_force(
    source: Path, run: Runner
) -> None:
    out = source.parent / "out"
    out.mkdir()
    (out / "config.json").write_text("{}")
    (out / "mine").touch()
    convert = ("convert", source, *TO_DIFFV2, "--no-verify", "-o", "out")
    assert "out exists. Pass --force to replace it" in refuse(run, *convert)
    run.succeed(*convert, "--force")
    assert not (out / "mine").exists() and (out / SINGLE).exists()
    put(float("nan"), MLP)(source)
    assert "NaN" in refuse(run, *convert, "--force")  # what was there before still is
    assert sorted(path.name for path in source.parent.iterdir()) == ["out", "source"]


def test_force_spares_a_folder_that_is_no_checkpoint(source: Path, run: Runner) -> None:
    (source.parent / "out" / "photos").mkdir(parents=True)
    message = refuse(run, "convert", source, *TO_DIFFV2, "--force", "-o", "out")
    assert "does not look like a checkpoint and is not replaced" in message


@pytest.mark.parametrize("force", [(), ("--force",)])
@pytest.mark.parametrize(
    ("out", "message"),
    [
        ("source", "are not apart"),
        ("source/inside", "are not apart"),
        ("../work", "are not apart|holds the current folder"),
        ("file", "exists and is a file"),
        ("file/out", "cannot be made"),
        ("link", "a file or a symlink|are not apart"),
    ],
)
def test_an_output_in_the_wrong_place_is_refused(
    out: str, message: str, force: tuple[str, ...], source: Path, run: Runner
) -> None:
    (source.parent / "file").touch()
    (source.parent / "link").symlink_to("source")
    refused = refuse(run, "convert", "source", *TO_DIFFV2, *force, "-o", out)
    assert_matches(message, refused)


@pytest.fixture
def small_disk(work: Path) -> Iterator[Callable[[int], Path]]:
    """Give a file system of as many kB as one asks for, emptied and resized at each call."""
    folder = work / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"a small disk needs the right to mount one: {done.stderr.strip()}")

    def resize(size: int) -> Path:
        shutil.rmtree(folder / "out", ignore_errors=True)
        subprocess.run(["mount", "-o", f"remount,size={size}k", str(folder)], check=True)
        return folder

    yield resize
    subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_that_is_full_at_any_point_is_one_clear_error(
    made: Path, source: Path, small_disk: Callable[[int], Path], run: Runner
) -> None:
    """From too small for the config to room for all but the last file, in pages of 4 kB."""
    write_tokenizer(source, VOCABULARY)
    convert = ("convert", "source", *TO_DIFFV2, "--no-verify", "-o", "disk/out")
    needed = sum(len(data) for data in contents(made / "converted").values() if data) // 1024
    ends = []
    for size in [*range(4, 60, 8), *range(needed - 16, needed + 80, 4)]:
        small_disk(size)
        before = contents(Path.cwd())
        ran = run(*convert)
        ends.append(ran.status)
        if ran.status == 0:
            break
        assert contents(Path.cwd()) == before
        assert (ran.status, ran.out, ran.err.count("\n")) == (1, "", 1), ran
        assert_matches("the disk is full while writing|its disk has|No space left", ran.err)
    assert ends[-1] == 0 and len(ends) > 12


HOSTILE = """
from pathlib import Path
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
Path({marker!r}).touch()
class HostileConfig(LlamaConfig): pass
class HostileModel(LlamaForCausalLM): pass
class HostileTokenizer(PreTrainedTokenizerFast): pass
"""


def add_code(source: Path) -> Path:
    """Put code beside the weights; return the file that it makes as soon as it is run."""
    marker = source.parents[1] / "ran"
    (source / "hostile.py").write_text(HOSTILE.format(marker=str(marker)))
    return marker


MODEL_CODE = {"AutoConfig": "hostile.HostileConfig", "AutoModelForCausalLM": "hostile.HostileModel"}


def test_code_beside_a_model_of_a_known_family_is_never_run(source: Path, run: Runner) -> None:
    marker = add_code(source)
    write_tokenizer(source, VOCABULARY)
    edit_json(source / "config.json", auto_map=MODEL_CODE)
    before = contents(source)
    run.succeed("inspect", source)
    assert run.succeed("generate", source, "w5", "--max-new-tokens", "2").startswith("w5")
    for trust in ((), ("--trust-remote-code",)):
        run.succeed("convert", source, *TO_DIFFV2, "-o", "out", "--force", *trust)
    run.succeed("inspect", "out")
    run.succeed("generate", "out", "w5", "--max-new-tokens", "2")
    assert not marker.exists()
    assert contents(source) == before
    assert not Path("out/hostile.py").exists()
    assert "hostile" not in Path("out/config.json").read_text()


@pytest.mark.parametrize("trust", [(), ("--trust-remote-code",)])
def test_code_for_an_unknown_family_is_refused_and_not_run(
    trust: tuple[str, ...], source: Path, run: Runner
) -> None:
    marker = add_code(source)
    edit_json(source / "config.json", auto_map=MODEL_CODE, model_type="hostile")
    message = refuse(run, "convert", source, *TO_DIFFV2, *trust, "-o", "out")
    assert "it is defined by code in the checkpoint" in message
    refuse(run, "generate", source, "w5", *trust)
    refuse(run, "inspect", source)
    assert not marker.exists()


def test_a_tokenizer_that_is_code_is_run_only_with_the_flag(source: Path, run: Runner) -> None:
    marker = add_code(source)
    write_tokenizer(source, VOCABULARY)
    auto_map = {"AutoTokenizer": [None, "hostile.HostileTokenizer"]}
    edit_json(source / "tokenizer_config.json", auto_map=auto_map)
    convert = ("convert", source, *TO_DIFFV2)
    run.succeed(*convert, "-o", "untrusted")
    assert "--trust-remote-code" in refuse(run, "generate", source, "w5")
    assert not marker.exists()
    run.succeed(*convert, "-o", "trusted", "--trust-remote-code")
    assert marker.exists()
    generate = ("generate", "trusted", "w5", "--max-new-tokens", "2", "--trust-remote-code")
    assert run.succeed(*generate).startswith("w5")
    tokenizer = AutoTokenizer.from_pretrained("untrusted", trust_remote_code=True)
    assert type(tokenizer).__name__ == "HostileTokenizer"


FORKER = """
import contextlib
import json
import os
import sys
from difftool.cli import main

CHANGES = {"os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.copyfile", "shutil.rmtree"}

def convert(words, number, moment, log):
    seen = 0
    def watch(event, details):
        nonlocal seen
        change = event in CHANGES or (event == "open" and details[2] & (os.O_WRONLY | os.O_RDWR))
        if change and "/work/out" in str(details[0]).replace("/.out", "/out"):
            seen += 1
            if seen == moment:
                os.kill(os.getpid(), number)
    descriptor = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(descriptor, 1)
    os.dup2(descriptor, 2)
    sys.addaudithook(watch)
    try:
        main(words)
    except SystemExit as end:  # without the slow end of an interpreter that has torch
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(end.code)

with contextlib.suppress(SystemExit), contextlib.redirect_stdout(sys.stderr):
    main(sys.argv[1:])  # for what is imported on the way
for line in sys.stdin:
    task = json.loads(line)
    process = os.fork()
    if not process:
        convert(**task)
    print(process, flush=True)
    print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)
"""


class Forker:
    """A process that has imported everything, and forks one that converts whenever it is asked."""

    def __init__(self, *words: object) -> None:
        path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
        self.process = subprocess.Popen(
            [sys.executable, "-c", FORKER, *map(str, words)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        )

    def start(self, *words: object, number: int = 0, moment: int = 0) -> int:
        """Begin `difftool *words`, to be sent a signal at one change of the output; its id."""
        task = {"words": [str(word) for word in words], "number": number, "moment": moment}
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({**task, "log": str(self.log)}) + "\n")
        self.process.stdin.flush()
        return self._read()

    def wait(self) -> int:
        """Return the status that it ended with, minus the signal's number if that killed it."""
        return self._read()

    @property
    def log(self) -> Path:
        """What it printed."""
        return Path.cwd().parent / "log"

    def _read(self) -> int:
        assert self.process.stdout is not None
        return int(self.process.stdout.readline())


@pytest.fixture(scope="module")
def forker(made: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forker]:
    first = tmp_path_factory.mktemp("forker") / "first"
    forker = Forker("convert", made / "single", *TO_DIFFV2, "--no-verify", "-o", first)
    yield forker
    forker.process.kill()
    forker.process.communicate()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGINT])
def test_a_signal_at_any_change_of_the_output_leaves_nothing_in_the_way(
    number: signal.Signals, source: Path, forker: Forker, run: Runner
) -> None:
    """Whenever a file there is made, written, renamed or removed, the process may die."""
    before = contents(source)
    convert = ("convert", source.resolve(), *TO_DIFFV2, "--no-verify", "-o", Path("out").resolve())
    moment, cut_short = 0, 0
    while True:
        moment += 1
        forker.start(*convert, number=number, moment=moment)
        if forker.wait() == 0:
            break
        log = forker.log.read_text()
        assert "Traceback" not in log, log
        assert contents(source) == before
        if Path("out").exists():  # it had been published already, so it must be whole
            assert_whole(run, "out")
            shutil.rmtree("out")
        else:
            cut_short += 1
        if number != signal.SIGKILL:
            assert {path.name for path in Path.cwd().iterdir()} <= {"source", ".out.lock"}
        elif moment % 4 == 0:
            run.succeed(*convert)
            assert_whole(run, "out")
            shutil.rmtree("out")
    assert cut_short > 10, moment
    run.succeed(*convert, "--force")
    assert_whole(run, "out")
    assert sorted(path.name for path in Path.cwd().iterdir()) == ["out", "source"]


def assert_whole(run: Runner, out: str) -> None:
    found = json.loads(run.succeed("inspect", out, "--json"))
    assert found["complete"] and len(found["provenance"]["steps"]) == 1


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGKILL, -9), (signal.SIGTERM, 143), (signal.SIGINT, 1)]
)
def test_a_signal_once_weights_are_there_leaves_nothing_in_the_way(
    number: signal.Signals, status: int, source: Path, forker: Forker, run: Runner
) -> None:
    convert = ("convert", source.resolve(), *TO_DIFFV2, "-o", Path("out").resolve())
    process = forker.start(*convert)
    deadline = time.monotonic() + 60
    while not Path(".out.partial", SINGLE).exists() and time.monotonic() < deadline:
        pass
    os.kill(process, number)
    assert forker.wait() == status
    assert forker.log.read_text().strip() in ("", "Aborted.")
    left = {path.name for path in Path.cwd().iterdir()}
    if number == signal.SIGKILL:
        assert "out" not in left
    else:
        assert left == {"source"}
    run.succeed(*convert, "--no-verify")
    assert sorted(path.name for path in Path.cwd().iterdir()) == ["out", "source"]
