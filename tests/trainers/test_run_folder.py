"""A run's folder, and files that survive a full disk."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys

import pytest

from gymllm.errors import ClosedError, ConfigError, RunError, UnknownNameError
from gymllm_trainers import run_folder
from gymllm_trainers.run_folder import LineFile, RunFolder, write_atomically


class FullDisk:
    """Stands for `os.write` on a disk with `room` bytes left."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, room: int) -> None:
        self.room = room
        self._write = os.write
        monkeypatch.setattr(run_folder.os, "write", self.write)

    def write(self, descriptor: int, data: bytes) -> int:
        if self.room == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = self._write(descriptor, data[: self.room])
        self.room -= written
        return written


def test_create_makes_everything_and_saves_the_config(tmp_path):
    folder = RunFolder.create(tmp_path / "runs", "a", "steps: 3\n")
    assert folder.config.read_text() == "steps: 3\n"
    assert folder.trajectories.is_dir()
    assert RunFolder.open(folder.path).path == folder.path


def test_create_is_exclusive(tmp_path):
    RunFolder.create(tmp_path, "a", "").unlock()
    with pytest.raises(ConfigError, match=r"a run is already in .*--resume"):
        RunFolder.create(tmp_path, "a", "")


def test_run_is_trained_by_one_process_until_it_dies(tmp_path):
    folder = RunFolder.create(tmp_path, "a", "steps: 3\n")
    for _ in range(2):  # whoever is refused must not take the lock from its holder
        with pytest.raises(
            ConfigError, match=rf"being trained by process {os.getpid()}\b.*--resume"
        ):
            RunFolder.open(folder.path).lock()
    with pytest.raises(ConfigError, match=rf"being trained by process {os.getpid()}\b.*--name"):
        RunFolder.create(tmp_path, "a", "")
    assert folder.is_bare()
    folder.unlock()
    script = (
        "import os, pathlib, sys; from gymllm_trainers.run_folder import RunFolder\n"
        "RunFolder.open(pathlib.Path(sys.argv[1])).lock(); os.kill(os.getpid(), 9)"
    )
    process = subprocess.run([sys.executable, "-c", script, str(folder.path)], check=False)
    assert process.returncode == -9
    folder.lock()
    assert (folder.path / ".lock").read_text() == f"{os.getpid()}\n"
    folder.unlock()


def test_file_in_place_of_a_folder_is_called_a_file(tmp_path):
    (tmp_path / "a").touch()
    for runs_dir, name in ((tmp_path / "a", "b"), (tmp_path, "a")):
        with pytest.raises(ConfigError, match=r"/a is a file, .*--runs-dir"):
            RunFolder.create(runs_dir, name, "")


def test_each_session_has_a_trace_of_its_own(tmp_path):
    for name in ("trace.perfetto-trace", "trace-2.perfetto-trace", "trace-3.perfetto-trace"):
        trace = RunFolder(tmp_path).new_trace()
        assert trace.name == name
        trace.touch()


@pytest.mark.parametrize("name", ["", "a/b", "..", "-a", "a b"])
def test_names_that_are_no_folder_are_refused(tmp_path, name):
    with pytest.raises(ConfigError, match="name must be"):
        RunFolder.create(tmp_path, name, "")


def test_place_that_can_hold_no_folder_is_named(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(RunError, match="--runs-dir"):
        RunFolder.create(tmp_path / "file" / "runs", "a", "")


def test_open_says_what_is_close(tmp_path):
    RunFolder.create(tmp_path, "frozenlake-1", "")
    with pytest.raises(UnknownNameError, match=r"Did you mean .*frozenlake-1"):
        RunFolder.open(tmp_path / "frozenlake-2")


def test_trajectories_past_a_checkpoint_are_forgotten(tmp_path):
    folder = RunFolder.create(tmp_path, "a", "")
    for step in (1, 2, 3):
        folder.trajectories_file(step).touch()
    folder.forget_after(2)
    left = sorted(path.name for path in folder.trajectories.iterdir())
    assert left == ["step_000001.jsonl", "step_000002.jsonl"]


def test_atomic_write_keeps_the_old_file_when_it_fails(tmp_path, monkeypatch):
    file = tmp_path / "a"
    write_atomically(file, b"old")

    def refuse(*arguments: object) -> None:
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(run_folder.os, "replace", refuse)
    with pytest.raises(OSError, match="broken"):
        write_atomically(file, b"new")
    assert file.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [file]


def test_lines_are_in_the_file_at_once(tmp_path):
    file = LineFile(tmp_path / "a")
    file.write("one")
    assert (tmp_path / "a").read_text() == "one\n"
    file.close()
    file.close()
    with pytest.raises(ClosedError):
        file.write("two")


def test_full_disk_delays_lines_in_order_and_loses_none(tmp_path, monkeypatch):
    said: list[str] = []
    file = LineFile(tmp_path / "a", warn=said.append)
    file.write("first")
    disk = FullDisk(monkeypatch, room=3)  # the second line fits in part
    file.write("second")
    file.write("third")
    assert (tmp_path / "a").read_text() == "first\n", "a part of a line is taken back"
    assert file.waiting == 2
    disk.room = 10_000
    file.write("fourth")
    file.close()
    assert (tmp_path / "a").read_text() == "first\nsecond\nthird\nfourth\n"
    assert len(said) == 1, said
    assert "the disk is full" in said[0]


def test_close_writes_what_waited(tmp_path, monkeypatch):
    file = LineFile(tmp_path / "a", warn=lambda message: None)
    disk = FullDisk(monkeypatch, room=0)
    file.write("one")
    disk.room = 100
    file.close()
    assert (tmp_path / "a").read_text() == "one\n"


def test_memory_for_waiting_lines_is_bounded_and_the_loss_is_said(tmp_path, monkeypatch):
    said: list[str] = []
    file = LineFile(tmp_path / "a", memory_bytes=12, warn=said.append)
    FullDisk(monkeypatch, room=0)
    for line in ("aaaaa", "bbbbb", "ccccc"):
        file.write(line)
    assert (file.waiting, file.dropped) == (2, 1)
    file.close()
    assert "3 lines" in said[-1]


def test_other_errors_of_the_disk_are_raised(tmp_path, monkeypatch):
    file = LineFile(tmp_path / "a")

    def broken(descriptor: int, data: bytes) -> int:
        raise OSError(errno.EIO, "broken")

    monkeypatch.setattr(run_folder.os, "write", broken)
    with pytest.raises(OSError, match="broken"):
        file.write("one")
    monkeypatch.undo()
    file.close()


def test_a_file_system_that_really_refuses_more_is_survived(tmp_path):
    # RLIMIT_FSIZE refuses like a full disk, with EFBIG; it stands for a disk of 4 KiB.
    import signal

    run_folder_full = (*run_folder.DISK_FULL, errno.EFBIG)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    patch = pytest.MonkeyPatch()
    patch.setattr(run_folder, "DISK_FULL", run_folder_full)
    try:
        file = LineFile(tmp_path / "a", warn=lambda message: None)
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
        for number in range(20):
            file.write(f"{number:0>299}")
        whole = (tmp_path / "a").read_text()
        assert whole.endswith("\n")
        assert file.waiting == 20 - whole.count("\n")
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        file.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
        patch.undo()
    lines = (tmp_path / "a").read_text().splitlines()
    assert [int(line) for line in lines] == list(range(20))
