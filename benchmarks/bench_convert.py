"""Time `difftool convert` on a large model beside `cp -r` of the same folder, in the same run.

Every side runs in a process of its own, start and imports included. The sides take turns, each
round beginning with another one, and a ratio is to the `cp` of its own round.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
CONVERT = [sys.executable, "-m", "difftool", "convert", "{source}", "-o", "{out}", "--no-verify"]
SIDES: dict[str, list[str]] = {
    "cp -r": ["cp", "-r", "{source}", "{out}"],
    "diffv2": [*CONVERT, "--to", "diffv2"],
    "attnres": [*CONVERT, "--to", "attnres"],
    "attnres --link": [*CONVERT, "--to", "attnres", "--link"],
    "naive diffv2": [sys.executable, str(HERE / "naive_convert.py"), "{source}", "{out}"],
}
BASELINE, NAIVE = "cp -r", "naive diffv2"
BESIDE_NAIVE = (BASELINE, "diffv2", NAIVE)
NAIVE_LAYERS = 8  # of the model for the naive way where memory cannot hold the large one
SHARD = 5 * 10**9  # bytes that save_pretrained takes on top of the model


@dataclass(frozen=True)
class Run:
    """One side, once.

    Attributes:
        seconds: from start to exit.
        on_disk: seconds from start until every byte is on the disk (`sync`).
        cpu: seconds that the process kept a core busy.
        rss: peak resident bytes of the process.
        nbytes: of the source.
    """

    model: str
    side: str
    round: int
    seconds: float
    on_disk: float
    cpu: float
    rss: int
    nbytes: int


def run_side(source: Path, side: str, number: int, *, cold: bool) -> Run:
    out = source.with_name("output")
    command = [part.format(source=source, out=out) for part in SIDES[side]]
    quiet = subprocess.DEVNULL
    settle(cold=cold)
    started = time.perf_counter()
    # This process stays small: what it holds at the fork would count as the child's.
    process = subprocess.Popen(command, stdout=quiet, env={**os.environ, "HF_HUB_OFFLINE": "1"})
    _, status, usage = os.wait4(process.pid, 0)
    seconds = time.perf_counter() - started
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} failed")
    os.sync()
    on_disk = time.perf_counter() - started
    shutil.rmtree(out)
    cpu = usage.ru_utime + usage.ru_stime
    rss = usage.ru_maxrss * 1024
    return Run(source.name, side, number, seconds, on_disk, cpu, rss, folder_bytes(source))


def settle(*, cold: bool) -> None:
    """Leave no dirty page of the side before; with `cold`, nothing in the page cache at all."""
    os.sync()
    if cold:
        Path("/proc/sys/vm/drop_caches").write_text("3")


def folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.iterdir())


def plan_models(options: argparse.Namespace) -> dict[Path, list[str]]:
    """Return the sides of each model, which is written if it is not there yet."""
    large = ensure_model(options.work, options.layers)
    sides = options.sides or list(SIDES)
    if NAIVE not in sides or folder_bytes(large) * 1.1 + SHARD < available_memory() * 0.8:
        return {large: sides}
    small = ensure_model(options.work, NAIVE_LAYERS)
    return {large: [side for side in sides if side != NAIVE], small: list(BESIDE_NAIVE)}


def ensure_model(work: Path, layers: int) -> Path:
    folder = work / f"llama-8b-{layers}-layers"
    if not folder.exists():
        print(f"writing {folder}", file=sys.stderr)
        script = [sys.executable, str(HERE / "make_llama_8b.py")]
        subprocess.run([*script, str(folder), "--layers", str(layers)], check=True)
    return folder


def available_memory() -> int:
    fields = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
    return int(fields["MemAvailable"].split()[0]) * 1024


def measure(models: dict[Path, list[str]], rounds: int, *, cold: bool) -> Iterable[Run]:
    for number in range(rounds):
        for source, sides in models.items():
            first = number % len(sides)
            for side in (*sides[first:], *sides[:first]):
                run = run_side(source, side, number, cold=cold)
                print(f"{run.model} {side}: {run.seconds:.1f} s", file=sys.stderr)
                yield run


def summarise(runs: list[Run]) -> list[dict[str, Any]]:
    """Return a row per model and side: medians over the rounds, and the spread of the times."""
    rows = []
    for model, side in dict.fromkeys((run.model, run.side) for run in runs):
        mine = [run for run in runs if (run.model, run.side) == (model, side)]
        base = {run.round: run for run in runs if (run.model, run.side) == (model, BASELINE)}
        pairs = [(run, base[run.round]) for run in mine if run.round in base]
        seconds = [run.seconds for run in mine]
        rows.append(
            {
                "model": model,
                "side": side,
                "seconds": statistics.median(seconds),
                "fastest": min(seconds),
                "slowest": max(seconds),
                "times_cp": _median(run.seconds / cp.seconds for run, cp in pairs),
                "times_cp_on_disk": _median(run.on_disk / cp.on_disk for run, cp in pairs),
                "cpu": _median(run.cpu for run in mine),
                "peak_rss": max(run.rss for run in mine),
                "mb_per_second": _median(run.nbytes / run.seconds / 1e6 for run in mine),
            }
        )
    return rows


def _median(values: Iterable[float]) -> float:
    kept = list(values)
    return statistics.median(kept) if kept else float("nan")


def format_table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| model | side | s (min–max) | × cp | × cp, synced | MB/s | CPU s | peak RSS, MB |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    lines += [
        "| {model} | {side} | {seconds:.1f} ({fastest:.1f}–{slowest:.1f}) | {times_cp:.2f} "
        "| {times_cp_on_disk:.2f} | {mb_per_second:.0f} | {cpu:.1f} | {mb:.0f} |".format(
            **row, mb=row["peak_rss"] / 1e6
        )
        for row in rows
    ]
    return "\n".join(lines)


def describe_machine(work: Path) -> dict[str, Any]:
    cpu = Path("/proc/cpuinfo").read_text().partition("model name\t: ")[2].partition("\n")[0]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    kind = subprocess.run(
        ["stat", "-f", "-c", "%T", str(work)], check=True, capture_output=True, text=True
    )
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "memory_gb": round(memory / 1e9, 1),
        "file_system": kind.stdout.strip(),
        "kernel": os.uname().release,
        "python": sys.version.split()[0],
        **{name: version(name) for name in ("torch", "transformers", "safetensors")},
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--work", type=Path, default=Path(".cache/bench"), help="where models lie")
    parser.add_argument("--layers", type=int, default=32, help="decoder layers of the model")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sides", nargs="+", choices=SIDES, help="instead of all of them")
    parser.add_argument(
        "--cold", action="store_true", help="drop the page cache before each side; needs root"
    )
    parser.add_argument("--json", action="store_true", help="every run, instead of the table")
    options = parser.parse_args()
    models = plan_models(options)
    runs = list(measure(models, options.rounds, cold=options.cold))
    rows, machine = summarise(runs), describe_machine(options.work)
    if options.json:
        everything = {"machine": machine, "rows": rows, "runs": [asdict(run) for run in runs]}
        print(json.dumps(everything, indent=2))
        return
    print(format_table(rows))
    cache = "dropped before each side" if options.cold else "as the side before left it"
    print(f"\n{options.rounds} rounds; page cache {cache}")
    print("; ".join(f"{key} {value}" for key, value in machine.items()))


if __name__ == "__main__":
    main()
