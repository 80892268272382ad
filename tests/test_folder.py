"""A new folder is whole or absent: after errors, signals and kills, and beside other processes."""

import os
import random
import signal
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from difftool.errors import UserError
from difftool.folder import new_folder

# Fills the folder from a checkpoint as a command would; says when it has begun.
WRITER = """
import sys
from pathlib import Path
from difftool.checkpoint import Copied, open_checkpoint
from difftool.folder import new_folder
from difftool.shards import plan_shards, write_shards
source, out = Path(sys.argv[1]), Path(sys.argv[2])
checkpoint = open_checkpoint(source)
outputs = {name: Copied(t, source / t.file) for name, t in checkpoint.tensors.items()}
with new_folder(out, force="force" in sys.argv, sources=[source]) as partial:
    print("begun", flush=True)
    write_shards(partial, plan_shards(outputs, checkpoint, shard_size=2**21))
    (partial / "config.json").write_text("{}")
    if "wait" in sys.argv:
        sys.stdin.read()
print("done", flush=True)
"""


def fill(out: Path, text: str = "{}", *, force: bool = False) -> None:
    with new_folder(out, force=force) as partial:
        (partial / "config.json").write_text(text)


class Stop(Exception):
    pass


def begin_and_stop(
    out: Path,
    error: type[BaseException] = Stop,
    *,
    force: bool = False,
    also: Path | None = None,
) -> None:
    """Begin to fill `out`, make the file `also`, and raise."""
    with new_folder(out, force=force) as partial:
        (partial / "sub").mkdir()
        (partial / "sub" / "file").touch()
        if also:
            also.touch()
        raise error("stop")


def entries(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def start_writer(source: Path, out: Path, *options: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", WRITER, str(source), str(out), *options]
    process = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "begun\n"
    return process


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import torch
    from safetensors.torch import save_file

    folder = tmp_path_factory.mktemp("source")
    (folder / "config.json").write_text("{}")
    tensors = {str(number): torch.ones(2**20) * number for number in range(16)}
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_a_folder_gets_its_name_when_it_is_whole(tmp_path: Path) -> None:
    out = tmp_path / "new" / "parents" / "out"
    with new_folder(out) as partial:
        (partial / "config.json").write_text("{}")
        assert not out.exists()
        assert partial.parent == out.parent
    assert entries(out) == ["config.json"]
    assert entries(out.parent) == ["out"]


def test_its_permissions_follow_the_umask(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        fill(tmp_path / "out")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "out").stat().st_mode) == 0o750


@pytest.mark.parametrize("error", [Stop, UserError, KeyboardInterrupt, SystemExit])
def test_an_exception_leaves_nothing(tmp_path: Path, error: type[BaseException]) -> None:
    with pytest.raises(error):
        begin_and_stop(tmp_path / "made" / "here" / "out", error)
    assert entries(tmp_path) == []


def test_parents_that_others_use_meanwhile_are_left(tmp_path: Path) -> None:
    with pytest.raises(Stop):
        begin_and_stop(tmp_path / "made" / "here" / "out", also=tmp_path / "made" / "other")
    assert entries(tmp_path / "made") == ["other"]


def test_an_existing_output_is_refused_without_force(tmp_path: Path) -> None:
    out = tmp_path / "out"
    fill(out)
    with pytest.raises(UserError, match=r"exists\. Pass --force"):
        fill(out)
    for name in ("file", "link", "dangling"):
        path = tmp_path / name
        if name == "file":
            path.touch()
        else:
            path.symlink_to(out if name == "link" else tmp_path / "nowhere")
        for force in (False, True):
            with pytest.raises(UserError, match="exists and is a file or a symlink"):
                fill(path, force=force)
    assert entries(tmp_path) == ["dangling", "file", "link", "out"]


def test_an_output_that_appears_meanwhile_is_not_overwritten(tmp_path: Path) -> None:
    out = tmp_path / "out"

    def fill_late() -> None:
        with new_folder(out):
            out.mkdir()
            (out / "mine").touch()

    with pytest.raises(UserError, match="exists"):
        fill_late()
    assert entries(tmp_path) == ["out"]
    assert entries(out) == ["mine"]


def test_force_replaces_a_checkpoint_or_an_empty_folder_only(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    fill(out, "first", force=True)
    (out / "old").touch()
    fill(out, "second", force=True)
    assert (out / "config.json").read_text() == "second"
    assert entries(out) == ["config.json"]
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "thesis").touch()
    with pytest.raises(UserError, match="does not look like a checkpoint"):
        fill(precious, force=True)
    assert entries(tmp_path) == ["out", "precious"]
    assert entries(precious) == ["thesis"]


def test_a_failure_with_force_keeps_the_old_folder(tmp_path: Path) -> None:
    out = tmp_path / "out"
    fill(out, "old")
    with pytest.raises(Stop):
        begin_and_stop(out, force=True)
    assert (out / "config.json").read_text() == "old"
    assert entries(tmp_path) == ["out"]


def test_force_spares_the_current_and_the_home_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    (out / "sub").mkdir(parents=True)
    (out / "config.json").touch()
    monkeypatch.setenv("HOME", str(out / "sub"))
    with pytest.raises(UserError, match="home folder"):
        fill(out, force=True)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(out / "sub")
    with pytest.raises(UserError, match="current folder"):
        fill(Path(".."), force=True)
    assert entries(out) == ["config.json", "sub"]


@pytest.mark.parametrize("place", ["source", "source/inside", ".", "link", "link/inside"])
def test_the_output_and_its_sources_must_be_apart(tmp_path: Path, place: str) -> None:
    source = tmp_path / "source"
    fill(source)
    (tmp_path / "config.json").touch()
    (tmp_path / "link").symlink_to(source)
    with (
        pytest.raises(UserError, match="not apart"),
        new_folder(tmp_path / place, force=True, sources=[tmp_path / "other", source]),
    ):
        pass
    assert entries(source) == ["config.json"]


def test_a_place_that_cannot_be_written_is_a_user_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="cannot be made"):
        fill(tmp_path / "file" / "out")
    with pytest.raises(UserError):
        fill(tmp_path / ("x" * 300))
    assert entries(tmp_path) == ["file"]


def test_a_live_process_keeps_others_out(tmp_path: Path, source: Path) -> None:
    out = tmp_path / "out"
    process = start_writer(source, out, "wait")
    with pytest.raises(UserError, match="another process is writing"):
        fill(out)
    output, errors = process.communicate("")
    assert (process.returncode, output, errors) == (0, "done\n", "")
    assert entries(tmp_path) == ["out"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_a_polite_signal_leaves_nothing(tmp_path: Path, source: Path, number: int) -> None:
    process = start_writer(source, tmp_path / "made" / "out", "wait")
    process.send_signal(number)
    process.communicate()
    assert process.returncode != 0
    assert entries(tmp_path) == []


def test_signals_are_left_alone_outside_and_in_other_threads(tmp_path: Path) -> None:
    handlers = []

    def look() -> None:
        with new_folder(tmp_path / "out"):
            handlers.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join()
    assert handlers == [signal.SIG_DFL]
    with new_folder(tmp_path / "other"):
        assert signal.getsignal(signal.SIGTERM) != signal.SIG_DFL
    assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL


def test_a_kill_at_any_moment_leaves_no_output_and_the_next_run_succeeds(
    tmp_path: Path, source: Path
) -> None:
    out = tmp_path / "out"
    chooser = random.Random(0)
    cut_short = 0
    for _ in range(8):
        process = start_writer(source, out)
        try:
            process.wait(chooser.random() * 0.08)
        except subprocess.TimeoutExpired:
            process.kill()
        process.communicate()
        if process.returncode:
            cut_short += not out.exists()
        if out.exists():  # it had ended, so it must be whole
            assert_whole(out)
            for path in out.iterdir():
                path.unlink()
            out.rmdir()
    assert cut_short, "no kill came in time"
    process = start_writer(source, out)
    assert process.communicate()[1] == ""
    assert process.returncode == 0
    assert entries(tmp_path) == ["out"]
    assert_whole(out)


def assert_whole(out: Path) -> None:
    from difftool.checkpoint import open_checkpoint

    checkpoint = open_checkpoint(out)
    assert len(checkpoint.names) == 16
    assert checkpoint.nbytes == 2**26


@pytest.mark.parametrize("moment", ["partial", "replaced", "both", "cleared"])
def test_what_a_kill_left_behind_is_put_right(tmp_path: Path, moment: str) -> None:
    """The states between the renames, which a timed kill would hardly ever hit."""
    out = tmp_path / "out"
    old, partial = tmp_path / ".out.replaced", tmp_path / ".out.partial"
    (tmp_path / ".out.lock").touch()
    if moment != "replaced":
        partial.mkdir()
        (partial / "half").touch()
    if moment in ("replaced", "both"):  # the old folder was moved, the new one has no name yet
        fill(old, "old")
    if moment == "cleared":  # the new folder stands, the old one is half removed
        fill(out, "new")
        old.mkdir()
        (old / "rest").touch()
    with pytest.raises(Stop):
        begin_and_stop(out, force=True)
    assert entries(tmp_path) == ([] if moment == "partial" else ["out"])
    if out.exists():
        expected = "new" if moment == "cleared" else "old"
        assert (out / "config.json").read_text() == expected
    fill(out, "last", force=True)
    assert entries(tmp_path) == ["out"]
    assert (out / "config.json").read_text() == "last"


def test_a_symlink_in_the_place_of_leftovers_is_not_followed(tmp_path: Path) -> None:
    precious = tmp_path / "precious"
    fill(precious)
    (tmp_path / ".out.partial").symlink_to(precious)
    fill(tmp_path / "out")
    assert entries(tmp_path) == ["out", "precious"]
    assert entries(precious) == ["config.json"]
