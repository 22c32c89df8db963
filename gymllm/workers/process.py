"""`ProcessWorker`: the environment runs in a process of its own, or shares one.

The process is started clean (never forked from the pool's), in a session of its own. It ends with the pool
whatever happens to either, and takes everything that the environment has started with it: by process group,
and, for what has left that, by a mark in the environment variables that children inherit.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable
from typing import Any, cast

import anyio
import anyio.to_thread

from gymllm.bridge import Finished, Reply, running_loop
from gymllm.workers.frames import NOTHING, FrameReader, encode, send
from gymllm.workers.worker import CANCEL, EnvFacts, MakeEnv, RemoteError, Request, WorkerDied

CANCEL_GRACE_S = 0.5
"""How long a cancelled call may take to clean up before its process is killed."""
EXIT_LIMIT_S = 1.0
"""How long a process that was told to end may take before it is killed."""
LOG_TAIL_BYTES = 2_000
LOG_LIMIT_BYTES = 4 << 20
"""A log that is longer is emptied at the next reset."""
_MARK = "GYMLLM_WORKER"
_MOST_ROUNDS = 100


class EnvProcess:
    """One process with room for some environments."""

    def __init__(self, seats: int, *, memory_limit_bytes: int | None, mark: str) -> None:
        """Starts it.

        Args:
            seats: Environments it has room for.
            memory_limit_bytes: Its RLIMIT_DATA.
            mark: What it and all that it starts carry in their environment variables.
        """
        self._mark = mark
        self._log = tempfile.TemporaryFile(prefix="gymllm-worker-")  # noqa: SIM115 - until aclose
        life, self._life = os.pipe()
        ours, theirs = zip(*(socket.socketpair() for _ in range(seats)), strict=True)
        try:
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-m", "gymllm.workers.child"),
                    *(str(life), str(memory_limit_bytes or 0)),
                    *(str(end.fileno()) for end in theirs),
                ],
                pass_fds=(life, *(end.fileno() for end in theirs)),
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
                start_new_session=True,
                env=self._environ(),
            )
        finally:
            os.close(life)
            for end in theirs:
                end.close()
        self.pid = self._process.pid
        self._channels: list[Channel] = [Channel(end) for end in ours]
        self.free: list[Channel] = list(self._channels)
        self._reaped = False
        self._watch = self._watch_death()

    def _environ(self) -> dict[str, str]:
        path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
        environ = {**os.environ, "PYTHONPATH": path, _MARK: self._mark}
        if "PYTHONPATH" in os.environ:
            environ["GYMLLM_PYTHONPATH"] = os.environ["PYTHONPATH"]
        return environ

    @property
    def is_alive(self) -> bool:
        """Whether it still runs."""
        return self._process.poll() is None

    @property
    def shares(self) -> bool:
        """Whether it has room for several environments."""
        return len(self._channels) > 1

    @property
    def is_unused(self) -> bool:
        """Whether every seat is free."""
        return len(self.free) == len(self._channels)

    @property
    def log_tail(self) -> str:
        """The end of what it has printed."""
        if self._log.closed:
            return ""
        size = os.fstat(self._log.fileno()).st_size
        tail = os.pread(self._log.fileno(), LOG_TAIL_BYTES, max(size - LOG_TAIL_BYTES, 0))
        return tail.decode(errors="replace").strip()

    def trim_log(self) -> None:
        """Empties a log that has grown long. Costs a system call."""
        if os.fstat(self._log.fileno()).st_size > LOG_LIMIT_BYTES:
            os.ftruncate(self._log.fileno(), 0)

    def interrupt(self) -> None:
        """Raises `KeyboardInterrupt` in the environment's code."""
        if self.is_alive:
            self._process.send_signal(signal.SIGINT)

    def how_it_ended(self) -> str:
        """In words, for a process that has ended."""
        code = self._process.returncode
        if code is None:
            return "the environment's process no longer answers"
        if code >= 0:
            return f"the environment's process exited with status {code}"
        try:
            name = signal.Signals(-code).name
        except ValueError:
            name = f"signal {-code}"
        hint = " (out of memory?)" if name == "SIGKILL" else ""
        return f"the environment's process was killed by {name}{hint}"

    async def wait_ended(self, limit_s: float) -> bool:
        """Waits until it has ended; False if it has not within the limit."""
        with anyio.move_on_after(limit_s):
            while self.is_alive:  # noqa: ASYNC110 - portable; a moment at the end of a process
                await anyio.sleep(0.002)
        return not self.is_alive

    async def aclose(self) -> None:
        """Ends it and all it has started: by asking, then by force. Idempotent."""
        if self._reaped:
            return
        self._reaped = True
        with anyio.CancelScope(shield=True):
            for channel in self._channels:
                channel.close()
            clean = await self.wait_ended(EXIT_LIMIT_S)
            self._kill(everything=False)
            if not clean:
                await anyio.to_thread.run_sync(self._kill)
                await self.wait_ended(EXIT_LIMIT_S)
            self._unwatch()
            os.close(self._life)
            self._log.close()

    async def kill(self) -> None:
        """Ends it and all it has started at once. Idempotent."""
        if self._reaped:
            return
        with anyio.CancelScope(shield=True):
            await anyio.to_thread.run_sync(self._kill)
            await self.wait_ended(EXIT_LIMIT_S)

    def _kill(self, everything: bool = True) -> None:
        """Kills the process group and, with `everything`, whoever carries the mark elsewhere."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        if everything:
            _kill_marked(self._mark)

    def _watch_death(self) -> int | None:
        """Has the loop notice its death even if a child of it holds its sockets open."""
        loop = running_loop()
        if loop is None or not hasattr(os, "pidfd_open"):
            return None
        descriptor = os.pidfd_open(self.pid)
        loop.add_reader(descriptor, self._died, loop, descriptor)
        return descriptor

    def _died(self, loop: asyncio.AbstractEventLoop, descriptor: int) -> None:
        loop.remove_reader(descriptor)
        for channel in self._channels:
            channel.hang_up()

    def _unwatch(self) -> None:
        descriptor, self._watch = self._watch, None
        if descriptor is not None:
            loop = running_loop()
            if loop is not None:
                loop.remove_reader(descriptor)
            os.close(descriptor)


def _kill_marked(mark: str) -> None:
    """Kills every process that carries the mark, until none is left: they may be starting others."""
    for _ in range(_MOST_ROUNDS):
        found = _marked(mark)
        if not found:
            return
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.001)


def _marked(mark: str) -> set[int]:
    """Processes whose mark begins so and that are not dead yet (Linux; elsewhere none is found)."""
    wanted = f"{_MARK}={mark}".encode()
    found: set[int] = set()
    for name in os.listdir("/proc") if sys.platform == "linux" else ():
        if name.isdigit():
            with contextlib.suppress(OSError), open(f"/proc/{name}/environ", "rb") as file:
                if wanted in file.read():  # a zombie's is empty
                    found.add(int(name))
    return found


class Channel:
    """Requests to one seat of a process, one at a time."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._reader = FrameReader(sock)
        self._answer: object = NOTHING
        self._error: Exception | None = None
        self._waiter: Reply[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None  # that reads, where it is asyncio's
        self.is_down = False

    async def ask(self, request: Request) -> object:
        """Sends a request and returns its answer.

        Raises:
            EOFError: The process is gone.
        """
        await self._send(encode(request))
        return await self.answer()

    async def answer(self) -> object:
        """Waits for the answer to the last request, also after an earlier wait was cancelled."""
        loop = running_loop()
        while self._answer is NOTHING and self._error is None:
            if self.is_down:
                raise EOFError
            if loop is None:
                await anyio.wait_readable(self._socket)
                self._on_readable()
                continue
            if self._loop is None:
                self._loop = loop
                loop.add_reader(self._socket.fileno(), self._on_readable)
            self._waiter = Reply[None]()
            await self._waiter.wait()
        answer, self._answer = self._answer, NOTHING
        error, self._error = self._error, None
        if error is not None:
            raise error
        return answer

    async def post(self, request: Request) -> None:
        """Sends a request that has no answer."""
        if not self.is_down:
            await self._send(encode(request))

    def hang_up(self) -> None:
        """Tells whoever waits that the process is gone."""
        loop, self._loop = self._loop, None
        if loop is not None and not loop.is_closed():
            loop.remove_reader(self._socket.fileno())
        self.is_down = True
        self._wake()

    def close(self) -> None:
        """Closes the socket, which tells the process to end."""
        self.hang_up()
        self._socket.close()

    async def _send(self, parts: list[memoryview]) -> None:
        try:
            while parts:
                try:
                    parts = send(self._socket, parts)
                except BlockingIOError:
                    await anyio.wait_writable(self._socket)
        except OSError:
            self.hang_up()

    def _on_readable(self) -> None:
        try:
            self._answer = self._reader.read()
        except (EOFError, OSError):
            self.hang_up()
        except Exception as error:  # an answer that can't be unpickled here
            self._error = error
        if self._answer is not NOTHING or self._error is not None:
            self._wake()

    def _wake(self) -> None:
        if self._waiter is not None:
            self._waiter.set(None)


class EnvProcesses:
    """Gives environments a seat: in a process with room, else in a new one."""

    def __init__(self, *, envs_per_process: int, memory_limit_bytes: int | None) -> None:
        self._seats, self._memory_limit_bytes = envs_per_process, memory_limit_bytes
        self._mark = f"{os.getpid()}-{secrets.token_hex(8)}"
        self._started = 0
        self._open: list[EnvProcess] = []

    def take(self) -> tuple[EnvProcess, Channel]:
        """A free seat."""
        self._open = [process for process in self._open if process.is_alive and process.free]
        if not self._open:
            self._started += 1
            self._open.append(
                EnvProcess(
                    self._seats,
                    memory_limit_bytes=self._memory_limit_bytes,
                    mark=f"{self._mark}-{self._started}.",
                )
            )
        process = self._open[0]
        return process, process.free.pop()

    async def give_back(self, process: EnvProcess, channel: Channel, *, healthy: bool) -> None:
        """Takes a seat back; a process ends with the last of its environments, or because of one."""
        if healthy and not channel.is_down:
            process.free.append(channel)
            if not process.is_unused:
                if process not in self._open:
                    self._open.append(process)
                return
        if process in self._open:
            self._open.remove(process)
        if not healthy:
            await process.kill()
        await process.aclose()

    async def aclose(self) -> None:
        """Ends whatever its processes have started and left behind."""
        if self._started:
            with anyio.CancelScope(shield=True):
                await anyio.to_thread.run_sync(_kill_marked, self._mark)


class ProcessWorker:
    """Runs one environment in another process. Used from one loop."""

    def __init__(self, make_env: MakeEnv, processes: EnvProcesses) -> None:
        """Starts nothing yet.

        Args:
            make_env: Called in the process. It is sent by cloudpickle, so a function of a script or a
                notebook will do.
            processes: Where it gets its seat.
        """
        self._make_env = make_env
        self._processes = processes
        self._process: EnvProcess | None = None
        self._channel: Channel | None = None
        self._healthy = True

    @property
    def is_lost(self) -> bool:
        return not self._healthy or (self._process is not None and not self._process.is_alive)

    @property
    def log_tail(self) -> str:
        return self._process.log_tail if self._process is not None else ""

    async def start(self) -> EnvFacts:
        # Imported where it is needed; Gymnasium depends on it.
        cloudpickle = importlib.import_module("cloudpickle")
        made = cast("bytes", cloudpickle.dumps(self._make_env))
        self._process, self._channel = self._processes.take()
        return cast("EnvFacts", await self._ask("start", (made,), {}))

    def call(
        self, method: str, *args: object, **kwargs: object
    ) -> Finished[object] | Awaitable[object]:
        if method == "reset" and self._process is not None:
            self._process.trim_log()
        return self._ask(method, args, kwargs)

    async def aclose(self) -> None:
        process, channel = self._process, self._channel
        if process is None or channel is None:
            return
        self._process = self._channel = None
        clean = False
        try:
            if self._healthy and process.is_alive:
                await self._answered(process, channel, ("close", (), {}))
            clean = self._healthy
        except RemoteError:
            clean = True  # its close raised; the process itself is well
            raise
        finally:
            with anyio.CancelScope(shield=True):
                await self._processes.give_back(process, channel, healthy=clean)

    async def _ask(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        process, channel = self._process, self._channel
        assert process is not None, "start() comes first"
        assert channel is not None, "a process was taken with a channel"
        try:
            return await self._answered(process, channel, (method, args, kwargs))
        except anyio.get_cancelled_exc_class():
            await self._cancel(process, channel)
            raise

    async def _answered(self, process: EnvProcess, channel: Channel, request: Request) -> object:
        try:
            answer = cast("tuple[Any, ...]", await channel.ask(request))
        except EOFError:
            self._healthy = False
            await process.wait_ended(EXIT_LIMIT_S)
            raise WorkerDied(process.how_it_ended()) from None
        if answer[0] == "ok":
            return answer[1]
        raise RemoteError(answer[1], answer[2])

    async def _cancel(self, process: EnvProcess, channel: Channel) -> None:
        """Cancels the call and waits a moment for it to clean up; else the process must go."""
        with anyio.CancelScope(shield=True):
            await channel.post((CANCEL, (), {}))
            for interrupt in (False, True):
                if interrupt and not process.shares:  # it does not wait, so it heard nothing yet
                    process.interrupt()
                with anyio.move_on_after(CANCEL_GRACE_S / 2), contextlib.suppress(EOFError):
                    await channel.answer()
                    return
            self._healthy = False
