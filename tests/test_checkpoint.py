"""Opening and reading checkpoints: as safetensors' own library does, or an error that says why."""

import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from difftool.checkpoint import fingerprint, open_checkpoint, read_tensor, require_weights
from difftool.errors import UserError

CONFIG = {"model_type": "llama", "hidden_size": 4}
ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"
INDEX = "model.safetensors.index.json"


def write_config(folder: Path) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(CONFIG))
    return folder


def write_index(folder: Path, weight_map: dict[str, Any]) -> None:
    text = json.dumps({"metadata": {"total_size": 1}, "weight_map": weight_map})
    (folder / INDEX).write_text(text)


def write_sharded(folder: Path) -> Path:
    write_config(folder)
    save_file({"a": torch.ones(2, 3), "b": torch.zeros(2)}, folder / ONE, {"format": "pt"})
    save_file({"c": torch.arange(4.0)}, folder / TWO)
    write_index(folder, {"a": ONE, "b": ONE, "c": TWO})
    return folder


def write_raw(folder: Path, header: object, data: bytes = b"") -> Path:
    """Write model.safetensors from a header given as JSON, text or bytes."""
    write_config(folder)
    text = header if isinstance(header, str | bytes) else json.dumps(header)
    raw = text if isinstance(text, bytes) else text.encode()
    (folder / "model.safetensors").write_bytes(len(raw).to_bytes(8, "little") + raw + data)
    return folder


def entry(dtype: str, shape: list[Any], start: Any, end: Any) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}


def refused(folder: Path, *words: str) -> None:
    with pytest.raises(UserError) as caught:
        open_checkpoint(folder)
    for word in words:
        assert word in str(caught.value)


def test_every_dtype_and_shape_is_read_as_safetensors_reads_it(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    dtypes = "float64 float32 float16 bfloat16 int64 int32 int16 int8 uint8 bool complex64 uint16 "
    dtypes += "uint32 uint64 float8_e4m3fn float8_e5m2 float8_e8m0fnu float4_e2m1fn_x2"
    tensors = {"scalar": torch.tensor(1.5), "empty": torch.empty(0, 3), "one_empty": torch.empty(0)}
    for name in dtypes.split():
        dtype = getattr(torch, name)
        high = 2 if dtype == torch.bool else 256
        data = torch.randint(high, (2, 3, 8), dtype=torch.uint8, generator=generator)
        tensors[name] = data.view(dtype)
    write_config(tmp_path)
    save_file(tensors, tmp_path / "model.safetensors")
    checkpoint = open_checkpoint(tmp_path)
    with safe_open(tmp_path / "model.safetensors", "pt") as stored:
        assert set(stored.keys()) == set(checkpoint.names)
        for name in stored.keys():  # noqa: SIM118, it has no __iter__
            expected, read = stored.get_tensor(name), read_tensor(checkpoint, name)
            assert read.dtype == expected.dtype
            assert read.shape == expected.shape
            assert bits(read) == bits(expected)


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def test_shards_without_format_and_a_wrong_total_size_are_accepted(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_sharded(tmp_path))
    assert checkpoint.complete
    assert checkpoint.files == (ONE, TWO)
    assert checkpoint.nbytes == 4 * (6 + 2 + 4)
    assert checkpoint.metadata == {ONE: {"format": "pt"}, TWO: {}}
    assert torch.equal(read_tensor(checkpoint, "c"), torch.arange(4.0))


def test_a_lone_file_of_any_name_and_a_set_without_an_index_are_found(tmp_path: Path) -> None:
    write_config(tmp_path)
    save_file({"a": torch.ones(1)}, tmp_path / "weights.safetensors")
    (tmp_path / "._weights.safetensors").write_bytes(b"left by another system")
    assert open_checkpoint(tmp_path).files == ("weights.safetensors",)
    (tmp_path / "weights.safetensors").rename(tmp_path / ONE)
    refused(tmp_path, "lacks the shard", TWO)
    save_file({"b": torch.ones(1)}, tmp_path / TWO)
    assert open_checkpoint(tmp_path).files == (ONE, TWO)
    save_file({"c": torch.ones(1)}, tmp_path / "other.safetensors")
    refused(tmp_path, "ambiguous", "other.safetensors")


def test_links_that_leave_the_folder_are_followed_as_in_a_hub_cache(tmp_path: Path) -> None:
    blobs = write_sharded(tmp_path / "blobs")
    snapshot = tmp_path / "snapshot"
    snapshot.mkdir()
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(Path("..") / "blobs" / file.name)
    assert torch.equal(read_tensor(open_checkpoint(snapshot), "a"), torch.ones(2, 3))
    (blobs / TWO).unlink()
    refused(snapshot, "lacks the shard", TWO)


def test_a_folder_without_weights_gives_the_names_of_its_index(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_config(tmp_path))
    assert not checkpoint.complete
    assert checkpoint.names == ()
    write_index(tmp_path, {"a": ONE, "b": TWO})
    checkpoint = open_checkpoint(tmp_path)
    assert not checkpoint.complete
    assert checkpoint.tensors == {}
    assert checkpoint.names == ("a", "b")
    with pytest.raises(UserError, match="no weights"):
        require_weights(checkpoint)
    assert fingerprint(checkpoint).startswith("sha256:")


def test_a_path_that_is_no_checkpoint_folder_is_refused(tmp_path: Path) -> None:
    refused(tmp_path / "missing", "does not exist")
    refused(tmp_path, "no config.json")
    (tmp_path / "file").touch()
    refused(tmp_path / "file", "is a file")


def test_a_broken_config_is_refused_with_its_line(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text('{\n"a": 1,\n}')
    refused(tmp_path, "config.json is not valid JSON", "line 3")
    for text in ("[1]", "[" * 100_000, '{"a": ' + "1" * 5000 + "}"):
        config.write_text(text)
        refused(tmp_path, "config.json")
    config.write_bytes(b'{"a": "\xff"}')
    refused(tmp_path, "config.json is not valid JSON")


def test_a_truncated_shard_is_refused_wherever_it_ends(tmp_path: Path) -> None:
    write_sharded(tmp_path)
    whole = (tmp_path / ONE).read_bytes()
    for size in (0, 4, 8, 40, len(whole) - 1):
        (tmp_path / ONE).write_bytes(whole[:size])
        refused(tmp_path, ONE, "truncated", "Download")
    refused(tmp_path, "'b'")
    (tmp_path / ONE).write_bytes(whole + b"x")
    refused(tmp_path, ONE, "1 bytes after its last tensor")


def test_a_git_lfs_pointer_is_named_as_such(tmp_path: Path) -> None:
    write_config(tmp_path)
    (tmp_path / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n")
    refused(tmp_path, "git lfs pull")


BAD_HEADERS = {
    "not JSON": ("{", b""),
    "not UTF-8": (b'{"\xff": {}}', b""),
    "no object": ("[]", b""),
    "leading space": (" {}", b""),
    "deep": ('{"a":' * 50_000, b""),
    "entry no object": ({"a": 1}, b""),
    "no offsets": ({"a": {"dtype": "U8", "shape": []}}, b"1"),
    "unknown dtype": ({"a": entry("F7", [1], 0, 1)}, b"1"),
    "dtype no string": ({"a": entry([], [1], 0, 1)}, b"1"),  # type: ignore[arg-type]
    "negative size": ({"a": entry("U8", [-1, -1], 0, 1)}, b"1"),
    "size no integer": ({"a": entry("U8", [1.0], 0, 1)}, b"1"),
    "size a boolean": ({"a": entry("U8", [True], 0, 1)}, b"1"),
    "huge empty shape": ({"a": entry("U8", [2**70, 0], 0, 0)}, b""),
    "wrong size": ({"a": entry("F32", [2], 0, 4)}, b"1234"),
    "reversed": ({"a": entry("U8", [1], 1, 0)}, b"1"),
    "three offsets": ({"a": entry("U8", [1], 0, 1) | {"data_offsets": [0, 1, 1]}}, b"1"),
    "half a byte": ({"a": entry("F4", [3], 0, 1)}, b"1"),
    "gap": ({"a": entry("U8", [1], 0, 1), "b": entry("U8", [1], 2, 3)}, b"123"),
    "overlap": ({"a": entry("U8", [2], 0, 2), "b": entry("U8", [2], 1, 3)}, b"123"),
    "late start": ({"a": entry("U8", [1], 1, 2)}, b"12"),
    "metadata no strings": ({"__metadata__": {"a": 1}, "b": entry("U8", [1], 0, 1)}, b"1"),
    "lone surrogate": ('{"\\ud800":' + json.dumps(entry("U8", [1], 0, 1)) + "}", b"1"),
    "twice": ('{"a":' + json.dumps(entry("U8", [1], 0, 1)) + ',"a":{}}', b"1"),
    "no tensors": ("{}", b""),
}


@pytest.mark.parametrize("case", BAD_HEADERS)
def test_a_corrupt_header_is_refused(tmp_path: Path, case: str) -> None:
    header, data = BAD_HEADERS[case]
    refused(write_raw(tmp_path, header, data), "model.safetensors")


def test_a_header_that_claims_gigabytes_is_refused_unread(tmp_path: Path) -> None:
    write_config(tmp_path)
    with (tmp_path / "model.safetensors").open("wb") as file:
        file.write((2**30).to_bytes(8, "little"))
        file.truncate(2**31)
    refused(tmp_path, "corrupt", "1,073,741,824")


def test_an_index_that_names_a_missing_shard_is_refused(tmp_path: Path) -> None:
    write_sharded(tmp_path)
    (tmp_path / TWO).unlink()
    refused(tmp_path, "lacks the shard", TWO)
    (tmp_path / ONE).rename(tmp_path / "renamed.safetensors")
    refused(tmp_path, "lacks the shard", ONE)


def test_an_index_that_disagrees_with_the_shards_is_refused(tmp_path: Path) -> None:
    write_sharded(tmp_path)
    write_index(tmp_path, {"a": ONE, "b": ONE, "c": TWO, "d": TWO})
    refused(tmp_path, "'d'", TWO, "lacks it")
    write_index(tmp_path, {"a": ONE, "b": ONE, "c": ONE, "d": TWO})
    refused(tmp_path, "'c'", f"lies in {TWO}")
    write_index(tmp_path, {"a": ONE, "c": TWO})
    refused(tmp_path, "'b'", "not in the index")


def test_a_tensor_stored_twice_is_refused(tmp_path: Path) -> None:
    write_sharded(tmp_path)
    save_file({"c": torch.arange(4.0), "a": torch.ones(2, 3)}, tmp_path / TWO)
    refused(tmp_path, "'a'", "twice", ONE, TWO)
    (tmp_path / INDEX).write_text(f'{{"weight_map": {{"a": "{ONE}", "a": "{TWO}"}}}}')
    refused(tmp_path, "'a'", "twice")


@pytest.mark.parametrize(
    "name",
    [
        "../x.safetensors",
        "/x.safetensors",
        "sub/x.safetensors",
        "a\\x.safetensors",
        "C:x.safetensors",
        "x\x00.safetensors",
        "..",
        "",
        7,
        None,
        "pytorch_model.bin",
    ],
)
def test_an_index_may_name_only_plain_safetensors_files(tmp_path: Path, name: Any) -> None:
    write_sharded(tmp_path)
    write_index(tmp_path, {"a": name})
    refused(tmp_path, INDEX, "'a'")


def test_an_index_without_a_weight_map_is_refused(tmp_path: Path) -> None:
    write_sharded(tmp_path)
    for text in ("{}", '{"weight_map": []}', '{"weight_map": {}}', "[]", "{"):
        (tmp_path / INDEX).write_text(text)
        refused(tmp_path, INDEX)


def test_one_file_beside_an_index_of_others_is_ambiguous(tmp_path: Path) -> None:
    write_sharded(tmp_path)
    save_file({"a": torch.ones(1)}, tmp_path / "model.safetensors")
    refused(tmp_path, "ambiguous")
    write_index(tmp_path, {"a": "model.safetensors"})
    assert open_checkpoint(tmp_path).files == ("model.safetensors",)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "x.pth", "last.ckpt"])
def test_pickles_are_never_opened(tmp_path: Path, name: str) -> None:
    write_config(tmp_path)
    (tmp_path / "training_args.bin").write_bytes(b"not weights")
    assert not open_checkpoint(tmp_path).complete
    os.mkfifo(tmp_path / name)  # opening it would block for ever
    refused(tmp_path, "pickle", name, "save_pretrained")
    save_file({"a": torch.ones(1)}, tmp_path / "model.safetensors")
    assert open_checkpoint(tmp_path).names == ("a",)


def test_an_adapter_alone_is_no_checkpoint(tmp_path: Path) -> None:
    write_config(tmp_path)
    save_file({"a": torch.ones(1)}, tmp_path / "adapter_model.safetensors")
    refused(tmp_path, "adapter", "merge")


def test_the_fingerprint_sees_config_names_and_bytes(tmp_path: Path) -> None:
    write_sharded(tmp_path)
    first = fingerprint(open_checkpoint(tmp_path))
    assert re.fullmatch("sha256:[0-9a-f]{64}", first)
    assert fingerprint(open_checkpoint(tmp_path)) == first
    save_file({"c": torch.arange(4.0) + 1}, tmp_path / TWO)
    second = fingerprint(open_checkpoint(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert len({first, second, fingerprint(open_checkpoint(tmp_path))}) == 3


def test_a_file_that_shrinks_after_it_was_opened_is_noticed(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_sharded(tmp_path))
    os.truncate(tmp_path / TWO, checkpoint.tensors["c"].offset + 4)
    with pytest.raises(UserError, match="became shorter"):
        read_tensor(checkpoint, "c")


def test_damaged_headers_give_an_error_or_what_safetensors_reads(tmp_path: Path) -> None:
    write_config(tmp_path)
    path = tmp_path / "model.safetensors"
    tensors = {"a": torch.arange(6).reshape(2, 3), "b": torch.ones(4).half(), "c": torch.ones(())}
    save_file(tensors, path, {"format": "pt"})
    whole = path.read_bytes()
    end = 8 + int.from_bytes(whole[:8], "little")
    chooser = random.Random(0)
    accepted = 0
    for _ in range(1500):
        damaged = bytearray(whole)
        for _ in range(chooser.choice((1, 1, 2, 4))):
            damaged[chooser.randrange(end)] = chooser.choice(b'0123456789-.,:{}[]"\\ abU\0\xff')
        path.write_bytes(damaged)
        accepted += agrees_with_safetensors(tmp_path, path)
    assert accepted > 20


def agrees_with_safetensors(folder: Path, path: Path) -> bool:
    try:
        checkpoint = open_checkpoint(folder)
    except UserError:
        return False
    try:
        with safe_open(path, "pt") as stored:
            assert set(stored.keys()) == set(checkpoint.names)
            assert (stored.metadata() or {}) == checkpoint.metadata[path.name]
            for name in stored.keys():  # noqa: SIM118, it has no __iter__
                expected, read = stored.get_tensor(name), read_tensor(checkpoint, name)
                assert expected.shape == read.shape
                assert bits(expected) == bits(read)
    except SafetensorError as error:
        pytest.fail(f"accepted what safetensors refuses: {error}")
    return True


def test_checkpoints_are_opened_without_torch(tmp_path: Path) -> None:
    write_sharded(tmp_path)
    code = "import sys; from pathlib import Path; from difftool.checkpoint import open_checkpoint; "
    code += f"open_checkpoint(Path({str(tmp_path)!r})); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
