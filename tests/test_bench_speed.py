"""Speed: turns, statistics, the KV cache's bytes, and processes that end; never the time itself."""

import math
import os
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
import torch._dynamo
from safetensors.torch import load_file
from tiny_models import make_model
from transformers import DynamicCache

from difftool.bench.charts import draw_charts
from difftool.bench.charts.speed import charts
from difftool.bench.measures.speed import (
    Result,
    headline,
    measure_together,
    plan_cells,
    require_room,
    rotated,
    tables,
    take_turns,
)
from difftool.bench.options import BenchOptions
from difftool.bench.speed_process import started_worker
from difftool.bench.speed_result import CellResult, spread, summarise_cell
from difftool.bench.speed_timing import STEPS, Cell, Trial, cache_bytes, call_options, time_trial
from difftool.bench.speed_worker import compile_model, explain
from difftool.bench.summary import compare
from difftool.errors import UserError
from difftool.surgery.convert import ConvertOptions, convert

WEIGHTS = "model.safetensors"

QUICK: dict[str, Any] = {
    "measures": ("speed",),
    "speed_batch_sizes": (1, 2),
    "speed_contexts": (8,),
    "repetitions": 2,
    "dtype": "float32",
}


def silent(what: str, done: int, total: int) -> None:
    """Report no progress."""


def make_trial(seconds: float, batch: int = 1) -> Trial:
    steps = tuple(seconds * factor for factor in (1, 2, 9))
    return Trial(
        prefill=seconds, first_token=2 * seconds, steps=steps, peak_rss=int(1000 * seconds),
        peak_gpu=None, kv_bytes=64 * batch,
    )  # fmt: skip


@dataclass
class Recorder:
    """Stands where a worker does and writes down who was asked."""

    name: str
    log: list[tuple[str, str]]
    facts: Any = field(default_factory=type("Facts", (), {"positions": None}))

    def time(self, cell: Cell) -> Trial:
        self.log.append((self.name, str(cell)))
        return make_trial(float(len(self.log)))


def test_checkpoints_take_turns_and_each_is_first_in_its_turn() -> None:
    log: list[tuple[str, str]] = []
    workers: Any = [Recorder(name, log) for name in "abc"]
    cells = [Cell(batch=1, context=8), Cell(batch=4, context=8)]
    trials = take_turns(workers, cells, 3, silent)
    turns = ["".join(name for name, _ in log[n : n + 3]) for n in range(0, len(log), 3)]
    assert turns == ["abc", "bca", "cab", "abc"] * 2
    assert [cell for _, cell in log] == ["1 × 8"] * 12 + ["4 × 8"] * 12
    kept = [trial.prefill for trial in trials["a"][cells[0]]]
    assert kept == [6.0, 8.0, 10.0]  # the first round, of call 1, warmed up


def test_a_checkpoint_without_positions_for_a_cell_is_left_out_of_its_turns() -> None:
    log: list[tuple[str, str]] = []
    workers: Any = [Recorder("long", log), Recorder("short", log)]
    workers[1].facts.positions = 20
    take_turns(workers, [Cell(batch=1, context=20 - STEPS), Cell(batch=1, context=8)], 1, silent)
    assert [name for name, cell in log if cell == "1 × 8"] == ["long", "long"]
    assert len(log) == 6


def test_nobody_takes_turns_where_nobody_fits() -> None:
    assert rotated([], 3) == []


def test_spread_has_numpys_quartiles_and_the_median_of_the_ratios() -> None:
    generator = np.random.default_rng(0)
    for count in (2, 5, 8):
        values, firsts = generator.uniform(1, 9, (2, count))
        found = spread(list(values), list(firsts))
        quartiles = np.percentile(values, [25, 50, 75])
        assert [found.lower_quartile, found.median, found.upper_quartile] == pytest.approx(
            quartiles
        )
        assert (found.low, found.high) == (values.min(), values.max())
        ratios = values / firsts
        assert found.ratio == pytest.approx(np.median(ratios))
        assert (found.ratio_low, found.ratio_high) == pytest.approx((ratios.min(), ratios.max()))
        assert found.error == pytest.approx((quartiles[2] - quartiles[0]) / 2)


def test_one_repetition_has_no_spread_and_no_first_no_ratio() -> None:
    found = spread([3.0], None)
    assert (found.median, found.error, found.ratio) == (3.0, None, None)


def test_a_cell_is_tokens_over_seconds() -> None:
    cell = Cell(batch=4, context=10)
    found = summarise_cell(cell, [make_trial(2.0, 4)], [make_trial(1.0, 4)])
    assert (found.prefill.median, found.prefill.ratio) == (4 * 10 / 2.0, 0.5)
    assert (found.decode.median, found.decode.ratio) == (4 / 4.0, 0.5)  # steps of 2, 4 and 18 s
    assert (found.ttft_ms.median, found.ttft_ms.ratio) == (4000.0, 2.0)
    assert found.kv_bytes_per_token == 64 / 10


@pytest.mark.parametrize("name", ["llama", "qwen3", "gemma3_text", "mixtral"])
def test_a_trial_holds_the_keys_and_values_of_the_prompt(name: str) -> None:
    model = make_model(name).eval()
    config = model.config
    cell = Cell(batch=2, context=7)
    trial = time_trial(model, model, cell, seed=0)
    width = 2 * config.num_key_value_heads * config.head_dim * config.num_hidden_layers
    assert trial.kv_bytes == 2 * 7 * width * model.dtype.itemsize
    assert len(trial.steps) == STEPS
    assert 0 < trial.prefill <= trial.first_token


def test_the_prompt_is_read_whole_and_continued_with_its_cache() -> None:
    """The steps must see what the prompt left: a lost cache would be faster and wrong."""
    model = make_model("llama").eval()
    seen: list[int] = []

    def run(tokens: torch.Tensor, **options: Any) -> Any:
        cache = next(value for value in options.values() if isinstance(value, DynamicCache))
        seen.append(cache.get_seq_length() + tokens.shape[1])
        return model(tokens, **options)

    time_trial(model, run, Cell(batch=1, context=9), seed=0)
    assert seen == list(range(9, 9 + STEPS + 1))


def test_a_compiled_model_is_compiled_by_the_warm_up_and_not_again() -> None:
    model = make_model("llama", num_hidden_layers=1)
    cells = [Cell(batch=2, context=context) for context in (8, 40)]
    counted = torch._dynamo.utils.counters["stats"]
    with torch._dynamo.config.patch(recompile_limit=8, fail_on_recompile_limit_hit=False):
        run = compile_model(model, backend="eager")
        counted.clear()
        time_trial(model, run, cells[0], seed=0)
        graphs = counted["unique_graphs"]
        timed = [time_trial(model, run, cell, seed=0) for cell in cells]
    assert counted["unique_graphs"] == graphs > 0
    plain = [time_trial(model, model, cell, seed=0) for cell in cells]
    assert [trial.kv_bytes for trial in timed] == [trial.kv_bytes for trial in plain]


def test_cache_bytes_count_every_tensor_of_a_cache() -> None:
    model = make_model("llama").eval()
    cache = DynamicCache(config=model.config)
    assert cache_bytes(cache) == 0
    with torch.no_grad():
        model(torch.ones(1, 5, dtype=torch.long), **call_options(model, cache))
    expected = sum(x.keys.nbytes + x.values.nbytes for x in cache.layers)
    assert cache_bytes(cache) == expected > 0


def test_cells_are_every_batch_at_every_context_once() -> None:
    options = BenchOptions(speed_batch_sizes=(4, 1, 4), speed_contexts=(16, 8))
    assert [str(cell) for cell in plan_cells(options)] == ["4 × 16", "4 × 8", "1 × 16", "1 × 8"]
    for nothing in ({"speed_batch_sizes": ()}, {"speed_contexts": (8, 0)}):
        with pytest.raises(UserError, match=r"speed_\w+ is .*one positive number"):
            plan_cells(BenchOptions(**nothing))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("speed") / "llama"
    make_model("llama").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def both(made: Path) -> Path:
    """The same with diffv2 and attnres."""
    halfway, folder = made.with_name("diffv2"), made.with_name("both")
    convert(str(made), halfway, ConvertOptions(to="diffv2", verify=False))
    convert(str(halfway), folder, ConvertOptions(to="attnres", verify=False))
    return folder


@dataclass(frozen=True)
class Measured:
    """What one run left behind."""

    results: dict[str, Result]
    processes: set[psutil.Process]
    progress: list[tuple[str, int, int]]


@pytest.fixture(scope="module")
def measured(made: Path, both: Path) -> Measured:
    """Two checkpoints at a context that fits their 128 positions and one that does not."""
    before = set(psutil.Process().children(recursive=True))
    seen: list[tuple[str, int, int]] = []
    options = BenchOptions(**QUICK | {"speed_contexts": (8, 120)})
    results = measure_together(
        [("one", str(made)), ("both", str(both))], options, lambda *step: seen.append(step)
    )
    left = set(psutil.Process().children(recursive=True)) - before
    return Measured(dict(zip(("one", "both"), results, strict=True)), left, seen)


def test_two_checkpoints_are_timed_and_their_processes_gone(measured: Measured, made: Path) -> None:
    assert measured.processes == set()
    for result in measured.results.values():
        assert [(cell.batch, cell.context) for cell in result.cells] == [(1, 8), (2, 8)]
        assert all(len(cell.decode.values) == 2 for cell in result.cells)
        assert all(0 < cell.decode.low < math.inf for cell in result.cells)
        assert (result.dtype, result.device, result.attention) == ("float32", "cpu", "sdpa")
        assert result.cells[0].peak_rss > result.start_rss / 2 > 10**7
        assert result.kernels
    one, both = measured.results.values()
    assert one.weight_bytes == sum(tensor.nbytes for tensor in load_file(made / WEIGHTS).values())
    assert one.parameters == make_model("llama").num_parameters() < both.parameters
    assert [cell.kv_bytes for cell in one.cells] == [cell.kv_bytes for cell in both.cells]
    assert all(cell.prefill.ratio == 1.0 for cell in one.cells)
    done = [step[1:] for step in measured.progress]
    assert done[0] == (0, 1) and done[-1] == (12, 12) and done == sorted(done)


def test_contexts_beyond_the_positions_are_left_out_and_told(measured: Measured) -> None:
    for result in measured.results.values():
        why = f"context 120: with {STEPS} tokens after it more than 128 positions"
        assert result.skipped == (why,)
    assert "Left out: one: context 120" in tables(measured.results)[0].note


def test_only_contexts_beyond_the_positions_are_refused() -> None:
    worker: Any = Recorder("one", [])
    cells = plan_cells(BenchOptions(speed_contexts=(113, 128)))
    require_room(worker, cells)  # it does not say how many it has
    worker.facts.positions = 128
    with pytest.raises(UserError, match=r"one has 128 positions.*at most 112 tokens"):
        require_room(worker, cells)


def test_the_summary_and_the_tables_tell_the_median_of_the_ratios(measured: Measured) -> None:
    one, both = measured.results.values()
    figures = {figure.name: figure for figure in headline(both)}
    assert list(figures)[:3] == [
        "time to first token, ms (1 × 8)",
        "prefill, tokens/s (1 × 8)",
        "decode, tokens/s (1 × 8)",
    ]
    second, first = figures["decode, tokens/s (1 × 8)"], headline(one)[2]
    ratios = np.divide(both.cells[0].decode.values, one.cells[0].decode.values)
    assert compare(second, first).ratio == f"{np.median(ratios):.4f}"
    assert figures["KV cache, bytes/token"].value == 2 * 2 * 8 * 3 * 4  # k and v, heads, d, layers
    speed, memory = tables(measured.results)
    assert [row[:2] for row in speed.rows] == [
        ("1 × 8", "one"), ("1 × 8", "both"), ("2 × 8", "one"), ("2 × 8", "both"),
    ]  # fmt: skip
    assert speed.rows[1][-1] == f"{np.median(ratios):.3f}"
    assert [row[0] for row in memory.rows] == ["one", "both"]
    assert [row[-1].startswith("scaled dot product") for row in memory.rows] == [True, True]


def test_a_result_reads_back_from_json(measured: Measured) -> None:
    result = measured.results["both"]
    assert Result.model_validate_json(result.model_dump_json()) == result


def test_one_repetition_is_not_judged() -> None:
    cell = summarise_cell(Cell(batch=1, context=8), [make_trial(2.0)], [make_trial(1.0)])
    figures = headline(made_result(cell))[:3]
    assert [(figure.better, figure.stderr) for figure in figures] == [("", None)] * 3


def made_result(*cells: CellResult) -> Result:
    return Result(
        cells=cells, skipped=(), parameters=1, weight_bytes=1, start_rss=1, repetitions=1,
        steps=STEPS, threads=1, dtype="float32", device="cpu", attention="sdpa", kernels=(),
        compiled=False,
    )  # fmt: skip


def test_the_summary_shows_the_first_batch_at_the_largest_context() -> None:
    sizes = ((4, 32), (4, 64), (1, 32), (1, 128))
    cells = [summarise_cell(Cell(batch=b, context=c), [make_trial(1.0)], None) for b, c in sizes]
    assert made_result(*cells).shown is cells[1]


def test_the_chart_has_a_bar_for_each_cell_and_says_the_ratios() -> None:
    sizes = [Cell(batch=1, context=8), Cell(batch=4, context=8)]
    first = made_result(*(summarise_cell(s, [make_trial(1.0)], [make_trial(1.0)]) for s in sizes))
    second = made_result(*(summarise_cell(s, [make_trial(2.0)], [make_trial(1.0)]) for s in sizes))
    short = made_result(summarise_cell(sizes[1], [make_trial(4.0)], [make_trial(1.0)]))
    (chart,) = charts({"plain": first, "both": second, "short": short})
    prefill, decode = chart.drawing.axes
    for axes, heights in ((prefill, [8, 32, 4, 16, 8]), (decode, [0.5, 2, 0.25, 1, 0.5])):
        assert [bar.get_width() for bar in axes.patches] == heights
        assert [text.get_text() for text in axes.texts] == ["×0.50", "×0.50", "×0.25"]
    assert [label.get_text() for label in prefill.get_yticklabels()] == ["1 × 8", "4 × 8"]
    titles = [drawn.title for drawn in draw_charts("speed", {"plain": first, "_": short})]
    assert titles == ["Speed"]


def test_a_process_that_is_killed_is_told_with_what_to_lower(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))  # what is killed leaves its temporary folder
    with started_worker("one", made, BenchOptions(**QUICK)) as worker:
        worker.time(Cell(batch=1, context=8))
        os.kill(worker.pid, signal.SIGKILL)
        with pytest.raises(UserError, match=r"one, batch 1.*killed.* Lower --speed-batch-sizes"):
            worker.time(Cell(batch=1, context=8))
    assert not psutil.pid_exists(worker.pid)


def test_a_checkpoint_that_cannot_be_loaded_is_told_by_name(made: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(made, tmp_path / "cut"))
    os.truncate(folder / WEIGHTS, 2000)
    with (
        pytest.raises(UserError, match=r"cut, loading: .*truncated"),
        started_worker("cut", folder, BenchOptions(**QUICK)),
    ):
        pass


STARTER = """
import sys, time
from pathlib import Path
from difftool.bench.options import BenchOptions
from difftool.bench.speed_process import started_worker

with started_worker("one", Path(sys.argv[1]), BenchOptions(dtype="float32")) as worker:
    print(worker.pid, flush=True)
    time.sleep(600)
"""


def test_a_process_ends_when_the_one_that_started_it_is_killed(made: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-c", STARTER, str(made)]
    scratch = {**os.environ, "TMPDIR": str(tmp_path)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, env=scratch) as starter:
        assert starter.stdout is not None
        worker = psutil.Process(int(starter.stdout.readline()))
        assert worker.is_running()
        starter.kill()
    _, alive = psutil.wait_procs([worker], timeout=60)
    assert not alive
    assert not list(tmp_path.glob("difftool-*"))


def test_memory_errors_of_a_worker_become_advice_and_others_stay() -> None:
    for error in (MemoryError(), torch.OutOfMemoryError("CUDA out of memory. Tried 2 GiB")):
        failure = explain(error)
        assert failure is not None and "Lower --speed-batch-sizes" in failure.fix
    assert explain(RuntimeError("shape mismatch")) is None


@pytest.mark.real
def test_the_benchmark_of_overheads_prints_a_row_for_each_target(shared_data: Path) -> None:
    script = Path(__file__).parents[1] / "benchmarks" / "bench_overhead.py"
    source = shared_data / "stories260K" / "hf"
    few = ["--batch-sizes", "1", "--contexts", "8", "--repetitions", "1"]
    command = [sys.executable, str(script), "--source", str(source), *few]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    sides = [line.split("|")[2].strip() for line in printed.splitlines() if "| 1 × 8 |" in line]
    assert sides == ["source", "diffv2", "attnres", "both"]
    assert printed.splitlines()[-1].startswith("cpu ")
