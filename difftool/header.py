"""The header of a safetensors file: eight bytes of length, then JSON naming each tensor's place.

Checked as strictly as the format demands (github.com/huggingface/safetensors, "Format"), because
the offsets that it holds are trusted by everything after.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, cast

from difftool.errors import UserError

if TYPE_CHECKING:
    import torch

MAX_HEADER = 100_000_000
DOWNLOAD_AGAIN = "Download the file again"
# safetensors name -> bits an element takes, and torch's name for it (none: bytes only)
DTYPES: dict[str, tuple[int, str | None]] = {
    "BOOL": (8, "bool"),
    "F4": (4, "float4_e2m1fn_x2"),
    "F6_E2M3": (6, None),
    "F6_E3M2": (6, None),
    "U8": (8, "uint8"),
    "I8": (8, "int8"),
    "F8_E5M2": (8, "float8_e5m2"),
    "F8_E4M3": (8, "float8_e4m3fn"),
    "F8_E8M0": (8, "float8_e8m0fnu"),
    "F8_E4M3FNUZ": (8, "float8_e4m3fnuz"),
    "F8_E5M2FNUZ": (8, "float8_e5m2fnuz"),
    "I16": (16, "int16"),
    "U16": (16, "uint16"),
    "F16": (16, "float16"),
    "BF16": (16, "bfloat16"),
    "I32": (32, "int32"),
    "U32": (32, "uint32"),
    "F32": (32, "float32"),
    "C64": (64, "complex64"),
    "F64": (64, "float64"),
    "I64": (64, "int64"),
    "U64": (64, "uint64"),
}


@dataclass(frozen=True)
class TensorInfo:
    """Where a stored tensor lies: `nbytes` bytes from the absolute `offset` of the shard `file`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: str
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Header:
    """A parsed header: its tensors in the order of their bytes, and the file's own metadata."""

    tensors: dict[str, TensorInfo]
    metadata: dict[str, str]
    raw: bytes


def dtype_name(dtype: "torch.dtype") -> str:
    """Return safetensors' name of a torch dtype: ``torch.bfloat16`` is ``"BF16"``."""
    wanted = str(dtype).removeprefix("torch.")
    return next(name for name, (_, torch_name) in DTYPES.items() if torch_name == wanted)


def torch_dtype(name: str) -> "torch.dtype":
    """Return the torch dtype of safetensors' spelling; KeyError for one that torch lacks."""
    import torch

    torch_name = DTYPES[name][1]
    if torch_name is None:
        raise KeyError(name)
    return cast("torch.dtype", getattr(torch, torch_name))


def size_in_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Return how many bytes a tensor takes in a file; ValueError if its bits fill no whole byte."""
    size, rest = divmod(DTYPES[dtype][0] * math.prod(shape), 8)
    if rest:
        raise ValueError(f"shape {list(shape)} of {dtype} does not end at a whole byte")
    return size


def read_header(path: Path) -> Header:
    """Read and check the header of one shard; every fault is a UserError that names the tensor."""
    try:
        size = path.stat().st_size
        with path.open("rb") as file:
            length = _checked_length(path, file.read(8), size)
            raw = file.read(length)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    entries = _parse(path, raw)
    metadata = _checked_metadata(path, entries.pop("__metadata__", None))
    start = 8 + length
    tensors = [_tensor(path, start, name, entry) for name, entry in entries.items()]
    tensors.sort(key=lambda tensor: (tensor.offset, tensor.nbytes))
    _check_cover(path, tensors, start, size)
    return Header({tensor.name: tensor for tensor in tensors}, metadata, raw)


def build_header(
    tensors: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Mapping[str, str]
) -> bytes:
    """Return what stands before the data of `tensors` (name -> dtype, shape), stored in turn.

    Padded with spaces so that the data begin at a multiple of 64 bytes, as vector loads like it.
    """
    entries: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    end = 0
    for name, (dtype, shape) in tensors.items():
        start, end = end, end + size_in_bytes(dtype, shape)
        entries[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-(8 + len(text)) % 64)
    return len(text).to_bytes(8, "little") + text


def _checked_length(path: Path, start: bytes, size: int) -> int:
    if start == b"version ":
        raise UserError(f"{path} is a Git LFS pointer, not the weights", fix="Run 'git lfs pull'")
    length = int.from_bytes(start, "little")
    if size >= 8 and length > MAX_HEADER:
        raise _corrupt(path, f"it gives its own length as {length:,} bytes")
    if size < 8 or 8 + length > size:
        raise UserError(f"{path} is truncated: it ends inside its header", fix=DOWNLOAD_AGAIN)
    return length


def _corrupt(path: Path, why: str) -> UserError:
    return UserError(f"the header of {path} is corrupt: {why}", fix=DOWNLOAD_AGAIN)


def _parse(path: Path, raw: bytes) -> dict[str, Any]:
    try:
        entries = json.loads(
            raw.decode(),
            object_pairs_hook=unique_keys,
            parse_int=_parse_natural,
            parse_float=_refuse_number,
            parse_constant=_refuse_number,
        )
    except (ValueError, RecursionError) as error:
        raise _corrupt(path, str(error)) from error
    if not raw.startswith(b"{"):
        raise _corrupt(path, "it is not a JSON object")
    assert isinstance(entries, dict)
    return entries


def unique_keys(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Build a JSON object; ValueError on a repeated key or an unpaired surrogate."""
    entries: dict[str, Any] = {}
    for key, value in pairs:
        if key in entries:
            raise ValueError(f"the name {key!r} stands in it twice")
        entries[key] = value
        (key + value if isinstance(value, str) else key).encode()
    return entries


def _parse_natural(text: str) -> int:
    return _refuse_number(text) if text.startswith("-") else int(text)


def _refuse_number(text: str) -> NoReturn:
    raise ValueError(f"{text} is not a natural number")


def _checked_metadata(path: Path, metadata: object) -> dict[str, str]:
    if metadata is None:
        return {}
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise _corrupt(path, "its __metadata__ is not a table of strings")
    return metadata


def _tensor(path: Path, start: int, name: str, entry: object) -> TensorInfo:
    """Check one entry on its own; whether the entries fit together is `_check_cover`'s part."""
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise _corrupt(path, f"tensor {name!r} lacks a dtype, shape or data_offsets")
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise _corrupt(path, f"tensor {name!r} has the unknown dtype {dtype!r}")
    if not _are_naturals(shape) or math.prod(size or 1 for size in shape) >= 2**60:
        raise _corrupt(path, f"tensor {name!r} has the shape {shape!r}")
    if not _are_naturals(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise _corrupt(path, f"tensor {name!r} has the data_offsets {offsets!r}")
    try:
        nbytes = size_in_bytes(dtype, tuple(shape))
    except ValueError as error:
        raise _corrupt(path, f"tensor {name!r}: {error}") from error
    if nbytes != offsets[1] - offsets[0]:
        found = f"{offsets[1] - offsets[0]:,} bytes stand for {dtype} of shape {shape}, which takes"
        raise _corrupt(path, f"tensor {name!r}: {found} {nbytes:,}")
    return TensorInfo(name, dtype, tuple(shape), path.name, start + offsets[0], nbytes)


def _are_naturals(values: object) -> bool:
    # JSON's numbers are naturals already (`_parse_natural`); True is an int to Python, not here
    return isinstance(values, list) and all(type(value) is int for value in values)


def _check_cover(path: Path, tensors: list[TensorInfo], start: int, size: int) -> None:
    """Check that the tensors, in order, cover the file from `start` to its end without a gap."""
    end = start
    for tensor in tensors:
        if tensor.offset != end:
            fault = (
                "overlaps the tensor before it" if tensor.offset < end else "leaves a gap before it"
            )
            raise _corrupt(path, f"tensor {tensor.name!r} {fault}")
        end += tensor.nbytes
    if size < end:
        lost = next(tensor.name for tensor in tensors if tensor.offset + tensor.nbytes > size)
        found = f"{path} is truncated: {size:,} bytes where its header needs {end:,}"
        raise UserError(
            f"{found}; tensor {lost!r} is the first that is not whole", fix=DOWNLOAD_AGAIN
        )
    if size > end:
        raise UserError(
            f"{path} has {size - end:,} bytes after its last tensor that its header does not know",
            fix=DOWNLOAD_AGAIN,
        )
