"""A checkpoint folder seen through its headers: which tensors it has, where, and their bytes.

Nothing is kept open or mapped, so memory holds one tensor at a time whatever the model's size.
torch is imported only where a tensor is read. Pickles are never opened.
"""

import hashlib
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from difftool.errors import UserError
from difftool.header import (
    DOWNLOAD_AGAIN,
    DTYPES,
    TensorInfo,
    read_header,
    size_in_bytes,
    torch_dtype,
)
from difftool.weights import find_shards, read_json

if TYPE_CHECKING:
    import torch

__all__ = [
    "Checkpoint",
    "Computed",
    "Copied",
    "Output",
    "TensorInfo",
    "fingerprint",
    "open_checkpoint",
    "read_tensor",
    "require_weights",
]

FINGERPRINT_BYTES = 64 * 1024


@dataclass(frozen=True)
class Checkpoint:
    """A folder's config and the place of every tensor; `tensors` is in the order of the bytes."""

    path: Path
    config: dict[str, Any]
    tensors: dict[str, TensorInfo]
    files: tuple[str, ...]
    index: dict[str, Any] | None
    metadata: dict[str, dict[str, str]] = field(default_factory=dict)  # of each shard file

    @property
    def complete(self) -> bool:
        """Whether the weights are there; without them only config, and perhaps an index, are."""
        return bool(self.files)

    @property
    def names(self) -> tuple[str, ...]:
        """The tensors' names, from the index where there are no weights."""
        return tuple(self.tensors or (self.index or {}).get("weight_map", ()))

    @property
    def nbytes(self) -> int:
        """The bytes of all tensors together."""
        return sum(tensor.nbytes for tensor in self.tensors.values())


@dataclass(frozen=True)
class Copied:
    """A tensor to write whose bytes are those of `source` in the file `path`."""

    source: TensorInfo
    path: Path

    @property
    def dtype(self) -> str:
        """In safetensors' spelling."""
        return self.source.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """As stored."""
        return self.source.shape

    @property
    def nbytes(self) -> int:
        """The bytes to copy."""
        return self.source.nbytes


@dataclass(frozen=True)
class Computed:
    """A tensor to write that `compute` makes when its turn comes, with this dtype and shape."""

    dtype: str
    shape: tuple[int, ...]
    compute: "Callable[[], torch.Tensor]"

    @property
    def nbytes(self) -> int:
        """The bytes that the tensor will take."""
        return size_in_bytes(self.dtype, self.shape)


Output = Copied | Computed


def open_checkpoint(path: Path) -> Checkpoint:
    """Read config, index and every shard's header; a fault in any of them is a UserError.

    A folder without weights gives a checkpoint that is not `complete`: see `require_weights`.
    """
    if not path.is_dir():
        found = "is a file, not a folder" if path.exists() else "does not exist"
        raise UserError(f"{path} {found}", "a folder with a config.json and safetensors")
    if not (path / "config.json").is_file():
        raise UserError(
            f"{path} has no config.json", "a checkpoint folder as transformers saves it"
        )
    config = read_json(path / "config.json")
    files, index = find_shards(path)
    headers = {file: read_header(path / file) for file in files}
    tensors: dict[str, TensorInfo] = {}
    for file, header in headers.items():
        for name in header.tensors.keys() & tensors.keys():
            raise UserError(
                f"tensor {name!r} is stored twice in {path}: in {tensors[name].file} and in {file}",
                fix="Remove the file that does not belong, or download the checkpoint again",
            )
        tensors |= header.tensors
    if files and not tensors:
        raise UserError(f"{path} holds no tensors: {', '.join(files)} is empty", fix=DOWNLOAD_AGAIN)
    if files and index is not None:
        _check_index(path, index["weight_map"], tensors)
    metadata = {file: header.metadata for file, header in headers.items()}
    return Checkpoint(path, config, tensors, files, index, metadata)


def require_weights(checkpoint: Checkpoint) -> None:
    """Raise a UserError if the checkpoint is only a config, perhaps with an index."""
    if not checkpoint.complete:
        raise UserError(
            f"{checkpoint.path} has a config.json but no weights",
            "model.safetensors, or the shards that model.safetensors.index.json names",
            "Download the weights too; without them only --dry-run works",
        )


def read_tensor(checkpoint: Checkpoint, name: str) -> "torch.Tensor":
    """Return one tensor, read into fresh memory; its bits are those of the file.

    Of packed 4-bit floats the last axis counts pairs, as in torch; 6-bit ones cannot be read.
    """
    import torch

    info = checkpoint.tensors[name]
    if DTYPES[info.dtype][1] is None:
        raise UserError(f"tensor {name!r} is {info.dtype}, which torch cannot hold")
    shape = info.shape
    if info.dtype == "F4":
        if not shape or shape[-1] % 2:
            raise UserError(
                f"tensor {name!r} is F4 with the shape {list(shape)}", "an even last axis"
            )
        shape = (*shape[:-1], shape[-1] // 2)
    if not info.nbytes:
        return torch.empty(shape, dtype=torch_dtype(info.dtype))
    data = torch.empty(info.nbytes, dtype=torch.uint8)
    path = checkpoint.path / info.file
    try:
        with path.open("rb") as file:
            file.seek(info.offset)
            count = file.readinto(data.numpy().data)
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror}") from error
    if count < info.nbytes:
        raise UserError(
            f"{path} ends inside tensor {name!r}: it became shorter", fix=DOWNLOAD_AGAIN
        )
    return data.view(torch_dtype(info.dtype)).reshape(shape)


def fingerprint(checkpoint: Checkpoint) -> str:
    """Return "sha256:…" over config, each shard's name, size and header, and its tensors' starts.

    At most 64 KiB of each tensor are read, so this is fast and tells checkpoints apart, but it is
    no proof against a change deep inside a tensor.
    """
    digest = hashlib.sha256(json.dumps(checkpoint.config, sort_keys=True).encode())
    if not checkpoint.complete:
        digest.update(json.dumps(checkpoint.index, sort_keys=True).encode())
    for name in checkpoint.files:
        path = checkpoint.path / name
        raw = read_header(path).raw
        digest.update(f"\n{name} {path.stat().st_size} {len(raw)}\n".encode() + raw)
        with path.open("rb") as file:
            for tensor in checkpoint.tensors.values():
                if tensor.file == name:
                    file.seek(tensor.offset)
                    digest.update(file.read(min(tensor.nbytes, FINGERPRINT_BYTES)))
    return f"sha256:{digest.hexdigest()}"


def _check_index(path: Path, weight_map: dict[str, str], tensors: dict[str, TensorInfo]) -> None:
    """Check that the index and the shards' headers put the same tensors in the same files."""
    for name, file in weight_map.items():
        if name not in tensors or tensors[name].file != file:
            where = f"; it lies in {tensors[name].file}" if name in tensors else ""
            raise UserError(
                f"the index of {path} puts tensor {name!r} into {file}, which lacks it{where}",
                fix=f"Download {file} and the index again, from one revision",
            )
    for name in tensors.keys() - weight_map.keys():
        raise UserError(
            f"tensor {name!r} lies in {tensors[name].file} of {path} but not in the index",
            fix="Download the shards and the index again, from one revision",
        )
