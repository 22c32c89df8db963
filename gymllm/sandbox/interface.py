"""What every sandbox can do, whatever runs it: processes on this machine, containers, pods.

Expected endings (a timeout, an exit code, output that was cut) are fields of `ExecResult`. What raises is
in the `SandboxError` branch of `gymllm.errors`.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Literal, Protocol, Self

from gymllm.errors import ConfigError

MAX_OUTPUT_BYTES = 64 * 1024
"""Kept of each stream, half from its head and half from its tail, unless a call says otherwise."""
MAX_FILE_BYTES = 16 * 1024 * 1024
"""Most that `read` returns, unless a call says otherwise."""
TERMINAL_PROGRAM = ("bash", "--noprofile", "--norc", "-i")


@dataclass(frozen=True, kw_only=True)
class Output:
    """What a stream said: all of it in `head`, or both ends and how much lay between."""

    head: bytes = b""
    tail: bytes = b""
    cut_bytes: int = 0

    def __bytes__(self) -> bytes:
        if not self.cut_bytes:
            return self.head + self.tail
        return b"%s\n[... %d bytes cut ...]\n%s" % (self.head, self.cut_bytes, self.tail)


@dataclass(frozen=True, kw_only=True)
class ExecResult:
    """How a command ended and what it wrote."""

    stdout: Output
    """A shell's commands write both streams here, in order."""
    stderr: Output
    exit_code: int | None
    """None when a signal, or our timeout, ended it. 126 and 127 mean what they mean in a shell."""
    signal: int | None = None
    timed_out: bool = False
    wall_s: float
    shell_died: bool = False
    """The command ended the shell itself (`exit`, `exec`, `set -e`, a kill); `Shell.restart` starts anew."""


@dataclass(frozen=True, kw_only=True)
class FileEntry:
    """One name in a directory. A link is not followed."""

    name: str
    kind: Literal["file", "directory", "link", "other"]
    size_bytes: int
    mode: int


@dataclass(frozen=True, kw_only=True)
class Mount:
    """A file or folder of the host, shown read-only."""

    source: Path
    target: str


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What bounds a sandbox in fact, in words, each with what enforces it. Empty: nothing does."""

    memory: str = ""
    pids: str = ""
    cpus: str = ""
    files: str = ""
    network: str = ""
    syscalls: str = ""
    lacks: tuple[str, ...] = ()
    """What this kind of sandbox, or this host, can't do."""


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """A work tree at one moment: a base and layers over it. Lives until this process ends or `discard`."""

    base: Path | None
    layers: tuple[Path, ...] = ()
    owned: Path | None = None
    """The folder that was made for it."""
    image: str = ""
    """A container's files, as an image."""
    archive: Path | None = None
    """A container's work tree, where the kind makes no images: a tar file."""
    undo: Callable[[], None] | None = field(default=None, compare=False, repr=False)
    """Removes what isn't on this host."""

    def discard(self) -> None:
        """Removes what was copied. No sandbox or snapshot may stand on it any more."""
        if self.owned is not None:
            shutil.rmtree(self.owned, ignore_errors=True)
        if self.undo is not None:
            self.undo()


@dataclass(frozen=True, kw_only=True)
class SandboxSpec:
    """What a sandbox is made from. Equal specs make equal sandboxes."""

    base: Path | None = None
    """Folder of the host shown at `workdir`, copy on write; copied into containers at their start. None:
    an empty one, or the image's."""
    image: str = ""
    """Of containers, which need one; "local" has none."""
    user: str = ""
    """Of containers: who runs the commands, by name or number. Empty: whom the image says."""
    layers: tuple[Path, ...] = ()
    """Overlay layers over the base, the last on top, with overlayfs' marks for what was deleted."""
    mounts: tuple[Mount, ...] = ()
    hidden: tuple[str, ...] = ()
    """Folders of the system that are shown empty, where they exist; kind "local" alone can."""
    workdir: str = "/workspace"
    env: Mapping[str, str] = field(default_factory=dict[str, str], hash=False)
    """Added to PATH, HOME, USER, LANG and TERM; nothing of the host's environment is seen."""
    memory_mb: int = 2048
    pids: int = 256
    cpus: float = 1.0
    file_mb: int = 1024
    """All that may be written, /tmp and the home folder included; kept in memory."""
    network: Literal[False] = False
    wall_s: float | None = None
    """The whole sandbox is killed when it is this old."""

    def __post_init__(self) -> None:
        for name in ("memory_mb", "pids", "cpus", "file_mb"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"sandbox.{name} must be > 0, got {getattr(self, name)}.")
        if self.wall_s is not None and self.wall_s <= 0:
            raise ConfigError(f"sandbox.wall_s must be > 0 or None, got {self.wall_s}.")
        parts = self.workdir.split("/")
        if parts[0] or len(parts) < 2 or not all(parts[1:]) or {".", ".."} & set(parts):
            raise ConfigError(
                f"sandbox.workdir must be an absolute path below /, got {self.workdir!r}."
            )
        for path in (*([self.base] if self.base else []), *self.layers):
            if not path.is_dir():
                raise ConfigError(
                    f"sandbox: {str(path)!r} is no folder; base and layers must exist."
                )
            if any(char in str(path) for char in ':\\,"'):
                raise ConfigError(
                    f"sandbox: overlays can't show {str(path)!r}: its path holds : \\ , or \"."
                )
        if self.network:
            raise ConfigError("sandbox.network: sandboxes have no network; must be False.")


class Shell(Protocol):
    """A shell that stays: directory, variables and functions outlive a command. One command at a time."""

    @property
    def alive(self) -> bool:
        """False once a command has ended the shell, or its sandbox is gone."""
        ...

    async def run(
        self,
        command: bytes | str,
        *,
        timeout_s: float = 60.0,
        max_output_bytes: int = MAX_OUTPUT_BYTES,
    ) -> ExecResult:
        """Runs a command, any text that the shell takes, in the shell itself.

        Its standard input is empty. It is over when its foreground is; jobs that it leaves in the background
        go on, and what they write later shows with a later command. After `timeout_s` everything that it has
        started is killed and the shell lives on. Cancelled, the same happens before the next command.

        Raises:
            SandboxDiedError: The shell or its sandbox is gone.
            ConfigError: The command holds a NUL byte.
        """
        ...

    async def restart(self) -> None:
        """Kills the shell, with what it runs, and starts a fresh one."""
        ...

    async def aclose(self) -> None:
        """Kills the shell, with what it runs."""
        ...


class Terminal(Protocol):
    """A program on a terminal of its own: what is typed goes in, what it draws comes out, as bytes."""

    @property
    def alive(self) -> bool:
        """False once the program has ended, or its sandbox is gone."""
        ...

    @property
    def exit_code(self) -> int | None:
        """Of the program; None while it runs. Negative: the signal that ended it."""
        ...

    async def send(self, data: bytes, *, timeout_s: float = 2.0) -> int:
        """Types; returns how many bytes were taken within the time. A program may read nothing.

        Raises:
            SandboxDiedError: The terminal was closed, or its sandbox is gone.
        """
        ...

    async def receive(self, timeout_s: float, *, max_bytes: int = MAX_OUTPUT_BYTES) -> bytes:
        """What it has written since, as soon as there is anything; empty after the time or its end.

        What isn't read stays with the program: once some kilobytes wait, it does, too.

        Raises:
            SandboxDiedError: The terminal was closed, or its sandbox is gone.
        """
        ...

    async def resize(self, columns: int, rows: int) -> None:
        """Changes the window; the program hears of it (SIGWINCH)."""
        ...

    async def aclose(self) -> None:
        """Kills the program, with what it runs."""
        ...


class Sandbox(Protocol):
    """A work tree and the processes in it, apart from everything else. Close it, or use `async with`."""

    @property
    def spec(self) -> SandboxSpec: ...

    @property
    def workdir(self) -> str:
        """Where the work tree is, as commands see it."""
        ...

    @property
    def limits(self) -> Limits: ...

    @property
    def alive(self) -> bool: ...

    async def exec(
        self,
        argv: Sequence[str | bytes],
        *,
        input: bytes = b"",
        timeout_s: float = 60.0,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        max_output_bytes: int = MAX_OUTPUT_BYTES,
    ) -> ExecResult:
        """Runs a program, without a shell.

        It is over when it has ended, even though what it left in the background keeps its output open.
        After `timeout_s`, and on cancellation, it is killed with its session and its descendants.

        Args:
            argv: Program, looked up on PATH, and arguments.
            input: Its standard input; then comes the end of file.
            timeout_s: Wall-clock limit.
            cwd: Directory; `workdir` if None.
            env: Variables over those of the spec.
            max_output_bytes: Kept of each stream, half from each end.

        Raises:
            SandboxDiedError: The sandbox is gone.
        """
        ...

    async def shell(self, *, cwd: str | None = None, env: Mapping[str, str] | None = None) -> Shell:
        """Starts a persistent bash. Closing the sandbox closes it."""
        ...

    async def terminal(
        self,
        argv: Sequence[str | bytes] = TERMINAL_PROGRAM,
        *,
        columns: int = 80,
        rows: int = 24,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
    ) -> Terminal:
        """Starts a program on a terminal. Closing the sandbox closes it.

        Args:
            argv: Program and arguments; an interactive bash.
            columns: Of the window, 1 to 1000.
            rows: Of the window, 1 to 1000.
            cwd: Directory; `workdir` if None.
            env: Variables over those of the spec. TERM is "linux" unless it is among these.
        """
        ...

    async def read(self, path: str, *, max_bytes: int = MAX_FILE_BYTES) -> bytes:
        """A regular file's content, whole. Links lead to where they lead inside the sandbox.

        Raises:
            SandboxFileError: There is none, it is larger than `max_bytes`, no regular file, unreadable.
        """
        ...

    async def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """Puts a file in place at once or not at all; makes its folders; replaces a link, never follows it.

        Raises:
            SandboxFileError: The disk is full, the place read-only.
        """
        ...

    async def list(self, path: str = ".", *, max_entries: int = 10_000) -> list[FileEntry]:
        """What a folder holds, by name.

        Raises:
            SandboxFileError: It is none, or holds more than `max_entries`.
        """
        ...

    async def snapshot(self, *, max_bytes: int | None = None) -> Snapshot:
        """Copies what has changed in the work tree. Processes go on meanwhile: let none write.

        Args:
            max_bytes: Most that is copied, where this kind of sandbox copies to the host.

        Raises:
            SandboxFileError: There is more (`errno.EFBIG`), or the host's disk is full.
        """
        ...

    async def restore(self, snapshot: Snapshot) -> None:
        """Kills everything inside and starts again from a snapshot, of this sandbox or another's."""
        ...

    async def aclose(self) -> None:
        """Kills everything inside; leaves no process, mount, folder or cgroup. Safe to call twice."""
        ...

    async def __aenter__(self) -> Self: ...

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...
