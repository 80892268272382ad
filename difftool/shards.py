"""Planning and writing the shards of a checkpoint, tensor by tensor.

A plan is pure: which file holds what, in how many bytes. Writing streams, so memory holds at most
the tensors that are being computed, one for each of the `WRITERS` files that are written at a time.
Files that come out as they were are copied or linked whole.
"""

import json
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from threading import Event, Lock
from typing import Literal

from difftool.checkpoint import Checkpoint, Computed, Copied, Output
from difftool.errors import UserError
from difftool.header import DTYPES, build_header, dtype_name
from difftool.transfer import (
    How,
    Progress,
    check_space,
    copy_range,
    explain_write_errors,
    is_finite,
    reflink,
    transfer_file,
    write_all,
)
from difftool.weights import INDEX, SINGLE, is_plain_name

Way = Literal["write", "copy", "reflink", "link"]
WRITERS = 2  # files at a time: the kernel copies on the core that asks, slower than a disk can
INDEX_ROOM = 200  # bytes of the index that a tensor takes at most, roughly


@dataclass(frozen=True)
class ShardFile:
    """One file to write: its tensors in their order and, if it is a source file whole, which."""

    name: str
    outputs: Mapping[str, Output]
    metadata: Mapping[str, str]
    unchanged: Path | None
    header_size: int

    @property
    def nbytes(self) -> int:
        """The bytes of the whole file."""
        return self.header_size + sum(output.nbytes for output in self.outputs.values())


@dataclass(frozen=True)
class ShardPlan:
    """The files of a checkpoint's weights, and whether an index stands beside them."""

    files: tuple[ShardFile, ...]
    has_index: bool

    @property
    def total_size(self) -> int:
        """The bytes of all tensors, as the index counts them."""
        return sum(output.nbytes for file in self.files for output in file.outputs.values())

    @property
    def weight_map(self) -> dict[str, str]:
        """The file of every tensor, as the index lists them."""
        return dict(sorted((name, file.name) for file in self.files for name in file.outputs))


def plan_shards(
    outputs: Mapping[str, Output],
    source: Checkpoint,
    *,
    shard_of: Mapping[str, str] | None = None,
    shard_size: int | None = None,
) -> ShardPlan:
    """Decide which file holds which output; reads and writes nothing.

    By default a tensor goes to the file named in `shard_of`, else to the file that its source lay
    in, else (computed) beside the output before it. With `shard_size`, the tensors are packed anew,
    in order, into files of at most so many bytes of tensors, a larger tensor alone, named as on the
    Hub. A lone file without an index is always model.safetensors, so that transformers finds it.
    """
    if shard_size is None:
        groups = _keep_files(outputs, source, shard_of or {})
    else:
        groups = _pack(outputs, shard_size)
    has_index = len(groups) > 1 or source.index is not None
    if not has_index:
        groups = {SINGLE: dict(outputs)}
    files = (_plan_file(name, group, source) for name, group in groups.items())
    return ShardPlan(tuple(files), has_index)


def write_shards(
    folder: Path,
    plan: ShardPlan,
    *,
    how: How = "reflink",
    progress: Progress = lambda _: None,
    check_finite: bool = True,
) -> dict[str, Way]:
    """Write the plan's files, and its index, into an existing folder; return how each file came.

    `how` is for files that do not change; `progress` is called, by one thread at a time, with
    numbers of bytes that add up to those of all files. A NaN or infinity in a float tensor is a
    UserError, save in files that were linked or reflinked, whose bytes are not read. After an error
    the folder holds partial files.
    """
    ways: dict[str, Way] = {}
    for file in plan.files:
        target = folder / file.name
        if file.unchanged and how == "link":
            ways[file.name] = transfer_file(file.unchanged, target, "link")
        elif file.unchanged and how == "reflink" and reflink(file.unchanged, target):
            ways[file.name] = "reflink"
    rest = [file for file in plan.files if file.name not in ways]
    check_space(folder, sum(file.nbytes for file in rest) + INDEX_ROOM * len(plan.weight_map))
    for file in plan.files:
        if file.name in ways:
            progress(file.nbytes)
    _write_files(folder, rest, progress, check_finite)
    ways |= {file.name: "copy" if file.unchanged else "write" for file in rest}
    if plan.has_index:
        _write_index(folder / INDEX, plan)
    return ways


def _keep_files(
    outputs: Mapping[str, Output], source: Checkpoint, shard_of: Mapping[str, str]
) -> dict[str, dict[str, Output]]:
    groups: dict[str, dict[str, Output]] = {file: {} for file in source.files}
    file = source.files[0] if source.files else SINGLE
    for name, output in outputs.items():
        if name in shard_of:
            file = shard_of[name]
        elif isinstance(output, Copied):
            file = output.source.file
        assert is_plain_name(file), file
        groups.setdefault(file, {})[name] = output
    return {file: group for file, group in groups.items() if group}


def _pack(outputs: Mapping[str, Output], shard_size: int) -> dict[str, dict[str, Output]]:
    packed: list[dict[str, Output]] = []
    room = 0
    for name, output in outputs.items():
        if not packed or output.nbytes > room:
            packed.append({})
            room = shard_size
        packed[-1][name] = output
        room -= output.nbytes
    count = len(packed)
    names = (f"model-{number:05}-of-{count:05}.safetensors" for number in range(1, count + 1))
    return dict(zip(names, packed, strict=True))


def _plan_file(name: str, outputs: dict[str, Output], source: Checkpoint) -> ShardFile:
    files = sorted({out.source.file for out in outputs.values() if isinstance(out, Copied)})
    metadata: dict[str, str] = {}
    for file in files:
        metadata |= source.metadata.get(file, {})
    if metadata.get("format") == "pt" and len(files) == 1:
        stored = [tensor for tensor in source.tensors.values() if tensor.file == files[0]]
        whole = {tensor.name: Copied(tensor, source.path / files[0]) for tensor in stored}
        if outputs == whole:
            return ShardFile(name, whole, metadata, source.path / files[0], stored[0].offset)
    # Widest elements first keeps every tensor aligned to its own, as readers that map files need.
    widest_first = dict(sorted(outputs.items(), key=lambda item: -DTYPES[item[1].dtype][0]))
    metadata["format"] = "pt"
    entries = {name: (output.dtype, output.shape) for name, output in widest_first.items()}
    return ShardFile(name, widest_first, metadata, None, len(build_header(entries, metadata)))


class _StoppedError(Exception):
    """Ends the writing of a file when another one has failed."""


def _write_files(
    folder: Path, files: Iterable[ShardFile], progress: Progress, check_finite: bool
) -> None:
    stop, turn = Event(), Lock()

    def count(nbytes: int) -> None:
        if stop.is_set():
            raise _StoppedError
        with turn:
            progress(nbytes)

    def write(file: ShardFile) -> None:
        with explain_write_errors(folder / file.name, file.nbytes):
            _write_file(folder / file.name, file, count, check_finite)

    with ThreadPoolExecutor(WRITERS) as pool:
        futures = [pool.submit(write, file) for file in files]
        try:
            for future in as_completed(futures):
                future.result()
        finally:  # one failed, or the user stopped it all
            stop.set()
            for future in futures:
                future.cancel()


def _write_file(path: Path, file: ShardFile, progress: Progress, check_finite: bool) -> None:
    with FileIO(path, "x") as target:
        if file.unchanged:
            copy_range(file.unchanged, 0, file.header_size, target, progress=progress)
        else:
            entries = {name: (output.dtype, output.shape) for name, output in file.outputs.items()}
            write_all(target, build_header(entries, file.metadata))
            progress(file.header_size)
        for name, output in file.outputs.items():
            if not _write_output(target, name, output, progress, check_finite):
                where = output.path if isinstance(output, Copied) else f"the new {file.name}"
                raise UserError(
                    f"tensor {name!r} of {where} holds NaN or infinite values",
                    "finite weights",
                    "Download the source again, or take another revision of it",
                )


def _write_output(
    target: FileIO, name: str, output: Output, progress: Progress, check_finite: bool
) -> bool:
    dtype = output.dtype if check_finite else ""
    if isinstance(output, Copied):
        place = output.source
        return copy_range(
            output.path, place.offset, place.nbytes, target, dtype=dtype, progress=progress
        )
    return _write_computed(target, name, output, progress, dtype)


def _write_computed(
    target: FileIO, name: str, output: Computed, progress: Progress, dtype: str
) -> bool:
    import torch

    tensor = output.compute().detach().cpu()
    made = dtype_name(tensor.dtype), tuple(tensor.shape)
    assert made == (output.dtype, output.shape), f"{name} is {made}, not as promised {output}"
    data = tensor.contiguous().reshape(-1).view(torch.uint8).numpy()
    if not is_finite(data, dtype):
        return False
    write_all(target, data.data)
    progress(output.nbytes)
    return True


def _write_index(path: Path, plan: ShardPlan) -> None:
    index = {"metadata": {"total_size": plan.total_size}, "weight_map": plan.weight_map}
    text = json.dumps(index, indent=2, ensure_ascii=False).encode() + b"\n"
    with explain_write_errors(path, len(text)), FileIO(path, "x") as file:
        write_all(file, text)
