"""Bytes from file to file: checked for NaN on the way, or copied, reflinked or linked whole."""

import errno
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from io import BufferedReader, FileIO
from pathlib import Path
from typing import Any, Literal

import numpy as np

from difftool.errors import UserError
from difftool.header import DOWNLOAD_AGAIN

How = Literal["copy", "reflink", "link"]
Progress = Callable[[int], None]
Block = np.ndarray[Any, np.dtype[np.uint8]]

FICLONE = 0x40049409  # linux/fs.h: share the source's blocks, copy on write
CHECKED_BLOCK = 2**20  # small enough for the processor's cache, as it is gone over twice
KERNEL_BLOCK = 2**22  # soon checked, so that a tensor's last check does not hold up the next one
NOT_IN_KERNEL = (errno.EXDEV, errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP, errno.EPERM)
# dtype -> bytes of a float, and the bits of the smallest magnitude that is not finite
NOT_FINITE = {
    "F8_E4M3": (1, 0x7F),
    "F8_E5M2": (1, 0x7C),
    "F16": (2, 0x7C00),
    "BF16": (2, 0x7F80),
    "F32": (4, 0x7F800000),
    "C64": (4, 0x7F800000),
    "F64": (8, 0x7FF0000000000000),
}


def is_finite(block: Block, dtype: str) -> bool:
    """Whether a block of bytes holds neither NaN nor infinity, read as floats of `dtype`.

    Bit patterns of one sign are ordered like the floats' magnitudes, so the largest signed integer
    stands for the largest positive float, and the largest unsigned one for the largest negative.
    Other dtypes count as finite.
    """
    if dtype not in NOT_FINITE or not block.size:
        return True
    width, limit = NOT_FINITE[dtype]
    negative_limit = limit + (1 << (8 * width - 1))
    largest = block.view(f"<i{width}").max()
    largest_unsigned = block.view(f"<u{width}").max()
    return bool(largest < limit and largest_unsigned < negative_limit)


def copy_range(
    source: Path, offset: int, nbytes: int, target: FileIO, *, dtype: str = "", progress: Progress
) -> bool:
    """Copy bytes of `source` to where `target` stands; return False if one float is not finite.

    The kernel copies where it can. Of a float `dtype`, a second thread then reads the bytes once
    more, from memory, and checks them while the kernel copies on.
    """
    block = np.empty(min(nbytes, CHECKED_BLOCK), np.uint8)
    finite: Future[bool] | None = None
    with source.open("rb") as file, ThreadPoolExecutor(1) as checker:
        for done in range(0, nbytes, KERNEL_BLOCK):
            count = min(KERNEL_BLOCK, nbytes - done)
            copied = _copy_in_kernel(file.fileno(), target, offset + done, count)
            if finite and not finite.result():
                return False
            if dtype in NOT_FINITE or copied < count:
                blocks = _read_blocks(source, file, offset + done, count, block)
                finite = checker.submit(_check_blocks, blocks, dtype, target, copied)
                if copied < count and not finite.result():  # the next block comes after this one
                    return False
            progress(count)
    return finite is None or finite.result()


def _check_blocks(
    blocks: Iterator[tuple[int, Block]], dtype: str, target: FileIO, copied: int
) -> bool:
    """Return whether all blocks are finite; write what lies behind the first `copied` bytes."""
    for place, block in blocks:
        if not is_finite(block, dtype):
            return False
        write_all(target, block.data[max(copied - place, 0) :])
    return True


def _read_blocks(
    source: Path, file: BufferedReader, offset: int, nbytes: int, block: Block
) -> Iterator[tuple[int, Block]]:
    """Yield the bytes from `offset` on, with their place after it, in one block used over again."""
    file.seek(offset)
    for place in range(0, nbytes, block.size):
        part = block[: nbytes - place]
        if file.readinto(part.data) < part.size:
            raise UserError(f"{source} became shorter while it was read", fix=DOWNLOAD_AGAIN)
        yield place, part


def write_all(target: FileIO, data: memoryview | bytes) -> None:
    """Write every byte; one call to the system writes at most 2 GiB."""
    rest = memoryview(data)
    while rest:
        rest = rest[target.write(rest) :]


def transfer_file(source: Path, target: Path, how: How) -> How:
    """Make `target` a whole copy of `source`, and return which way that was done.

    "reflink" falls back to "copy" where the file system cannot; "link" is a hard link to the file
    behind any symlinks, or a UserError.
    """
    if how == "link":
        _hard_link(source, target)
        return "link"
    if how == "reflink" and reflink(source, target):
        return "reflink"
    size = source.stat().st_size
    with explain_write_errors(target, size), FileIO(target, "x") as file:
        copy_range(source, 0, size, file, progress=lambda _: None)
    return "copy"


def reflink(source: Path, target: Path) -> bool:
    """Let `target` share the blocks of `source`; False, and no file, where that is impossible."""
    with source.open("rb") as file, explain_write_errors(target, 0), target.open("xb") as copy:
        try:
            fcntl.ioctl(copy.fileno(), FICLONE, file.fileno())
        except OSError:  # whatever the reason, a plain copy is next and reports what persists
            target.unlink()
            return False
    return True


def check_space(folder: Path, needed: int) -> None:
    """Raise a UserError if the disk of `folder`, which need not exist yet, lacks the bytes."""
    existing = next(parent for parent in (folder, *folder.absolute().parents) if parent.exists())
    free = shutil.disk_usage(existing).free
    if free < needed:
        raise UserError(
            f"{folder} needs {needed:,} bytes but its disk has {free:,} free",
            fix="Free some space, or write to another disk",
        )


@contextmanager
def explain_write_errors(target: Path, needed: int) -> Iterator[None]:
    """Turn what the system says while `target` is written into a UserError."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            free = shutil.disk_usage(target.parent).free
            raise UserError(
                f"the disk is full while writing {target}: {free:,} bytes free, {needed:,} needed",
                fix="Free some space, or write to another disk",
            ) from error
        cause = f" ({error.filename})" if error.filename not in (None, str(target)) else ""
        raise UserError(f"writing {target} failed: {error.strerror}{cause}") from error


def _copy_in_kernel(source: int, target: FileIO, offset: int, nbytes: int) -> int:
    """Return how many bytes the kernel copied; the caller does the rest."""
    done = 0
    while hasattr(os, "copy_file_range") and done < nbytes:
        try:
            copied = os.copy_file_range(source, target.fileno(), nbytes - done, offset + done)
        except OSError as error:
            if error.errno in NOT_IN_KERNEL:
                break
            raise
        if not copied:
            break
        done += copied
    return done


def _hard_link(source: Path, target: Path) -> None:
    try:
        os.link(source.resolve(), target)
    except OSError as error:
        if error.errno == errno.EXDEV:
            raise UserError(
                f"{source} and {target.parent} lie on different file systems",
                "one file system, as hard links need",
                "Leave out --link, or choose an output beside the source",
            ) from error
        raise UserError(
            f"{source} cannot be hard-linked to {target}: {error.strerror}", fix="Leave out --link"
        ) from error
