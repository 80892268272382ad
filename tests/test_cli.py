"""The command line as one sees it: help and its examples, output, JSON, 80 columns."""

import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import rich_click as click
import torch
from command_line import Runner, contents, write_tokenizer
from tiny_models import VOCABULARY, make_config, make_model

from difftool.aliases import ALIASES
from difftool.cli import difftool
from difftool.generation import GenerateOptions, generate

COMMANDS = tuple(difftool.list_commands(click.Context(difftool)))
WIDTH = 80


def command(name: str) -> click.Command:
    found = difftool.get_command(click.Context(difftool), name)
    assert found is not None
    return found


@pytest.fixture(autouse=True)
def terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Enter an empty folder, with a terminal of 80 columns."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    monkeypatch.delenv("FORCE_COLOR", raising=False)


@pytest.fixture
def run(capfd: pytest.CaptureFixture[str]) -> Runner:
    return Runner(capfd)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Hold `llama` with a tokenizer, `silent` without one, and `planned`, a config of 8B alone."""
    folder = tmp_path_factory.mktemp("made")
    model = make_model("llama", dtype=torch.bfloat16)
    model.save_pretrained(folder / "llama")
    write_tokenizer(folder / "llama", VOCABULARY)
    model.save_pretrained(folder / "silent")
    large = {"hidden_size": 4096, "intermediate_size": 14336, "vocab_size": 128256}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
    config = make_config("llama", **large, **heads, num_hidden_layers=32, dtype="bfloat16")
    config.save_pretrained(folder / "planned")
    return folder


@pytest.fixture(scope="module")
def converted(made: Path) -> Path:
    """Hold `both`, the llama converted to one target after the other."""
    from difftool.surgery.convert import ConvertOptions, convert

    settings = {"blocks": 3}
    first, second = made / "llama-diffv2", made / "both"
    convert(str(made / "llama"), first, ConvertOptions(to="diffv2"))
    convert(str(first), second, ConvertOptions("attnres", settings, verify=False))
    return made


def test_help_needs_neither_torch_nor_transformers_and_little_time() -> None:
    code = """
import sys, time
from difftool.cli import main
for words in [["--help"], ["--version"], *([name, "--help"] for name in sys.argv[1:])]:
    try:
        main(words)
    except SystemExit as end:
        assert end.code == 0, words
heavy = {"torch", "transformers", "numpy", "safetensors", "huggingface_hub"} & set(sys.modules)
assert not heavy, heavy
assert time.process_time() < 3, time.process_time()
"""
    process = [sys.executable, "-c", code, *COMMANDS]
    done = subprocess.run(process, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert all(name in done.stdout for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_one_line_of_help_and_an_example(name: str, run: Runner) -> None:
    found = command(name)
    line = (found.help or "").splitlines()[0]
    assert line.endswith(".") and len(line) <= WIDTH - 14, line  # room for the command's name
    assert (found.epilog or "").startswith(f"Example: difftool {name} ")
    assert line in run.succeed("--help")
    assert line in run.succeed(name, "--help")
    undocumented = [option.name for option in found.params if isinstance(option, click.Option)
                    and not option.help]  # fmt: skip
    assert not undocumented


@pytest.mark.parametrize("name", COMMANDS)
def test_the_example_in_a_commands_help_runs(name: str, run: Runner) -> None:
    example = (command(name).epilog or "").removeprefix("Example: difftool ")
    assert run.succeed(*shlex.split(example))


def test_the_example_in_the_help_of_difftool_is_that_of_a_command() -> None:
    last = (difftool.help or "").strip().splitlines()[-1].strip()
    assert last in {command(name).epilog for name in COMMANDS}


def test_convert_prints_results_to_stdout_and_nothing_else(made: Path, run: Runner) -> None:
    out = run.succeed("convert", made / "llama", "--to", "diffv2")
    lines = out.splitlines()
    assert lines[0] == "bfloat16: bit-identical; greedy text equal"
    assert lines[1].startswith("float32: bit-identical")
    assert lines[-1].startswith("llama-diffv2: DiffV2LlamaForCausalLM in ")
    assert fits(out)
    assert Path("llama-diffv2", "config.json").is_file()  # the name it has by default


def test_progress_goes_to_stderr_where_that_is_a_terminal(
    made: Path, run: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    ran = run("convert", made / "silent", "--to", "diffv2", "--dtype", "float32")
    assert ran.status == 0
    assert "writing" in ran.err and "verifying" in ran.err
    assert "writing" not in ran.out and "silent-diffv2" in ran.out


def test_unused_tensors_are_named(made: Path, run: Runner) -> None:
    from safetensors.torch import load_file, save_file

    shutil.copytree(made / "silent", "source")
    weights = Path("source/model.safetensors")
    spare = {f"spare.{n}": torch.ones(1) for n in range(4)}
    save_file({**load_file(weights), **spare}, weights, {"format": "pt"})
    words = " ".join(run.succeed("convert", "source", "--to", "diffv2", "--no-verify").split())
    assert "not verified" in words
    assert "4 tensors that transformers does not use are carried along: spare.0, spare.1" in words


def test_generate_streams_the_prompt_and_then_at_most_so_many_tokens(
    made: Path, run: Runner
) -> None:
    short, longer = (
        run.succeed("generate", made / "llama", "w5 w6", "--max-new-tokens", number)
        for number in (3, 9)
    )
    assert short.startswith("w5 w6") and short.endswith("\n")
    assert 1 <= len(short.replace("w5 w6", "", 1).split()) <= 3
    assert longer.startswith(short.rstrip("\n"))
    pieces: list[str] = []
    generate(str(made / "llama"), "w5 w6", GenerateOptions(max_new_tokens=9), pieces.append)
    assert pieces[0] == "w5 w6" and len(pieces) > 3
    assert "".join(pieces) == longer.rstrip("\n")


def test_sampling_is_repeated_by_its_seed(made: Path, run: Runner) -> None:
    def sample(seed: int) -> str:
        options = ("--temperature", "1.5", "--seed", seed, "--max-new-tokens", "12")
        return run.succeed("generate", made / "llama", "w5", *options)

    assert sample(1) == sample(1) != sample(2)


def test_converted_models_generate_what_their_source_does(converted: Path, run: Runner) -> None:
    said = {
        run.succeed("generate", converted / name, "w5 w7", "--max-new-tokens", "8")
        for name in ("llama", "llama-diffv2", "both")
    }
    assert len(said) == 1


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("silent", "w5"), "has no tokenizer that may be used. Expected tokenizer.json"),
        (("planned", "w5"), "has a config.json but no weights"),
        (("llama", ""), "the prompt is empty"),
    ],
)
def test_generate_says_what_it_lacks(
    words: tuple[str, str], message: str, made: Path, run: Runner
) -> None:
    ran = run("generate", made / words[0], words[1])
    assert (ran.status, ran.out) == (1, "")
    assert message in ran.message


def test_generate_stops_before_learned_positions_end(run: Runner) -> None:
    make_model("gpt2", max_position_embeddings=16).save_pretrained("gpt2")
    write_tokenizer(Path("gpt2"), VOCABULARY)
    ran = run("generate", "gpt2", "w5 w6", "--max-new-tokens", "15")
    assert ran.status == 1 and "at most 16 together" in ran.message
    assert run.succeed("generate", "gpt2", "w5 w6", "--max-new-tokens", "14")


def test_generate_refuses_weights_unlike_the_config(made: Path, run: Runner) -> None:
    shutil.copytree(made / "llama", "source")
    config = json.loads(Path("source/config.json").read_text())
    Path("source/config.json").write_text(json.dumps({**config, "intermediate_size": 96}))
    ran = run("generate", "source", "w5")
    assert ran.status == 1 and "Expected the shape [48, 96], as config.json says" in ran.message


def test_an_interrupt_ends_any_command_without_a_traceback(
    made: Path, run: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("difftool.inspection.open_source", interrupt)
    ran = run("inspect", made / "llama")
    assert (ran.status, ran.out, ran.message) == (1, "", "Aborted.")


def test_one_start_gate_is_verified_in_every_dtype(made: Path, run: Runner) -> None:
    """Dividing by the gate rounds bf16 weights: that is no fault, and float32 ones show less."""
    convert = ("convert", made / "silent", "--to", "diffv2", "--set", "start_gate=0.3")
    as_stored = json.loads(run.succeed(*convert, "-o", "stored", "--json"))
    finer = json.loads(run.succeed(*convert, "-o", "finer", "--dtype", "float32", "--json"))
    assert (as_stored["exactness"], finer["exactness"]) == ("weights", "rounding")
    proofs = (*as_stored["verification"], *finer["verification"])
    bfloat16, float32, finer_float32 = (max(proof["differences"].values()) for proof in proofs)
    assert finer_float32 < 1e-4 < min(bfloat16, float32)


def test_inspect_tells_of_a_plain_source_what_it_can_become(made: Path, run: Runner) -> None:
    out = run.succeed("inspect", made / "llama")
    lines = out.splitlines()
    assert lines[0] == "llama: LlamaForCausalLM (llama), BF16"
    assert lines[1] == "3 layers, hidden 48, 6 query heads over 2 KV heads of 8"
    for part in ("embedding", "attention", "MLP", "norms", "head", "total"):
        assert any(line.startswith(part) for line in lines), part
    assert "diffv2: supported, convert with --to diffv2" in lines
    assert fits(out)


def test_inspect_tells_of_a_converted_model_where_it_came_from(
    converted: Path, run: Runner
) -> None:
    out = run.succeed("inspect", converted / "both")
    words = " ".join(out.split())
    assert "both: DiffV2AttnResLlamaForCausalLM (llama, diffv2 and attnres), BF16" in words
    assert "12 query heads over 2 KV heads of 8; 6 differential pairs; 3 blocks of 2 subl" in words
    assert "lambda projection" in words and "depth queries" in words
    assert "diffv2: it is already converted to diffv2" in words
    assert "made by convert (to=diffv2, start_gate=0.5, noise=0.0, seed=0) from llama" in words
    assert "verified in bfloat16: bit-identical verified in float32: bit-identical" in words
    assert words.endswith("made by convert (to=attnres, blocks=3) from llama-diffv2, not verified")
    assert fits(out)


def test_inspect_tells_sizes_from_a_config_alone(made: Path, run: Runner) -> None:
    out = run.succeed("inspect", made / "planned")
    assert "no weights beside it" in " ".join(out.split())
    assert out.split("total")[1].split()[:4] == ["8.03", "B", "16.1", "GB"]
    assert fits(out)


@pytest.mark.parametrize("target", ["diffv2", "attnres"])
def test_a_dry_run_prints_the_plan_and_writes_nothing(target: str, made: Path, run: Runner) -> None:
    before = contents(made)
    out = run.succeed("convert", made / "planned", "--to", target, "--dry-run")
    plan = json.loads(
        run.succeed("convert", made / "planned", "--to", target, "--dry-run", "--json")
    )
    assert (contents(made), contents(Path.cwd())) == (before, {})
    assert fits(out)
    assert out.endswith("nothing was written\n")
    if target == "diffv2":
        rows = [tuple(line.split()) for line in out.splitlines()]
        assert ("change", "32×", "self_attn.q_proj.weight", "4096→8192×4096", "2.15", "GB") in rows
        assert (
            "add",
            "32×",
            "self_attn.differential.lambda_proj.weight",
            "32×4096",
            "8.39",
            "MB",
        ) in rows
    assert plan["target"] == target
    assert plan["bytes_after"] - plan["bytes_before"] == growth(target)
    assert plan.keys() >= {"architecture", "exactness", "changes", "untouched"}


def growth(target: str) -> int:
    """Return the bytes that 32 layers of width 4096 in bf16 grow by."""
    if target == "attnres":
        return 2 * (2 * 32 + 1) * 2 * 4096
    return 2 * 32 * (4096 * 4096 + 32 * 4096)


def test_json_holds_what_it_should(converted: Path, run: Runner) -> None:
    found = json.loads(run.succeed("inspect", converted / "llama-diffv2", "--json"))
    assert found.keys() == {
        "id", "architecture", "family", "grafted", "geometry", "dtype", "complete", "parts",
        "targets", "provenance",
    }  # fmt: skip
    assert found["targets"] == {"diffv2": "it is already converted to diffv2", "attnres": None}
    assert found["grafted"] == ["diffv2"]
    [step] = found["provenance"]["steps"]
    assert {proof["verdict"].split(";")[0] for proof in step["metrics"]["verification"]} == {
        "bit-identical"
    }
    words = ("convert", converted / "silent", "--to", "attnres", "--set", "blocks=2", "--no-verify")
    result = json.loads(run.succeed(*words, "--json"))
    assert result.keys() == {
        "path", "source", "architecture", "targets", "exactness", "files", "verification",
        "unused_tensors", "seconds",
    }  # fmt: skip
    assert (result["path"], result["targets"]) == ("silent-attnres", ["attnres"])
    models = json.loads(run.succeed("models", "--json"))
    assert models[0]["alias"] == "tiny"
    assert all(
        row.keys() == {"alias", "hub_id", "parameters", "family", "gated", "local"}
        for row in models
    )


def test_models_lists_tiny_and_every_alias(run: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(Path.cwd()))
    out = run.succeed("models")
    assert [line.split()[0] for line in out.splitlines()[1:]] == ["tiny", *ALIASES]
    assert all(alias.hub_id in out for alias in ALIASES.values())
    assert fits(out)
    assert [line.split()[0] for line in run.succeed("models", "--local").splitlines()[1:]] == [
        "tiny"
    ]


def fits(out: str) -> bool:
    """Whether no line is wider than the terminal."""
    return all(len(line.rstrip()) <= WIDTH for line in out.splitlines())
