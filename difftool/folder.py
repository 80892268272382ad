"""A new folder that appears whole or not at all, whatever happens to the process that fills it.

Work goes on in `.NAME.partial` beside the folder, under a lock on `.NAME.lock`, and a rename ends
it. What a killed process left is told from what a live one holds by the lock, which the system
drops with the process, and the next run clears it. With `force`, the old folder waits as
`.NAME.replaced` until the new one stands in its place.
"""

import fcntl
import os
import shutil
import signal
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from difftool.errors import UserError

OURS = ("config.json", "difftool.json")  # what a folder must hold one of for `force` to replace it


@contextmanager
def new_folder(out: Path, *, force: bool = False, sources: Sequence[Path] = ()) -> Iterator[Path]:
    """Yield an empty folder that becomes `out` on success and is removed on any exception.

    `force` replaces an existing `out` if it is empty or a checkpoint; it must not be, hold or lie
    in one of `sources`, nor hold the current or the home folder. SIGTERM and SIGHUP end the block
    like an exception, where nobody else handles them.
    """
    out = Path(os.path.abspath(out))  # noqa: PTH100, a symlink there must stay one
    _check_sources(out, sources)
    _check_existing(out, force)
    partial, replaced = (out.with_name(f".{out.name}.{end}") for end in ("partial", "replaced"))
    with _signals_as_exit(), _parents(out.parent), _lock(out):
        _recover(out, partial, replaced)
        _check_existing(out, force)
        try:
            with _explain(f"{partial} cannot be made"):
                partial.mkdir()
            yield partial
            _check_existing(out, force)
            _publish(partial, out, replaced)
        finally:
            _remove(partial)


def _check_sources(out: Path, sources: Sequence[Path]) -> None:
    target = out.resolve()
    for source in (path.resolve() for path in sources):
        if target == source or target in source.parents or source in target.parents:
            raise UserError(
                f"the output {out} and the source {source} are not apart",
                "an output that is not, holds or lies in its source",
                "Choose another output with -o",
            )


def _check_existing(out: Path, force: bool) -> None:
    if not os.path.lexists(out):
        return
    other = "Choose another output with -o"
    if out.is_symlink() or not out.is_dir():
        raise UserError(f"{out} exists and is a file or a symlink", fix=other)
    if not force:
        raise UserError(
            f"{out} exists", fix="Pass --force to replace it, or another output with -o"
        )
    target = out.resolve()
    for what, name in (("current", "."), ("home", "~")):
        place = Path(name).expanduser().resolve()
        if target == place or target in place.parents:
            raise UserError(f"{out} holds the {what} folder and is not replaced", fix=other)
    if any(out.iterdir()) and not any((out / name).is_file() for name in OURS):
        raise UserError(
            f"{out} does not look like a checkpoint and is not replaced",
            f"a folder with {' or '.join(OURS)}",
            other,
        )


@contextmanager
def _signals_as_exit() -> Iterator[None]:
    """Let SIGTERM and SIGHUP raise SystemExit; only in the main thread, only over the default."""

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    taken = []
    if threading.current_thread() is threading.main_thread():
        numbers = (signal.SIGTERM, signal.SIGHUP)
        taken = [number for number in numbers if signal.getsignal(number) == signal.SIG_DFL]
    for number in taken:
        signal.signal(number, leave)
    try:
        yield
    finally:
        for number in taken:
            signal.signal(number, signal.SIG_DFL)


@contextmanager
def _parents(folder: Path) -> Iterator[None]:
    """Make a folder and its parents; after an exception, remove those that were made here."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    kept = False
    try:
        with _explain(f"{folder} cannot be made"):
            folder.mkdir(parents=True, exist_ok=True)
        yield
        kept = True
    finally:
        if not kept:
            for path in missing:
                with suppress(OSError):  # never made, or someone else has put something there
                    path.rmdir()


@contextmanager
def _lock(out: Path) -> Iterator[None]:
    """Hold the lock file of `out`, and remove it at the end; a UserError if it is held."""
    path = out.with_name(f".{out.name}.lock")
    with _explain(f"{path} cannot be locked"):
        descriptor = _take(path)
    if descriptor is None:
        raise UserError(
            f"another process is writing {out}", fix="Wait for it, or choose another output with -o"
        )
    try:
        yield
    finally:
        path.unlink(missing_ok=True)  # while still locked, so that nobody takes a file that goes
        os.close(descriptor)


def _take(path: Path) -> int | None:
    """Open and lock a file, or return None; anew if its last holder removed it in between."""
    while True:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.path.samestat(os.fstat(descriptor), path.stat()):
                return descriptor
        except BlockingIOError:
            os.close(descriptor)
            return None
        except FileNotFoundError:
            pass
        except OSError:
            os.close(descriptor)
            raise
        os.close(descriptor)


def _recover(out: Path, partial: Path, replaced: Path) -> None:
    """Clear what a killed process left behind, and put back an old folder that it had moved."""
    with _explain(f"what an earlier run left beside {out} cannot be cleared"):
        _remove(partial)
        if os.path.lexists(replaced) and not os.path.lexists(out):
            replaced.rename(out)
        _remove(replaced)


def _publish(partial: Path, out: Path, replaced: Path) -> None:
    """Give the finished folder its name; the old one, if any, goes only once that is done."""
    with _explain(f"{partial} cannot be renamed to {out}"):
        try:
            if os.path.lexists(out):
                out.rename(replaced)
            partial.rename(out)
        finally:
            if os.path.lexists(replaced) and not os.path.lexists(out):
                replaced.rename(out)
    with _explain(f"the old folder, now {replaced}, cannot be removed"):
        _remove(replaced)


def _remove(path: Path) -> None:
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.exists():
        shutil.rmtree(path)


@contextmanager
def _explain(what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UserError(f"{what}: {error.strerror}") from error
