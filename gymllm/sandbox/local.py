"""Sandboxes on this machine: the host's side of the supervisor in each.

    exec ──> a message on the control socket, with descriptors ──> supervisor (process 1) ──> fork, exec
         <── the command's own pipes, read here directly
         <── the job's socket: its status; closing it kills the job

No task runs between calls, and nothing inside is owed an answer: whoever is cancelled closes its
descriptors, and the supervisor kills what belonged to them.
"""

from __future__ import annotations

import errno
import functools
import marshal
import os
import select
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Literal, Self, cast

import anyio
import anyio.lowlevel
import anyio.to_thread

from gymllm.errors import (
    ConfigError,
    SandboxDiedError,
    SandboxError,
    SandboxFileError,
    SandboxStartError,
)
from gymllm.sandbox.cgroups import Cgroups, make_cgroups
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
from gymllm.sandbox.launch import Launch, launch, limits_in_force
from gymllm.sandbox.layers import copy_layer
from gymllm.sandbox.output import Poller, Reader
from gymllm.sandbox.shell import LocalShell
from gymllm.sandbox.state import state
from gymllm.sandbox.terminal import LocalTerminal, window_size

START_TIMEOUT_S = 30.0
_END_TIMEOUT_S = 2.0
_FILE_TIMEOUT_S = 30.0
_MOST_INPUT_AT_ONCE = 1 << 16
_FileKind = Literal["file", "directory", "link", "other"]


class LocalSandbox:
    """A `Sandbox` of kind "local", "unshare" or "unsafe-local"; `open_sandbox` makes it."""

    def __init__(self, spec: SandboxSpec, kind: str) -> None:
        self._spec, self._kind = spec, kind
        self._current = spec
        """What it runs on: the spec's tree, or a snapshot's."""
        self._running: Running | None = None
        self._closed = False
        self._shells: list[LocalShell | LocalTerminal] = []

    async def start(self) -> None:
        """Starts it; cleans up if that fails or is cancelled."""
        try:
            self._running = await start(self._current, self._kind)
        except OSError as problem:  # no room for our notes, no descriptor left
            raise SandboxStartError(
                f"A sandbox of kind {self._kind!r} did not start: {problem}."
            ) from problem

    @property
    def spec(self) -> SandboxSpec:
        return self._spec

    @property
    def workdir(self) -> str:
        return self._live().launch.workdir

    @property
    def limits(self) -> Limits:
        return self._live().limits

    @property
    def pid(self) -> int:
        """Of the outermost process, on the host."""
        return self._live().process.pid

    @property
    def alive(self) -> bool:
        running = self._running
        return running is not None and not running.expired and running.process.poll() is None

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
        if isinstance(argv, str | bytes) or not argv:
            raise ConfigError(f"exec takes a program and its arguments as a list, got {argv!r}.")
        request = self.request("exec", cwd=cwd, env=env) | {"argv": [os.fsencode(a) for a in argv]}
        if any(b"\0" in part for part in cast("list[bytes]", request["argv"])):
            raise ConfigError("exec: an argument can't hold a NUL byte.")
        return await self._run(request, input, timeout_s, max_output_bytes)

    async def shell(
        self, *, cwd: str | None = None, env: Mapping[str, str] | None = None
    ) -> LocalShell:
        shell = LocalShell(self, self.request("shell", cwd=cwd, env=env))
        await shell.restart()
        self._shells = [old for old in self._shells if old.is_open] + [shell]
        return shell

    async def terminal(
        self,
        argv: Sequence[str | bytes] = TERMINAL_PROGRAM,
        *,
        columns: int = 80,
        rows: int = 24,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
    ) -> LocalTerminal:
        request = self.request("terminal", cwd=cwd, env={"TERM": "linux", **(env or {})})
        terminal = LocalTerminal(self)
        await terminal.start(request | {"size": window_size(columns, rows)}, argv)
        self._shells = [old for old in self._shells if old.is_open] + [terminal]
        return terminal

    async def read(self, path: str, *, max_bytes: int = MAX_FILE_BYTES) -> bytes:
        return await self._file("read", path, b"", max_bytes, {"most": max_bytes})

    async def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        await self._file("write", path, data, 0, {"mode": mode})

    async def list(self, path: str = ".", *, max_entries: int = 10_000) -> list[FileEntry]:
        rows = await self._file("list", path, b"", max_entries * 600, {"most": max_entries})
        return [
            FileEntry(name=os.fsdecode(name), kind=kind, size_bytes=size, mode=mode)
            for name, kind, size, mode in cast(
                "list[tuple[bytes, _FileKind, int, int]]", marshal.loads(rows)
            )
        ]

    async def snapshot(self, *, max_bytes: int | None = None) -> Snapshot:
        running = self._live()
        layer = running.state.unique("layers")
        seen, held = running.launch.tree, None
        if running.launch.gated:  # its own mount namespace, and a tmpfs
            held = self._spec.file_mb << 20
            seen = Path(f"/proc/{running.process.pid}/root") / str(seen).lstrip("/")
        try:
            copy = functools.partial(copy_layer, seen, layer, max_bytes=max_bytes, held_bytes=held)
            await anyio.to_thread.run_sync(copy)
        except OSError as problem:
            await anyio.to_thread.run_sync(
                functools.partial(shutil.rmtree, layer, ignore_errors=True)
            )
            what = f"no snapshot: {problem.strerror}"
            raise SandboxFileError(problem.errno or errno.EIO, what, str(seen)) from problem
        if self._kind != "local":  # the whole tree, not what changed
            return Snapshot(base=layer, layers=(), owned=layer)
        layers = (*self._current.layers, layer)
        return Snapshot(base=self._current.base, layers=layers, owned=layer)

    async def restore(self, snapshot: Snapshot) -> None:
        if snapshot.image or snapshot.archive is not None:
            raise ConfigError("A local sandbox can't be restored from a container's snapshot.")
        self._live()
        self._current = replace(self._current, base=snapshot.base, layers=snapshot.layers)
        await self._end()
        await self.start()

    async def aclose(self) -> None:
        self._closed = True
        await self._end()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.aclose()

    async def _end(self) -> None:
        running, self._running = self._running, None
        shells, self._shells = self._shells, []
        with anyio.CancelScope(shield=True):
            for shell in shells:
                shell.forget()
            if running is not None:
                await running.aclose()

    def _live(self) -> Running:
        if self._closed:
            raise SandboxDiedError("The sandbox was closed.")
        running = self._running
        if running is None or running.process.poll() is not None:
            raise SandboxDiedError("The sandbox is gone: everything in it was killed.")
        if running.expired:
            running.kill()
            raise SandboxDiedError(f"The sandbox was older than wall_s={self._spec.wall_s}.")
        return running

    # For the shell, too.

    def request(
        self, op: str, *, cwd: str | None = None, env: Mapping[str, str] | None = None
    ) -> dict[str, object]:
        running = self._live()
        variables = {**running.launch.env, **(env or {})}
        return {
            "op": op,
            "cwd": os.fsencode(os.path.join(running.launch.workdir, cwd or "")),
            "env": {os.fsencode(k): os.fsencode(v) for k, v in variables.items()},
        }

    async def start_job(self, request: dict[str, object], fds: Sequence[int]) -> socket.socket:
        """Has the supervisor run it on these descriptors (from 0 on); the job's socket is yours to close."""
        return await self._live().start_job(request, fds)

    async def _run(
        self, request: dict[str, object], input: bytes, timeout_s: float, max_output_bytes: int
    ) -> ExecResult:
        began = time.monotonic()
        with ExitStack() as ours, ExitStack() as theirs:

            def pipe() -> tuple[int, int]:
                reading, writing = os.pipe2(os.O_CLOEXEC)
                return reading, writing

            def closing(stack: ExitStack, fd: int) -> int:
                stack.callback(os.close, fd)
                return fd

            out, out_theirs = pipe()
            closing(ours, out)
            closing(theirs, out_theirs)
            err, err_theirs = pipe()
            closing(ours, err)
            closing(theirs, err_theirs)
            feeding = -1
            if input:
                stdin, feeding = pipe()
                closing(theirs, stdin)
            else:
                stdin = closing(theirs, os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
            feeder = ours.enter_context(Feeder(feeding, input))
            job = await self.start_job(request, (stdin, out_theirs, err_theirs))
            ours.callback(job.close)
            theirs.close()
            readers = [Reader(out, max_output_bytes), Reader(err, max_output_bytes)]
            poller = ours.enter_context(Poller())
            following = Following(job, readers, feeder, poller)
            with anyio.move_on_after(timeout_s) as limit:
                await following.until_end()
            timed_out = limit.cancelled_caught
            if timed_out:
                with suppress(OSError):
                    job.send(b"k")
                with anyio.move_on_after(_END_TIMEOUT_S):
                    await following.until_end()
            for reader in readers:
                reader.drain()
            status = following.status
            if status is None and not timed_out:
                if self._running is not None:
                    await ended(self._running.process)
                self._live()
                raise SandboxDiedError("The sandbox died while a command ran in it.")
            stdout, stderr = (reader.kept.output() for reader in readers)
            return ExecResult(
                stdout=stdout,
                stderr=stderr,
                exit_code=status if status is not None and status >= 0 and not timed_out else None,
                signal=-status if status is not None and status < 0 else None,
                timed_out=timed_out,
                wall_s=time.monotonic() - began,
            )

    async def _file(
        self, op: str, path: str, data: bytes, most: int, more: dict[str, object]
    ) -> bytes:
        if "\0" in path or not path:
            raise SandboxFileError(errno.EINVAL, "not a path", path)
        request = self.request(op) | {"path": os.fsencode(path)} | more
        done = await self._run(request, data, _FILE_TIMEOUT_S, 2 * max(most, 4096))
        if done.exit_code == 126:
            raise SandboxFileError(errno.EAGAIN, "the sandbox is full of processes", path)
        if done.exit_code != 0:
            if done.timed_out:
                raise SandboxFileError(
                    errno.ETIMEDOUT, f"no answer within {_FILE_TIMEOUT_S} s", path
                )
            try:
                number, text = cast("tuple[int, str]", marshal.loads(bytes(done.stderr)))
            except (ValueError, EOFError, TypeError):
                raise SandboxError(f"{op} of {path!r} failed: {done}.") from None
            raise SandboxFileError(number, text, path)
        return bytes(done.stdout)


class Feeder:
    """Writes a command's input as it takes it."""

    def __init__(self, fd: int, data: bytes) -> None:
        self.fd, self._left = fd, memoryview(data)
        if fd >= 0:
            os.set_blocking(fd, False)

    def write(self) -> None:
        try:
            written = os.write(self.fd, self._left[:_MOST_INPUT_AT_ONCE])
        except BlockingIOError:
            return
        except OSError:  # it reads no more
            written = len(self._left)
        self._left = self._left[written:]

    @property
    def done(self) -> bool:
        return not self._left

    def close(self) -> None:
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Following:
    """A job's output, input and end."""

    def __init__(
        self, job: socket.socket, readers: list[Reader], feeder: Feeder, poller: Poller
    ) -> None:
        self._job, self._feeder, self._poller = job, feeder, poller
        self.readers = readers
        self._readers = {reader.fd: reader for reader in readers}
        self.status: int | None = None
        self._ended = False
        for fd in (job.fileno(), *self._readers):
            poller.add(fd)
        if feeder.fd >= 0:
            poller.add(feeder.fd, select.EPOLLOUT)

    async def until_end(self) -> None:
        while not self._ended:
            for fd in await self._poller.wait():
                if fd == self._job.fileno():
                    self._hear()
                elif fd == self._feeder.fd:
                    self._feeder.write()
                    if self._feeder.done:
                        self._poller.remove(fd)
                        self._feeder.close()
                elif (reader := self._readers[fd]).read():
                    await reader.hold_back()
                elif not reader.open:
                    self._poller.remove(fd)

    def _hear(self) -> None:
        kind, value = hear(self._job)
        if kind == b"x":
            self.status = value
        elif kind == b"f":
            self.status = 126
            why = f"sandbox: no process could be started: {os.strerror(value)}\n"
            self.readers[-1].kept.add(why.encode())
        self._ended = kind != b""


def hear(job: socket.socket) -> tuple[bytes, int]:
    """What the supervisor says of a job: b"x" and its status, b"f" and an error, b"c" it is gone."""
    try:
        said = job.recv(64)
    except BlockingIOError:
        return b"", 0
    except OSError:
        said = b""
    if not said:
        return b"c", 0
    return said[:1], int(said[1:] or b"0")


class Running:
    """The processes of one sandbox."""

    def __init__(
        self,
        process: subprocess.Popen[bytes],
        control: socket.socket,
        how: Launch,
        cgroups: Cgroups,
        kind: str,
        spec: SandboxSpec,
    ) -> None:
        self.process, self.launch, self.cgroups = process, how, cgroups
        self.state = state()
        self.limits = limits_in_force(kind, spec, self.state, cgroups)
        self._control = control
        self.ready = False
        self._note = self.state.note((process.pid,), cgroups.folders)
        self._ends = time.monotonic() + spec.wall_s if spec.wall_s is not None else None

    @property
    def expired(self) -> bool:
        return self._ends is not None and time.monotonic() > self._ends

    async def start_job(self, request: dict[str, object], fds: Sequence[int]) -> socket.socket:
        written = os.memfd_create("request", os.MFD_CLOEXEC)
        try:
            ours, theirs = _sockets()
        except OSError:
            os.close(written)
            raise
        try:
            _write_all(written, marshal.dumps(request))
            while True:
                try:
                    socket.send_fds(self._control, [b"j"], [written, theirs.fileno(), *fds])
                except BlockingIOError:
                    await anyio.sleep(0.001)  # others may wait, too: no waiting for the socket
                except OSError:
                    raise SandboxDiedError("The sandbox is gone.") from None
                else:
                    return ours
        except BaseException:
            ours.close()
            raise
        finally:
            os.close(written)
            theirs.close()

    def kill(self) -> None:
        """Process 1 ends when its socket does, and the kernel ends all others before it is gone."""
        with suppress(OSError):  # shut down: a fork of ours may hold a copy
            self._control.shutdown(socket.SHUT_WR)
        if not self.ready:
            _kill_group(self.process)

    async def aclose(self) -> None:
        """Kills everything and waits until it is gone."""
        self.kill()
        await ended(self.process)
        # Each of its processes but the commands' holds the other end: it closes with the last of them.
        with anyio.move_on_after(_END_TIMEOUT_S), suppress(OSError):
            while True:
                await anyio.wait_readable(self._control)
                if not self._control.recv(64):
                    break
        self._control.close()
        if self.launch.config["subreaper"]:
            import shutil

            await anyio.to_thread.run_sync(
                lambda: shutil.rmtree(self.launch.tree, ignore_errors=True)
            )
        await self.cgroups.remove()
        self._note.unlink(missing_ok=True)


def _sockets() -> tuple[socket.socket, socket.socket]:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.setblocking(False)
    return ours, theirs


def _write_all(fd: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(fd, left) :]


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    """bwrap's child, which waits for its parent before it asks to die with it, included."""
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


async def ended(process: subprocess.Popen[bytes]) -> None:
    """Waits for the end of a process that has been told to end; kills it after a while."""
    with anyio.move_on_after(_END_TIMEOUT_S) as limit:
        await _exited(process)
    if limit.cancelled_caught:
        _kill_group(process)
        await _exited(process)


async def _exited(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is not None:
        return
    try:
        pidfd = os.pidfd_open(process.pid)
    except OSError:  # no descriptor is left, which must not keep a sandbox from ending
        while process.poll() is None:  # noqa: ASYNC110 - what would tell us takes a descriptor
            await anyio.sleep(0.005)
        return
    try:
        await anyio.wait_readable(pidfd)
        process.wait()
    finally:
        os.close(pidfd)


async def start(spec: SandboxSpec, kind: str) -> Running:
    """Starts the processes of a sandbox; leaves nothing when that fails or is cancelled."""
    await anyio.lowlevel.checkpoint()
    errors = os.memfd_create("errors", os.MFD_CLOEXEC)
    try:
        ours, theirs = _sockets()
    except OSError:
        os.close(errors)
        raise
    cgroups = Cgroups()
    running: Running | None = None
    try:
        here = state()
        cgroups = make_cgroups(spec, here)
        how = launch(kind, spec, here, cgroups, theirs.fileno())
        try:
            process = subprocess.Popen(  # noqa: ASYNC220 - a vfork; from a thread it would die with that
                how.argv,
                stdin=subprocess.PIPE,
                stdout=errors,
                stderr=errors,
                env={"PATH": os.defpath + ":/usr/sbin:/sbin"},
                cwd="/",
                process_group=0,
                pass_fds=how.pass_fds,
            )
        finally:
            for fd in how.pass_fds[1:]:
                os.close(fd)
        theirs.close()
        assert process.stdin is not None
        with process.stdin:
            running = Running(process, ours, how, cgroups, kind, spec)
            if cgroups.folders:
                await anyio.to_thread.run_sync(cgroups.enter, process.pid)
            with suppress(BrokenPipeError):
                process.stdin.write(b"\n")
                process.stdin.flush()
        with anyio.move_on_after(START_TIMEOUT_S):
            await anyio.wait_readable(ours)
            if ours.recv(16) == b"ready":
                running.ready = True
                return running
        said = os.pread(errors, 4096, 0).decode(errors="replace").strip()
        raise SandboxStartError(f"A sandbox of kind {kind!r} did not start: {said or 'no answer'}.")
    except BaseException:
        with anyio.CancelScope(shield=True):
            if running is not None:
                await running.aclose()
            else:
                await cgroups.remove()
        ours.close()
        theirs.close()
        raise
    finally:
        os.close(errors)
