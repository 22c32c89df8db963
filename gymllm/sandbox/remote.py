"""Sandboxes in containers: what a container must give, and the `Sandbox` over it.

A back end (Docker, Kubernetes) implements `Container` and `ProcessStream`, about as much as every exec API
has. All else is here and in remote_shell.py, by small programs for a POSIX sh and its usual tools; the
image needs no Python.
"""

from __future__ import annotations

import errno
import functools
import os
import posixpath
import secrets
import shutil
import tempfile
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

import anyio
import anyio.to_thread

from gymllm.errors import (
    ConfigError,
    SandboxDiedError,
    SandboxError,
    SandboxFileError,
    SandboxStartError,
)
from gymllm.sandbox import remote_files, remote_programs
from gymllm.sandbox.interface import (
    MAX_FILE_BYTES,
    MAX_OUTPUT_BYTES,
    TERMINAL_PROGRAM,
    ExecResult,
    FileEntry,
    Limits,
    SandboxSpec,
    Snapshot,
)
from gymllm.sandbox.output import Kept
from gymllm.sandbox.remote_exec import Command, FileSink, Keeper, Ran, Runners
from gymllm.sandbox.remote_marks import Sink
from gymllm.sandbox.remote_shell import RemoteShell
from gymllm.sandbox.remote_terminal import RemoteTerminal
from gymllm.sandbox.state import state

_FILE_TIMEOUT_S = 30.0
_TREE_TIMEOUT_S = 600.0


class ProcessStream(Protocol):
    """One process in a container, attached to its standard streams. One sender and one receiver at a time.

    Both ends of a call may be cancelled; a cancelled `send` may have sent a part.
    """

    async def send(self, data: bytes) -> None:
        """To its standard input. Nobody needs its end: programs are told how much comes.

        Raises:
            SandboxDiedError: The connection is gone.
        """
        ...

    async def receive(self) -> tuple[int, bytes] | None:
        """1 or 2, and what it wrote there; with a terminal always 1. None at the end, also a broken one."""
        ...

    async def exit_code(self) -> int | None:
        """Once `receive` has returned None; None if nobody knows."""
        ...

    async def resize(self, rows: int, columns: int) -> None:
        """Of its terminal."""
        ...

    async def aclose(self) -> None:
        """Drops the connection; the process may live on. Safe to call twice. Never waits for the process."""
        ...


class Container(Protocol):
    """What a back end gives: a running container, its own until `remove`."""

    @property
    def name(self) -> str: ...

    @property
    def limits(self) -> Limits: ...

    async def open(self, argv: Sequence[str], *, tty: bool = False) -> ProcessStream:
        """Starts a program beside the others, attached, its standard input open.

        It has the container's own environment and directory: `RemoteSandbox` sets others itself, for not
        every API can, and sends what isn't UTF-8 through the program's input.

        Raises:
            SandboxDiedError: The container is gone.
            SandboxError: It could not be started: the image has no such program, or no process is free.
        """
        ...

    async def alive(self) -> bool:
        """Asks. False only if it is gone for good."""
        ...

    async def commit(self) -> str | None:
        """Keeps its files as an image and returns the name; None where the kind can't."""
        ...

    def discard(self, image: str) -> None:
        """Removes an image that `commit` has made; silent if it is gone. The container may be gone, too."""
        ...

    async def remove(self) -> None:
        """Kills all inside and leaves nothing; not its snapshots. Safe to call twice, and when it is gone."""
        ...


StartContainer = Callable[[SandboxSpec], Awaitable[Container]]
"""Starts a container for a spec and cleans up if that fails or is cancelled. The spec's workdir exists in
it; nothing else of the spec's files does: `RemoteSandbox` brings the base. It ends by itself at `wall_s`."""


def check_for_containers(spec: SandboxSpec, kind: str) -> None:
    """Refuses what no container can.

    Raises:
        ConfigError: Says which field.
    """
    if not spec.image:
        raise ConfigError(f"sandbox.image: kind {kind!r} needs one, for example 'debian:12-slim'.")
    for name in ("layers", "hidden"):
        if getattr(spec, name):
            raise ConfigError(f"sandbox.{name}: only kind 'local' has them, not {kind!r}.")
    remote_programs.exports(spec.env)


class RemoteSandbox:
    """A `Sandbox` in a container. `start` it before use."""

    def __init__(self, spec: SandboxSpec, kind: str, start_container: StartContainer) -> None:
        check_for_containers(spec, kind)
        self._spec, self._kind, self._start_container = spec, kind, start_container
        self._current = spec
        self._container: Container | None = None
        self._keeper: Keeper | None = None
        self._runners: Runners | None = None
        self._ends: float | None = None
        self._closed = self._gone = False
        self._shells: list[RemoteShell | RemoteTerminal] = []

    async def start(self, archive: Path | None = None) -> None:
        """Starts it, with this work tree or the spec's; cleans up if that fails or is cancelled."""
        began = time.monotonic()
        container = await self._start_container(self._current)
        try:
            keeper = Keeper(container)
            try:
                await keeper.start()
            except SandboxError as problem:
                raise SandboxStartError(f"A sandbox of kind {self._kind!r}: {problem}") from problem
            self._container, self._keeper, self._gone = container, keeper, False
            self._runners = Runners(container)
            if self._spec.wall_s is not None:
                self._ends = began + self._spec.wall_s
            if archive is not None:
                await self._unpack(archive, fresh=True)
            elif self._current.base is not None:
                await self._bring(self._current.base)
        except BaseException:
            with anyio.CancelScope(shield=True):
                await self._end(container)
            raise

    @property
    def spec(self) -> SandboxSpec:
        return self._spec

    @property
    def workdir(self) -> str:
        return self._spec.workdir

    @property
    def name(self) -> str:
        """Of its container, as the daemon or the cluster knows it."""
        return self.live()[0].name

    @property
    def limits(self) -> Limits:
        container, keeper = self.live()
        lacks = [*container.limits.lacks]
        if "bash" not in keeper.facts:
            lacks.append("bash in the image: shells are its sh")
        if not {"leader", "setsid"} & keeper.facts:
            lacks.append("sessions: what has left its parents lives on after a timeout")
        if "tar" not in keeper.facts:
            lacks.append("tar in the image: no base, no snapshot as a tar file")
        lacks.append("exit codes from 129 to 192: they count as signals")
        return replace(container.limits, lacks=tuple(lacks))

    @property
    def alive(self) -> bool:
        """By what is known without asking: a container that has ended shows with the next command."""
        return self._container is not None and not self._gone and not self._expired

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
        words = words_of(argv, "exec")
        began = time.monotonic()
        stdout, stderr = Kept(max_output_bytes), Kept(max_output_bytes)
        ran = await self._run(words, stdout, stderr, input, timeout_s, cwd, env)
        return ExecResult(
            stdout=stdout.output(),
            stderr=stderr.output(),
            exit_code=ran.exit_code,
            signal=ran.signal,
            timed_out=ran.timed_out,
            wall_s=time.monotonic() - began,
        )

    async def shell(
        self, *, cwd: str | None = None, env: Mapping[str, str] | None = None
    ) -> RemoteShell:
        self.live()
        shell = RemoteShell(self, self.inside(cwd or ""), {**self._spec.env, **(env or {})})
        await shell.restart()
        self._shells = [old for old in self._shells if old.alive] + [shell]
        return shell

    async def terminal(
        self,
        argv: Sequence[str | bytes] = TERMINAL_PROGRAM,
        *,
        columns: int = 80,
        rows: int = 24,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
    ) -> RemoteTerminal:
        self.live()
        terminal = RemoteTerminal(self)
        await terminal.start(
            words_of(argv, "terminal"),
            columns=columns,
            rows=rows,
            cwd=self.inside(cwd or ""),
            env={**self._spec.env, **(env or {})},
        )
        self._shells = [old for old in self._shells if old.alive] + [terminal]
        return terminal

    async def read(self, path: str, *, max_bytes: int = MAX_FILE_BYTES) -> bytes:
        remote_files.check(path)
        return await self._file(path, remote_files.read(self.inside(path), max_bytes), max_bytes)

    async def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        remote_files.check(path)
        whole = self.inside(path)
        made = whole.rpartition(b"/")[0] + b"/.gymllm-" + secrets.token_hex(8).encode()
        await self._file(path, remote_files.write(whole, made, len(data), mode), 0, data)

    async def list(self, path: str = ".", *, max_entries: int = 10_000) -> list[FileEntry]:
        remote_files.check(path)
        body = remote_files.list_folder(self.inside(path), max_entries)
        return remote_files.entries(await self._file(path, body, max_entries * 300))

    async def snapshot(self, *, max_bytes: int | None = None) -> Snapshot:
        container, _ = self.live()
        image = await container.commit()
        if image is not None:
            undo = functools.partial(container.discard, image)
            return Snapshot(base=None, image=image, undo=undo)
        folder = state().unique("layers")
        folder.mkdir()
        try:
            archive = folder / "tree.tar"
            sink = FileSink(archive, max_bytes)
            try:
                await self._tree(remote_files.pack(self.inside("")), sink, b"")
            finally:
                sink.close()
            if sink.problem is not None:
                number = sink.problem.errno or errno.EIO
                raise SandboxFileError(
                    number, f"no snapshot: {sink.problem.strerror}", self.workdir
                )
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        return Snapshot(base=None, archive=archive, owned=folder)

    async def restore(self, snapshot: Snapshot) -> None:
        if not snapshot.image and snapshot.archive is None:
            raise ConfigError(
                f"A sandbox of kind {self._kind!r} can't be restored from a local one's snapshot."
            )
        self.live()
        image = snapshot.image or self._spec.image
        self._current = replace(self._spec, image=image, base=None)
        await self._end(self._container)
        await self.start(snapshot.archive)

    async def aclose(self) -> None:
        self._closed = True
        await self._end(self._container)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def _end(self, container: Container | None) -> None:
        keeper, self._keeper, self._container = self._keeper, None, None
        runners, self._runners = self._runners, None
        shells, self._shells = self._shells, []
        with anyio.CancelScope(shield=True):
            for shell in shells:
                await shell.forget()
            if runners is not None:
                await runners.aclose()
            if keeper is not None:
                await keeper.aclose()
            if container is not None:
                await container.remove()

    # For the shell, too.

    def live(self) -> tuple[Container, Keeper]:
        """What it runs on.

        Raises:
            SandboxDiedError: It is closed or gone.
        """
        if self._closed:
            raise SandboxDiedError("The sandbox was closed.")
        if self._expired:
            raise SandboxDiedError(f"The sandbox was older than wall_s={self._spec.wall_s}.")
        if self._container is None or self._keeper is None or self._gone:
            raise SandboxDiedError("The sandbox is gone: everything in it was killed.")
        return self._container, self._keeper

    def inside(self, path: str) -> bytes:
        """The path, from the work tree on."""
        return os.fsencode(posixpath.join(self._spec.workdir, path))

    async def still_there(self) -> bool:
        """Asks, and remembers."""
        if self._container is None or self._expired or not await self._container.alive():
            self._gone = True
        return not self._gone

    @property
    def _expired(self) -> bool:
        return self._ends is not None and time.monotonic() > self._ends

    async def _run(
        self,
        what: bytes | list[bytes],
        stdout: Sink,
        stderr: Sink,
        input: bytes | Path,
        timeout_s: float,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
    ) -> Ran:
        """Some lines for sh, or a program: that one has a session of its own, where the image can."""
        container, keeper = self.live()
        assert self._runners is not None
        command = Command(container, keeper, self._runners, stdout, stderr)
        if isinstance(what, bytes):
            body, stay = what, True
        else:
            stay = "setsid" in keeper.facts
            body = remote_programs.program(what, command.pid_word if stay else b"")
        variables = remote_programs.exports({**self._spec.env, **(env or {})})
        program = functools.partial(
            remote_programs.command,
            body,
            cwd=self.inside(cwd or ""),
            exports=variables,
            stay=stay,
        )
        left = self._ends - time.monotonic() if self._ends is not None else timeout_s
        try:
            ran = await command.run(program, input, min(timeout_s, max(left, 0)), stay=stay)
        except SandboxDiedError:
            self._gone = True
            if self._closed or self._expired:
                self.live()
            raise  # it says what has ended it
        if ran.timed_out:
            self.live()
        return ran

    async def _file(self, path: str, body: bytes, most: int, data: bytes = b"") -> bytes:
        stdout, stderr = Kept(2 * max(most, 4096)), Kept(4096)
        ran = await self._run(body, stdout, stderr, data, _FILE_TIMEOUT_S, "/")
        if ran.timed_out:
            raise SandboxFileError(errno.ETIMEDOUT, f"no answer within {_FILE_TIMEOUT_S} s", path)
        if ran.status == 126:
            raise SandboxFileError(errno.EAGAIN, "the sandbox is full of processes", path)
        if ran.status != 0:
            raise remote_files.problem(bytes(stderr.output()), path)
        return bytes(stdout.output())

    async def _tree(self, body: bytes, stdout: Sink, input: bytes | Path) -> None:
        _, keeper = self.live()
        if "tar" not in keeper.facts:
            raise SandboxError(
                f"The image {self._current.image!r} has no tar, which moves trees in and out: "
                "use one that has."
            )
        stderr = Kept(4096)
        ran = await self._run(body, stdout, stderr, input, _TREE_TIMEOUT_S, "/")
        if ran.status != 0:
            said = bytes(stderr.output()).decode(errors="replace").strip()
            raise SandboxError(
                f"tar in {self.workdir} failed: {said or f'it ended with {ran.status}'}."
            )

    async def _unpack(self, archive: Path, *, fresh: bool) -> None:
        await self._tree(remote_files.unpack(self.inside(""), fresh=fresh), Kept(0), archive)

    async def _bring(self, base: Path) -> None:
        folder = Path(await anyio.to_thread.run_sync(tempfile.mkdtemp))
        try:
            archive = folder / "base.tar"
            await anyio.to_thread.run_sync(remote_files.make_tar, base, archive)
            await self._unpack(archive, fresh=False)
        finally:
            with suppress(OSError):
                shutil.rmtree(folder)


def words_of(argv: Sequence[str | bytes], what: str) -> list[bytes]:
    """A program and its arguments, as the system takes them.

    Raises:
        ConfigError: It is no list, empty, or holds a NUL byte.
    """
    if isinstance(argv, str | bytes) or not argv:
        raise ConfigError(f"{what} takes a program and its arguments as a list, got {argv!r}.")
    words = [os.fsencode(word) for word in argv]
    if any(b"\0" in word for word in words):
        raise ConfigError(f"{what}: an argument can't hold a NUL byte.")
    return words
