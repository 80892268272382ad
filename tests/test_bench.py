"""difftool bench as a whole: what it writes, what it refuses, what an interruption leaves."""

import errno
import json
import math
import re
import shutil
from pathlib import Path

import pytest
import torch
from command_line import Runner, edit_json
from safetensors.torch import load_file, save_file
from transformers import OPTConfig, OPTForCausalLM

from difftool.bench.measures import default_measures, measure_names, perplexity
from difftool.bench.options import BenchOptions
from difftool.bench.report import read_report
from difftool.bench.run import bench, explain_memory, unique_names
from difftool.errors import UserError
from difftool.surgery.convert import ConvertOptions, convert

QUICK = ("--measures", "perplexity", "--limit", "2", "--seq-len", "64", "--dtype", "float32")


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Runner:
    return Runner(capsys)


@pytest.fixture(autouse=True)
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Enter an empty folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def broken(tmp_path: Path, tiny: Path) -> Path:
    """The embedded checkpoint with a NaN, as a training run may leave it."""
    folder = Path(shutil.copytree(tiny, tmp_path / "broken"))
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][3] = float("nan")
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_a_conversion_has_the_perplexity_of_its_source(run: Runner, work: Path) -> None:
    convert("tiny", work / "tiny-diffv2", ConvertOptions(to="diffv2", verify=False))
    said = run.succeed("bench", "tiny", "tiny-diffv2", *QUICK)
    assert "1.0000" in said
    folder = work / "bench-tiny-vs-tiny-diffv2"
    assert f"report: {folder.name}/report.html" in said
    assert {path.name for path in folder.iterdir()} == {"report.json", "report.md", "report.html"}
    report = read_report(folder / "report.json")
    assert report.complete
    source, converted = report.subjects
    assert source.results == converted.results  # float32: to the last bit
    assert (converted.targets, converted.source) == (("diffv2",), "tiny-diffv2")
    assert [step.stage for step in converted.provenance.steps] == ["convert"]
    assert str(work) not in (folder / "report.json").read_text()


def test_json_is_the_report(run: Runner, work: Path) -> None:
    printed = json.loads(run.succeed("bench", "tiny", *QUICK, "--json"))
    assert printed == json.loads((work / "bench-tiny" / "report.json").read_text())


def test_a_second_bench_replaces_the_report_and_finds_the_same(run: Runner, work: Path) -> None:
    first, second = (
        json.loads(run.succeed("bench", "tiny", *QUICK, "-o", "out", "--json")) for _ in range(2)
    )
    assert first["subjects"] == second["subjects"]


def test_what_a_killed_run_left_is_in_nobodys_way(run: Runner, work: Path) -> None:
    (work / "out").mkdir()
    (work / "out" / ".report.html.new").write_text("<html>")
    run.succeed("bench", "tiny", *QUICK, "-o", "out")
    assert {path.name for path in (work / "out").iterdir()} == {
        "report.json", "report.md", "report.html",
    }  # fmt: skip


def test_a_folder_with_anything_else_is_not_written_to(run: Runner, work: Path) -> None:
    (work / "out").mkdir()
    (work / "out" / "thesis.tex").write_text("precious")
    ran = run("bench", "tiny", *QUICK, "-o", "out")
    assert ran.status == 1
    assert "holds thesis.tex" in ran.message
    assert [path.name for path in (work / "out").iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize(("words", "message"), [
    (("--measures", "perplexty"), "unknown measure 'perplexty'.* Did you mean 'perplexity'"),
    (("--measures", "perplexity,,speed"), "nothing between two commas"),
    (("--tasks", "arc_eazy", "--tasks-dir", "."), "arc_eazy.* Did you mean 'arc_easy'"),
    (("--speed-contexts", "128,x"), "not of the form 1,4,16"),
    (("--seq-len", "64", "--stride", "65"), "tokens would be skipped"),
    (("--device", "quantum"), "the device 'quantum' cannot be used"),
    (("--text", "ghost.txt", "--measures", "perplexity"), "ghost.txt cannot be read"),
])  # fmt: skip
def test_what_cannot_be_done_is_refused(run: Runner, words: tuple[str, ...], message: str) -> None:
    ran = run("bench", "tiny", *words)
    assert ran.status in (1, 2)
    assert re.search(message, ran.message), ran.message


def test_a_nan_is_reported_and_the_exit_status_says_so(run: Runner, broken: Path) -> None:
    ran = run("bench", "tiny", broken, *QUICK, "-o", "out")
    assert ran.status == 1
    assert "broken: perplexity: perplexity is nan" in ran.message
    report = read_report(Path("out/report.json"))
    assert not report.complete
    good, bad = report.subjects
    assert good.problems == ()
    assert isinstance(bad.results["perplexity"], perplexity.Result)
    assert math.isnan(bad.results["perplexity"].nats_per_token)
    assert "NaN" in Path("out/report.json").read_text()
    assert "perplexity is nan" in Path("out/report.md").read_text()


def test_an_interruption_leaves_what_was_finished(
    work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measure = perplexity.measure

    def interrupted(subject, options, progress):
        if subject.name == "tiny (2)":
            raise KeyboardInterrupt
        return measure(subject, options, progress)

    monkeypatch.setattr(perplexity, "measure", interrupted)
    options = BenchOptions(measures=("perplexity",), limit=1, seq_len=64)
    with pytest.raises(KeyboardInterrupt):
        bench(["tiny", "tiny"], options, work / "out")
    report = read_report(work / "out" / "report.json")
    assert not report.complete
    assert [list(subject.results) for subject in report.subjects] == [["perplexity"], []]
    assert (work / "out" / "report.html").exists()


def test_a_source_that_is_not_there_leaves_the_figures_of_the_first(
    run: Runner, work: Path
) -> None:
    ran = run("bench", "tiny", "./ghost", *QUICK, "-o", "out")
    assert ran.status == 1
    assert "There is no folder ./ghost" in ran.message
    assert list(read_report(work / "out" / "report.json").results("perplexity")) == ["tiny"]


def test_one_measure_that_fails_does_not_stop_the_others(
    run: Runner, work: Path, tiny: Path
) -> None:
    folder = Path(shutil.copytree(tiny, work / "bare"))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    ran = run(
        "bench", folder, "--measures", "perplexity,speed", "--speed-contexts", "8",
        "--speed-batch-sizes", "1", "--repetitions", "1", "-o", "out",
    )  # fmt: skip
    assert ran.status == 1
    assert "perplexity: bare has no tokenizer" in ran.message
    assert list(read_report(work / "out" / "report.json").measures) == ["speed"]


def test_a_family_that_difftool_does_not_know_is_measured_as_transformers_loads_it(
    run: Runner, work: Path, tiny: Path
) -> None:
    config = OPTConfig(
        vocab_size=4096, hidden_size=16, ffn_dim=16, num_hidden_layers=1, num_attention_heads=2,
        max_position_embeddings=128, word_embed_proj_dim=16,
    )  # fmt: skip
    torch.manual_seed(0)
    OPTForCausalLM(config).save_pretrained(work / "opt")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tiny / name, work / "opt")
    run.succeed("bench", "opt", *QUICK, "-o", "out")
    (subject,) = read_report(work / "out" / "report.json").subjects
    assert (subject.family, subject.targets, subject.architecture) == ("opt", (), "OPTForCausalLM")
    result = subject.results["perplexity"]
    assert isinstance(result, perplexity.Result)
    assert result.nats_per_token == pytest.approx(math.log(4096), rel=0.05)


def test_a_report_of_another_version_or_kind_is_refused(run: Runner, work: Path) -> None:
    run.succeed("bench", "tiny", *QUICK, "-o", "out")
    report = work / "out" / "report.json"
    edit_json(report, schema_version=99)
    with pytest.raises(UserError, match="schema version 99"):
        read_report(report)
    report.write_text("[]")
    with pytest.raises(UserError, match="not a report of difftool bench"):
        read_report(report)


@pytest.mark.parametrize("error", [
    MemoryError(),
    OSError(errno.ENOMEM, "Cannot allocate memory"),
    RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried …"),
    torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
])  # fmt: skip
def test_running_out_of_memory_says_which_setting_to_lower(error: Exception) -> None:
    with pytest.raises(UserError, match=r"out of .*memory.* Lower --batch-size"), explain_memory():
        raise error


def test_other_runtime_errors_stay_themselves() -> None:
    with pytest.raises(RuntimeError, match="shape"), explain_memory():
        raise RuntimeError("shape mismatch")


def test_checkpoints_of_one_name_are_told_apart() -> None:
    sources = ["a/llama", "b/llama", "tiny", "c/llama/", "x/model.gguf"]
    assert unique_names(sources) == ["llama", "llama (2)", "tiny", "llama (3)", "model"]


def test_tasks_are_measured_only_when_they_are_named() -> None:
    assert set(measure_names()) - set(default_measures()) == {"tasks"}
