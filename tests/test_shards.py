"""Writing checkpoints: bytes kept, layout and index right, NaN and full disks noticed."""

import errno
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from difftool.checkpoint import Checkpoint, Computed, Copied, Output, open_checkpoint, read_tensor
from difftool.errors import UserError
from difftool.header import TensorInfo
from difftool.shards import plan_shards, write_shards
from difftool.transfer import check_space, is_finite, reflink, transfer_file

ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"
GENERATOR = torch.Generator().manual_seed(0)


@pytest.fixture
def source(tmp_path: Path) -> Checkpoint:
    """Two shards of mixed dtypes with an index whose total_size is wrong."""
    folder = tmp_path / "source"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    wide = torch.randn(300, 2000, generator=GENERATOR).bfloat16()
    first = {
        "wide": wide,
        "norm": torch.ones(3),
        "flag": torch.tensor([True]),
        "one": torch.ones(()),
    }
    last = {"last": torch.arange(5), "empty": torch.empty(0, 4), "half": torch.ones(3).half()}
    save_file(first, folder / ONE, {"format": "pt", "made_by": "a test"})
    save_file(last, folder / TWO)
    weight_map = dict.fromkeys(first, ONE) | dict.fromkeys(last, TWO)
    text = json.dumps({"metadata": {"total_size": 7}, "weight_map": weight_map})
    (folder / INDEX).write_text(text)
    return open_checkpoint(folder)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    folder = tmp_path / "out"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    return folder


def copies(source: Checkpoint) -> dict[str, Output]:
    return {name: Copied(info, source.path / info.file) for name, info in source.tensors.items()}


def make(tensor: torch.Tensor, dtype: str) -> Computed:
    return Computed(dtype, tuple(tensor.shape), lambda: tensor)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def stored(folder: Path) -> dict[str, tuple[str, torch.Tensor]]:
    """What safetensors' own reader finds: name -> file, tensor."""
    found = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            names = file.keys()
            found |= {name: (path.name, file.get_tensor(name)) for name in names}
    return found


def assert_same_bits(folder: Path, expected: dict[str, torch.Tensor]) -> None:
    found = stored(folder)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        written = found[name][1]
        assert (written.dtype, written.shape) == (tensor.dtype, tensor.shape)
        assert bits(written) == bits(tensor), name


def all_tensors(source: Checkpoint) -> dict[str, torch.Tensor]:
    return {name: read_tensor(source, name) for name in source.names}


def test_tensors_stay_in_their_shards_and_new_ones_come_beside_them(
    source: Checkpoint, out: Path
) -> None:
    outputs = copies(source)
    added = {
        "new": torch.randn(4, 6, generator=GENERATOR).t(),
        "scalar": torch.tensor(2.5).double(),
        "nothing": torch.empty(2, 0),
    }
    outputs["new"], outputs["scalar"] = make(added["new"], "F32"), make(added["scalar"], "F64")
    outputs["nothing"] = make(added["nothing"], "F32")
    plan = plan_shards(outputs, source, shard_of={"new": ONE, "scalar": ONE})
    ways = write_shards(out, plan)
    assert ways == {ONE: "write", TWO: "write"}  # the second lacked its format
    assert_same_bits(out, all_tensors(source) | added)
    index = json.loads((out / INDEX).read_text())
    assert index["weight_map"] == {name: file for name, (file, _) in sorted(stored(out).items())}
    assert list(index["weight_map"]) == sorted(outputs)
    assert index["weight_map"]["new"] == index["weight_map"]["nothing"] == ONE
    assert index["metadata"] == {"total_size": source.nbytes + 96 + 8}
    written = open_checkpoint(out)
    assert written.metadata == {ONE: {"format": "pt", "made_by": "a test"}, TWO: {"format": "pt"}}
    for info in written.tensors.values():
        size = read_tensor(written, info.name).element_size()
        assert info.offset % size == 0, f"{info.name} is not aligned"


def test_a_shard_that_does_not_change_is_copied_byte_for_byte(
    source: Checkpoint, out: Path
) -> None:
    counts: list[int] = []
    plan = plan_shards(copies(source), source)
    ways = write_shards(out, plan, how="copy", progress=counts.append)
    assert ways == {ONE: "copy", TWO: "write"}
    assert (out / ONE).read_bytes() == (source.path / ONE).read_bytes()
    assert sum(counts) == sum((out / name).stat().st_size for name in (ONE, TWO))
    assert sum(counts) == sum(file.nbytes for file in plan.files)


def test_renaming_or_dropping_a_tensor_changes_its_shard(source: Checkpoint, out: Path) -> None:
    outputs = copies(source)
    outputs["renamed"] = outputs.pop("wide")
    del outputs["last"]
    assert write_shards(out, plan_shards(outputs, source)) == {ONE: "write", TWO: "write"}
    expected = all_tensors(source)
    del expected["last"]
    expected["renamed"] = expected.pop("wide")
    assert_same_bits(out, expected)


def test_shards_are_linked_only_on_request(source: Checkpoint, out: Path) -> None:
    plan = plan_shards(copies(source), source)
    assert write_shards(out, plan, how="link")[ONE] == "link"
    assert (out / ONE).samefile(source.path / ONE)
    assert not (out / TWO).samefile(source.path / TWO)


def test_packing_anew_keeps_the_order_and_the_limit(source: Checkpoint, out: Path) -> None:
    plan = plan_shards(copies(source), source, shard_size=32)
    groups = [[*file.outputs] for file in plan.files]
    assert [name for group in groups for name in group] == list(source.names)
    assert ["wide"] in groups  # larger than the limit, so alone
    for file in plan.files:
        assert len(file.outputs) == 1 or sum(o.nbytes for o in file.outputs.values()) <= 32
    count = len(groups)
    names = [f"model-{n:05}-of-{count:05}.safetensors" for n in range(1, count + 1)]
    assert [file.name for file in plan.files] == names
    write_shards(out, plan)
    assert_same_bits(out, all_tensors(source))
    assert open_checkpoint(out).files == tuple(names)


def test_one_file_without_an_index_is_called_as_transformers_expects(
    tmp_path: Path, out: Path
) -> None:
    folder = tmp_path / "single"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    save_file({"a": torch.ones(2)}, folder / "weights.safetensors", {"format": "pt"})
    source = open_checkpoint(folder)
    ways = write_shards(out, plan_shards(copies(source), source), how="copy")
    assert ways == {"model.safetensors": "copy"}
    assert not (out / INDEX).exists()
    plan = plan_shards(copies(source), source, shard_size=10**9)
    assert [file.name for file in plan.files] == ["model.safetensors"]
    assert not plan.has_index


def test_packed_and_eight_bit_floats_keep_their_bytes(tmp_path: Path, out: Path) -> None:
    data = torch.arange(256, dtype=torch.uint8).reshape(16, 16)
    names = "float4_e2m1fn_x2 float8_e8m0fnu float8_e4m3fn float8_e5m2"
    tensors = {name: data.clone().view(getattr(torch, name)) for name in names.split()}
    folder = tmp_path / "packed"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    save_file(tensors, folder / "model.safetensors")
    source = open_checkpoint(folder)
    plan = plan_shards(copies(source), source)
    with pytest.raises(UserError, match=r"'float8_e[45]m"):  # every pattern, so NaN too
        write_shards(out, plan)
    (out / "model.safetensors").unlink()
    write_shards(out, plan, check_finite=False)
    assert_same_bits(out, tensors)


FLOATS = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip


@pytest.mark.parametrize("name", FLOATS)
def test_a_block_is_finite_exactly_when_torch_says_so(name: str) -> None:
    dtype = FLOATS[name]
    finite = torch.randn(1000, generator=GENERATOR).to(dtype)
    edges = [-0.0, 0.0, torch.finfo(dtype).max, torch.finfo(dtype).min, torch.finfo(dtype).tiny]
    finite[:5] = torch.tensor(edges, dtype=torch.float64).to(dtype)
    negative = -finite.double().abs()
    for values in (finite, negative.to(dtype), finite[:0]):
        assert is_finite(values.view(torch.uint8).numpy(), name)
    for bad in (float("nan"), -float("nan"), float("inf"), -float("inf")):
        spoiled = finite.clone()
        spoiled[777] = torch.tensor(bad, dtype=torch.float64).to(dtype)
        expected = bool(torch.isfinite(spoiled.double()).all())
        assert is_finite(spoiled.view(torch.uint8).numpy(), name) == expected


@pytest.mark.parametrize("position", [0, 299_999, 599_999])
def test_a_nan_anywhere_in_a_copied_tensor_is_refused(
    source: Checkpoint, out: Path, position: int
) -> None:
    with (source.path / ONE).open("r+b") as file:
        file.seek(source.tensors["wide"].offset + 2 * position)
        file.write(b"\xc0\xff")
    plan = plan_shards(copies(source), source)
    with pytest.raises(UserError, match=f"'wide' of .*{ONE} holds NaN"):
        write_shards(out, plan, how="copy")
    for begun in out.iterdir():
        begun.unlink()
    write_shards(out, plan, how="copy", check_finite=False)
    assert_same_bits(out, all_tensors(source))


def test_an_infinity_in_a_computed_tensor_is_refused(source: Checkpoint, out: Path) -> None:
    outputs = copies(source) | {"new": make(torch.tensor([1.0, -float("inf")]), "F32")}
    with pytest.raises(UserError, match=r"'new' of the new .* holds NaN or infinite"):
        write_shards(out, plan_shards(outputs, source))


@pytest.mark.parametrize("tensor", [torch.ones(3), torch.ones(2).half()])
def test_a_computed_tensor_must_be_as_promised(
    source: Checkpoint, out: Path, tensor: torch.Tensor
) -> None:
    outputs = copies(source) | {"new": Computed("F32", (2,), lambda: tensor)}
    with pytest.raises(AssertionError, match="new"):
        write_shards(out, plan_shards(outputs, source))


def test_a_source_that_shrinks_meanwhile_is_noticed(source: Checkpoint, out: Path) -> None:
    plan = plan_shards(copies(source), source)
    os.truncate(source.path / ONE, 1000)
    for check in (True, False):
        with pytest.raises(UserError, match="became shorter"):
            write_shards(out, plan, how="copy", check_finite=check)
        for begun in out.iterdir():
            begun.unlink()


def test_a_file_is_copied_or_linked_whole(source: Checkpoint, tmp_path: Path) -> None:
    alias = tmp_path / "alias"
    alias.symlink_to(source.path / ONE)
    assert transfer_file(alias, tmp_path / "copy", "copy") == "copy"
    assert transfer_file(alias, tmp_path / "clone", "reflink") in ("copy", "reflink")
    assert transfer_file(alias, tmp_path / "link", "link") == "link"
    for name in ("copy", "clone"):
        assert (tmp_path / name).read_bytes() == (source.path / ONE).read_bytes()
        assert not (tmp_path / name).samefile(source.path / ONE)
    assert (tmp_path / "link").samefile(source.path / ONE)
    assert not (tmp_path / "link").is_symlink()
    with pytest.raises(UserError, match="hard-linked"):
        transfer_file(alias, tmp_path / "link", "link")


def test_a_reflink_that_fails_leaves_no_file(source: Checkpoint, tmp_path: Path) -> None:
    cloned = reflink(source.path / ONE, tmp_path / "clone")
    assert cloned == (tmp_path / "clone").exists()


def test_too_little_space_is_noticed_before_the_first_byte(tmp_path: Path, out: Path) -> None:
    check_space(tmp_path / "not" / "yet" / "there", 1)
    with pytest.raises(UserError, match="free"):
        check_space(tmp_path / "not" / "yet" / "there", 2**60)
    huge = Copied(TensorInfo("a", "U8", (2**60,), "x.safetensors", 0, 2**60), tmp_path / "x")
    source = Checkpoint(tmp_path, {}, {}, (), None)
    with pytest.raises(UserError, match="free"):
        write_shards(out, plan_shards({"a": huge}, source))
    assert [path.name for path in out.iterdir()] == ["config.json"]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 4 MiB; where mounting is not allowed, the test is skipped."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", str(folder)]
    done = subprocess.run(mount, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"a small disk needs the right to mount one: {done.stderr.strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_that_fills_up_while_writing_is_named(source: Checkpoint, small_disk: Path) -> None:
    def fill() -> torch.Tensor:  # another program's doing, after the space was checked
        (small_disk / "other").write_bytes(bytes(2**21))
        return torch.ones(1)

    outputs: dict[str, Output] = {"new": Computed("F32", (1,), fill)}
    outputs["big"] = make(torch.ones(700_000), "F32")
    with pytest.raises(UserError, match=r"the disk is full while writing .* needed"):
        write_shards(small_disk, plan_shards(outputs, source))


def test_hard_links_across_file_systems_are_refused(source: Checkpoint, small_disk: Path) -> None:
    with pytest.raises(UserError, match="different file systems"):
        write_shards(small_disk, plan_shards(copies(source), source), how="link")
    write_shards(small_disk, plan_shards(copies(source), source), check_finite=False)
    assert_same_bits(small_disk, all_tensors(source))


def run_python(code: str, *arguments: object, check: bool = True) -> str:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    return subprocess.run(command, check=check, capture_output=True, text=True).stdout


def test_a_system_error_while_writing_is_a_user_error(source: Checkpoint, out: Path) -> None:
    code = """
import resource, signal, sys
from pathlib import Path
from difftool.checkpoint import Copied, open_checkpoint
from difftool.errors import UserError
from difftool.shards import plan_shards, write_shards
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
source = open_checkpoint(Path(sys.argv[1]))
outputs = {name: Copied(info, source.path / info.file) for name, info in source.tensors.items()}
try:
    write_shards(Path(sys.argv[2]), plan_shards(outputs, source), how="copy")
except UserError as error:
    print(error)
"""
    message = run_python(code, source.path, out)
    assert f"writing {out / ONE} failed: {os.strerror(errno.EFBIG)}" in message


def test_memory_does_not_grow_with_the_shard(tmp_path: Path, out: Path) -> None:
    folder = tmp_path / "large"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    save_file({"a": torch.ones(150, 2**20).bfloat16()}, folder / "model.safetensors")
    code = """
import resource, sys, torch
from pathlib import Path
from difftool.checkpoint import Computed, Copied, open_checkpoint
from difftool.shards import plan_shards, write_shards
source = open_checkpoint(Path(sys.argv[1]))
outputs = {name: Copied(info, source.path / info.file) for name, info in source.tensors.items()}
for number in range(10):
    outputs[str(number)] = Computed("F32", (2**22,), lambda: torch.ones(2**22))
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
write_shards(Path(sys.argv[2]), plan_shards(outputs, source))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""
    grown = int(run_python(code, folder, out)) * 1024
    assert grown < 64 * 2**20, "a 300 MB shard and ten computed tensors of 16 MB"
    with safe_open(out / "model.safetensors", "pt") as file:
        assert bool((file.get_tensor("a") == 1).all())
