"""The folder of one run, and files that grow line by line and survive a full disk.

runs/<name>/
├── config.yaml          the merged configuration; what `--resume` reads
├── metrics.jsonl        one record a step
├── reward.png           the reward curve
├── trajectories/        step_000001.jsonl ...: every episode trained on
├── trajectories.html    the last of them, to read
├── trace.perfetto-trace for ui.perfetto.dev; trace-2, trace-3, ... after a resume
├── wandb/               Weights & Biases' own files
├── checkpoints/         step_000010/ ...
├── model/               the trained model, as transformers and vLLM load it; adapters are merged
├── adapters/            where adapters were trained, they alone, as PEFT and vLLM load them
└── .lock                locked by the process that trains, whose number is inside
"""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import re
import shutil
import sys
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from gymllm.errors import ClosedError, ConfigError, RunError, UnknownNameError

DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
"""What the operating system says when nothing more fits."""

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def warn(message: str) -> None:
    """Says something on the console that must be seen but stops nothing."""
    print(f"gymllm: {message}", file=sys.stderr, flush=True)  # noqa: T201 (the console is its job)


class RunFolder:
    """Where one run keeps everything. Made by `create` or `open`, never by hand."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config = path / "config.yaml"
        self.metrics = path / "metrics.jsonl"
        self.reward_plot = path / "reward.png"
        self.trajectories = path / "trajectories"
        self.transcripts = path / "trajectories.html"
        self.trace = path / "trace.perfetto-trace"
        self.wandb = path / "wandb"
        self.model = path / "model"
        self.adapters = path / "adapters"
        self.checkpoints = path / "checkpoints"
        self._lock: int | None = None

    @classmethod
    def create(cls, runs_dir: Path, name: str, config_yaml: str) -> RunFolder:
        """Makes the folder of a new run, exclusively and locked, with its configuration inside.

        Raises:
            ConfigError: The name is taken or can't name a folder, or `runs_dir` is a file; the message
                says what to do.
            RunError: The folder can't be made.
        """
        if not _NAME.fullmatch(name):
            raise ConfigError(
                f"name must be letters, digits, dots, dashes and underscores, got {name!r}."
            )
        folder = cls(runs_dir / name)
        for path in (runs_dir, folder.path):
            if path.exists() and not path.is_dir():
                raise ConfigError(
                    f"{path} is a file, so no run can be kept there. Choose another folder with "
                    "--runs-dir, or another --name."
                )
        try:
            runs_dir.mkdir(parents=True, exist_ok=True)
            folder.path.mkdir()
            folder.lock()
            folder.trajectories.mkdir()
            folder.write_config(config_yaml)
        except FileExistsError:
            folder.lock()  # being trained at this moment is the better answer
            folder.unlock()
            raise ConfigError(
                f"a run is already in {folder.path}. Continue it with --resume {folder.path}, or "
                f"give this one another --name."
            ) from None
        except OSError as error:
            if folder._lock is not None:  # half a folder would only keep the name from the next try
                folder.remove()
                folder.unlock()
            raise RunError(
                f"can't make the run's folder {folder.path}: {error.strerror}. "
                f"Choose another with --runs-dir."
            ) from error
        return folder

    @classmethod
    def open(cls, path: Path) -> RunFolder:
        """The folder of a run that exists.

        Raises:
            UnknownNameError: There is none; says which are close.
        """
        folder = cls(path)
        if not folder.config.is_file():
            beside = path.parent.glob("*/config.yaml") if path.parent.is_dir() else ()
            known = [str(config.parent) for config in beside]
            raise UnknownNameError("run", str(path), known, "A run's folder holds config.yaml.")
        return folder

    def lock(self) -> None:
        """Takes the run for this process alone, until `unlock` or the process's end, however it ends.

        A file system without locks takes it for granted.

        Raises:
            ConfigError: Another process trains this run; says which.
            OSError: The folder can't be written.
        """
        descriptor = os.open(self.path / ".lock", os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            process = os.read(descriptor, 32).decode().strip()
            os.close(descriptor)
            stop = f" (kill -INT {process})" if process else ""
            raise ConfigError(
                f"run {self.path} is being trained by process {process or 'unknown'}. Wait for it to "
                f"end or stop it{stop}, then go on with --resume {self.path}; or start another run "
                "with another --name."
            ) from None
        except OSError:
            os.close(descriptor)
            return
        with suppress(OSError):  # a full disk: locked all the same
            os.ftruncate(descriptor, 0)
            os.write(descriptor, f"{os.getpid()}\n".encode())
        self._lock = descriptor

    def unlock(self) -> None:
        """Lets another process train this run. Idempotent."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def new_trace(self) -> Path:
        """Where this session's trace goes: beside those of earlier ones, not over them."""
        for number in itertools.count(2):
            if not self.trace.exists():
                break
            self.trace = self.path / f"trace-{number}.perfetto-trace"
        return self.trace

    def write_config(self, config_yaml: str) -> None:
        """Writes the merged configuration, whole or not at all."""
        write_atomically(self.config, config_yaml.encode())

    def is_bare(self) -> bool:
        """Whether nothing was collected: no metrics, no trajectory, no checkpoint."""
        held = [self.metrics] if self.metrics.is_file() and self.metrics.stat().st_size else []
        for part in (self.trajectories, self.checkpoints):
            held += [path for path in part.rglob("*") if path.is_file() and path.stat().st_size]
        return not held

    def remove(self) -> None:
        """Removes the folder, as far as the file system lets it."""
        shutil.rmtree(self.path, ignore_errors=True)

    def trajectories_file(self, step: int) -> Path:
        """Where the trajectories of a step are kept."""
        return self.trajectories / f"step_{step:06d}.jsonl"

    def forget_after(self, step: int) -> None:
        """Removes the trajectories of steps past `step`, which a resumed run will play again."""
        for file in self.trajectories.glob("step_*.jsonl"):
            if int(file.stem.removeprefix("step_")) > step:
                file.unlink()


def write_atomically(path: Path, data: bytes) -> None:
    """Replaces a file; a crash or a full disk at any moment leaves the old one or the new one."""
    # Not `tempfile`: its files are for their owner's eyes only, and stay so when renamed.
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.write_bytes(data)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


class LineFile:
    """Appends whole lines. A full disk loses nothing: lines wait in memory for the next attempt.

    Each line is with the operating system when `write` returns, so `kill -9` loses none. A disk
    that is full is said once on the console; lines are tried again, in order, at every later write
    and at `close`. Up to `memory_bytes` wait; past that the newest are dropped and counted. Not
    thread-safe.
    """

    def __init__(
        self,
        path: Path,
        *,
        memory_bytes: int = 64 * 2**20,
        warn: Callable[[str], None] = warn,
    ) -> None:
        """Opens `path` for appending, made if missing.

        Args:
            path: The file.
            memory_bytes: Most bytes of lines that wait while the disk is full.
            warn: Told once when the disk is full, and once when something was lost for good.
        """
        self._path, self._memory_bytes, self._warn = path, memory_bytes, warn
        self._descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._end = os.fstat(self._descriptor).st_size
        self._waiting: deque[bytes] = deque()
        self._waiting_bytes = 0
        self._said_full = self._closed = False
        self.dropped = 0
        """Lines that were lost because the memory for waiting ones was used up."""

    @property
    def waiting(self) -> int:
        """Lines that the disk hasn't taken yet."""
        return len(self._waiting)

    @property
    def waiting_bytes(self) -> int:
        """Of these lines."""
        return self._waiting_bytes

    def flush(self) -> None:
        """Tries what waits once more.

        Raises:
            OSError: The file can't be written for another reason than a full disk.
        """
        self._flush()

    def write(self, line: str) -> None:
        """Appends one line; the newline is added.

        Raises:
            ClosedError: The file was closed.
            OSError: The file can't be written for another reason than a full disk.
        """
        if self._closed:
            raise ClosedError(f"{self._path} was closed.")
        data = line.encode() + b"\n"
        if self._waiting_bytes + len(data) > self._memory_bytes:
            self._flush()
        if self._waiting_bytes + len(data) > self._memory_bytes:
            self.dropped += 1
            return
        self._waiting.append(data)
        self._waiting_bytes += len(data)
        self._flush()

    def close(self) -> None:
        """Tries what waits once more and closes; says what was lost. Idempotent."""
        if self._closed:
            return
        self._flush()
        self._closed = True
        os.close(self._descriptor)
        lost = self.dropped + self.waiting
        if lost:
            self._warn(f"the disk stayed full: {lost} lines of {self._path} were lost.")

    def _flush(self) -> None:
        while self._waiting:
            try:
                self._write_whole(self._waiting[0])
            except OSError as error:
                if error.errno not in DISK_FULL:
                    raise
                if not self._said_full:
                    self._said_full = True
                    self._warn(
                        f"the disk is full: {self._path} waits in memory and is written when there "
                        f"is room. Free some space; the run goes on."
                    )
                return
            self._waiting_bytes -= len(self._waiting.popleft())

    def _write_whole(self, data: bytes) -> None:
        """Writes all of `data`, or none of it and raises."""
        written = 0
        try:
            while written < len(data):
                written += os.write(self._descriptor, data[written:])
        except OSError:
            if written:
                os.ftruncate(self._descriptor, self._end)
            raise
        self._end += len(data)
