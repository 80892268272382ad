"""Models larger than memory: converted by the tensor, verified with weights left on disk."""

import json
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from conftest import ROOT
from safetensors.torch import save_file
from tiny_models import make_model

from difftool.checkpoint import open_checkpoint
from difftool.surgery.convert import ConvertOptions, convert
from difftool.surgery.loading import loaded_model
from difftool.surgery.verify import verify

CHAINS = [("diffv2",), ("attnres",), ("diffv2", "attnres")]
SETTINGS = {"diffv2": {}, "attnres": {"block_size": 2}}


def shift_weights(folder: Path) -> None:
    """Store the weights 8 bytes past a multiple of 16, where a product may round differently."""
    file = folder / "model.safetensors"
    tensors = make_tensors(folder)
    for pad in range(2):
        save_file(tensors, file, {"format": "pt", "pad": 8 * pad * " "})
        first = next(iter(open_checkpoint(folder).tensors.values()))
        if first.offset % 16 == 8:
            return
    raise AssertionError("no padding shifts the weights")


def make_tensors(folder: Path) -> dict[str, torch.Tensor]:
    with loaded_model(folder, torch.float32) as model:
        return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def convert_along(source: Path, chain: tuple[str, ...], folder: Path) -> Path:
    """Convert to one target after another, unverified, and return the last result."""
    for target in chain:
        out = folder / target
        convert(str(source), out, ConvertOptions(target, settings=SETTINGS[target], verify=False))
        source = out
    return source


@pytest.mark.parametrize("chain", CHAINS, ids="+".join)
@pytest.mark.parametrize("name", ["llama", "llama-tied"])
def test_a_model_larger_than_memory_gets_the_figures_of_one_that_fits(
    name: str, chain: tuple[str, ...], tmp_path: Path
) -> None:
    source = tmp_path / "source"
    make_model(name).save_pretrained(source)
    if name == "llama":
        shift_weights(source)
    result = convert_along(source, chain, tmp_path)
    limit = open_checkpoint(result).nbytes // 3
    for folder in (source, result):
        with loaded_model(folder, torch.float32, max_memory=limit) as model:
            assert "disk" in model.hf_device_map.values()
            resident = sum(p.nbytes for p in model.parameters() if not p.is_meta)
        assert resident <= limit
    dtypes = (torch.float32,)
    in_memory = verify(source, result, "bits", dtypes, None)
    from_disk = verify(source, result, "bits", dtypes, None, max_memory=limit)
    assert [asdict(comparison) for comparison in from_disk] == [
        asdict(comparison) for comparison in in_memory
    ]
    assert from_disk[0].differences["padded batch"] == 0


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The benchmarks' model, of a quarter of the width and 18 layers: 600 MB."""
    folder = tmp_path_factory.mktemp("large") / "llama"
    script = ROOT / "benchmarks" / "make_llama_8b.py"
    command = [sys.executable, script, folder, "--layers", "18", "--scale", "0.25"]
    subprocess.run(command, check=True, capture_output=True)
    return folder


PEAKS = """
import json, sys
from pathlib import Path
from difftool.sources import open_source
from difftool.surgery.convert import ConvertOptions, convert, plan_source

def peak():  # of this process alone; ru_maxrss begins at that of the process which started it
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))

source, out = sys.argv[1], Path(sys.argv[2])
with open_source(source) as opened:
    plan_source(opened, ConvertOptions("diffv2"))  # what torch and transformers take by themselves
peaks = [peak()]
for dtype in (None, "float16"):
    convert(source, out, ConvertOptions("diffv2", dtype=dtype, verify=False, force=True))
    peaks.append(peak())
print(json.dumps(peaks))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="peak memory is read from /proc")
def test_memory_while_converting_depends_on_the_largest_tensor_alone(
    large: Path, tmp_path: Path
) -> None:
    checkpoint = open_checkpoint(large)
    largest = max(tensor.nbytes for tensor in checkpoint.tensors.values())
    assert 550e6 < checkpoint.nbytes < 650e6 and largest < checkpoint.nbytes / 8
    command = [sys.executable, "-c", PEAKS, large, tmp_path / "out"]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    start, kept, cast = json.loads(done.stdout)
    slack = 32 * 2**20  # blocks of copying, the allocator's remains, modules imported on the way
    query = max(t.nbytes for n, t in checkpoint.tensors.items() if n.endswith("q_proj.weight"))
    assert kept - start < 3 * query + slack  # a query projection as read, and twice as wide
    assert cast - start < 4 * largest + slack  # as read, as cast, and two to look for overflow in
