"""Convert a large model and verify it with less memory than its weights take.

What does not fit is read from disk in every forward pass. One process does all of it, as a user's
would; its time and peak memory are the result.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from bench_convert import describe_machine, ensure_model, folder_bytes


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--work", type=Path, default=Path(".cache/bench"), help="where models lie")
    parser.add_argument("--layers", type=int, default=32, help="decoder layers of the model")
    parser.add_argument("--to", default="attnres", help="target")
    parser.add_argument("--max-memory", default="4GB", help="that weights may take")
    options = parser.parse_args()
    source = ensure_model(options.work, options.layers)
    out = options.work / "verified"
    shutil.rmtree(out, ignore_errors=True)
    command = [sys.executable, "-m", "difftool", "convert", str(source), "--to", options.to]
    command += ["-o", str(out), "--link", "--max-memory", options.max_memory, "--json"]
    started = time.perf_counter()
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, env={**os.environ, "HF_HUB_OFFLINE": "1"}
    )
    assert process.stdout is not None
    said = process.stdout.read()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    seconds = time.perf_counter() - started
    if process.returncode:
        raise SystemExit(f"{' '.join(command)} failed")
    verification = json.loads(said)["verification"]
    shutil.rmtree(out)
    print("| model, GB | target | memory for weights | s | peak RSS, MB | verdict |")
    print("| ---: | --- | ---: | ---: | ---: | --- |")
    for proof in verification:
        print(
            f"| {folder_bytes(source) / 1e9:.1f} | {options.to} | {options.max_memory} "
            f"| {seconds:.0f} | {usage.ru_maxrss * 1024 / 1e6:.0f} "
            f"| {proof['dtype']}: {proof['verdict']} |"
        )
    machine = describe_machine(options.work)
    print("\n" + "; ".join(f"{key} {value}" for key, value in machine.items()))


if __name__ == "__main__":
    main()
