"""`ProcessWorker`: the environment runs in a process of its own, or shares one.

The process is never forked from the pool's, which may hold threads and accelerators, but from a clean one,
the nursery. It ends with the pool whatever happens to either, and everything that the environment has
started ends with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Awaitable, Callable
from typing import Any, cast

import anyio

from gymllm.bridge import Finished, Reply, running_loop
from gymllm.errors import EnvTypeError
from gymllm.registration import spec_of
from gymllm.workers.frames import NOTHING, FrameReader, encode, send
from gymllm.workers.nursery import FORK, KILL, MESSAGE, MOST_DESCRIPTORS, QUIT, SIGNAL
from gymllm.workers.worker import (
    CANCEL,
    EnvFacts,
    MakeEnv,
    MakeRegistered,
    RemoteError,
    RemoteTrace,
    Request,
    Unsendable,
    WorkerDied,
)

CANCEL_GRACE_S = 0.5
"""How long a cancelled call may take to clean up before its process is killed."""
EXIT_LIMIT_S = 1.0
"""How long a process that was told to end may take before it is killed."""
MOST_MADE = 4
"""Environments that a process makes, one after another, for each that it has room for, where none of them
raised: after a call that was cancelled and cleaned up, say."""
_START_NURSERY = "from gymllm.workers.nursery import main; main()"
MOST_SEATS = MOST_DESCRIPTORS - 1
"""Environments that can share a process: their sockets are handed over at once."""
LOG_TAIL_BYTES = 2_000
LOG_LIMIT_BYTES = 4 << 20
"""A log that is longer is emptied at the next reset."""


class NurseryHandle:
    """The pool's side of a nursery."""

    def __init__(self, made: bytes) -> None:
        """Starts it; it takes messages at once and needs a moment to obey.

        Args:
            made: The pickled function that makes environments, whose modules it imports.
        """
        self._control, theirs = socket.socketpair()
        with tempfile.TemporaryFile() as file, theirs:
            file.write(made)
            file.seek(0)
            self._process = subprocess.Popen(
                [sys.executable, "-c", _START_NURSERY, str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=file,
                start_new_session=True,  # Ctrl-C is the pool's
                env=_environ(),
            )
        self._control.setblocking(False)
        self._processes: dict[int, EnvProcess] = {}
        self._unread = b""
        self.is_down = self._is_abandoned = False
        self._loop = running_loop()
        if self._loop is not None:
            self._loop.add_reader(self._control.fileno(), self.read)

    def fork(self, process: EnvProcess, descriptors: list[int], memory_limit_bytes: int) -> None:
        """Has it fork a process that serves the sockets among the descriptors; the first is its log."""
        self._processes[process.number] = process
        message = MESSAGE.pack(FORK, process.number, memory_limit_bytes)
        self._send(lambda: socket.send_fds(self._control, [message], descriptors))

    def signal(self, process: EnvProcess, signum: int) -> None:
        """Sends a signal to a process."""
        self._send(lambda: self._control.send(MESSAGE.pack(SIGNAL, process.number, signum)))

    def kill(self, process: EnvProcess) -> None:
        """Kills a process and all that it has started."""
        self._send(lambda: self._control.send(MESSAGE.pack(KILL, process.number, 0)))

    def wake(self) -> None:
        """Has it go on where an environment has stopped it (SIGSTOP): it is needed now."""
        self._process.send_signal(signal.SIGCONT)

    def read(self) -> None:
        """Takes what it has said. Called by the loop where that is asyncio's, else by those who wait."""
        try:
            while data := self._control.recv(4096):
                self._unread += data
        except BlockingIOError:
            data = b"-"
        except OSError:
            data = b""
        while len(self._unread) >= MESSAGE.size:
            _, number, code = MESSAGE.unpack_from(self._unread)
            self._unread = self._unread[MESSAGE.size :]
            process = self._processes.pop(number, None)
            if process is not None:
                process.has_ended(code)
        if not data:
            self._go_down()

    def _send(self, send: Callable[[], object]) -> None:
        try:
            send()
        except OSError:
            self._go_down()

    def _go_down(self) -> None:
        """It is gone, and with it all its processes."""
        if self.is_down:
            return
        self.is_down = True
        if self._loop is not None and not self._loop.is_closed():
            self._loop.remove_reader(self._control.fileno())
        if self._is_abandoned:
            self.release()
        processes, self._processes = self._processes, {}
        for process in processes.values():
            process.has_ended(None)

    def quit(self) -> None:
        """Has it end, with all its processes; from any thread."""
        with contextlib.suppress(OSError):
            self._control.send(MESSAGE.pack(QUIT, 0, 0))

    def abandon(self) -> None:
        """As `quit`; what is held here is freed when it is gone."""
        self._is_abandoned = True
        self.quit()

    def release(self) -> None:
        """Ends it, and frees what is held here, where its loop is closed."""
        self.quit()
        self.is_down = True
        processes, self._processes = self._processes, {}
        for process in processes.values():
            process.release()
        self._control.close()
        # Somebody must take note of its end, and nothing waits here any more.
        threading.Thread(target=self._process.wait, name="gymllm-nursery-end", daemon=True).start()

    async def aclose(self) -> None:
        """Ends it, and what is left of its processes."""
        self.wake()
        self.quit()
        self._go_down()
        self._control.close()
        with anyio.CancelScope(shield=True):
            with anyio.move_on_after(EXIT_LIMIT_S):
                while self._process.poll() is None:  # noqa: ASYNC110 - portable, and only a moment
                    await anyio.sleep(0.002)
            if self._process.poll() is None:
                self._process.kill()
                self._process.wait()


def _environ() -> dict[str, str]:
    """The nursery's environment variables: it must find all that this process can import."""
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    environ = {**os.environ, "PYTHONPATH": path}
    if "PYTHONPATH" in os.environ:
        environ["GYMLLM_PYTHONPATH"] = os.environ["PYTHONPATH"]
    # Threads of a BLAS don't survive a fork, and there are as many processes as the user wants busy.
    environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    return environ


class EnvProcess:
    """One process with room for some environments."""

    def __init__(
        self, number: int, seats: int, nursery: NurseryHandle, *, memory_limit_bytes: int | None
    ) -> None:
        """Starts it.

        Args:
            number: Its name between pool and nursery.
            seats: Environments it has room for.
            nursery: Forks it.
            memory_limit_bytes: Its RLIMIT_DATA.
        """
        self.number, self._nursery = number, nursery
        self._log = tempfile.TemporaryFile(prefix="gymllm-worker-")  # noqa: SIM115 - until aclose
        ours, theirs = zip(*(socket.socketpair() for _ in range(seats)), strict=True)
        self._channels: list[Channel] = [Channel(end) for end in ours]
        self.free: list[Channel] = list(self._channels)
        self.is_worn = False
        """Whether an environment raised in it, and may have left anything behind."""
        self.made = 0
        """Environments that were made in it."""
        self.is_alive = True
        self._code: int | None = None
        self._closed = False
        # Opened anew for appending, so that emptying the log leaves no hole before what follows.
        log = os.open(f"/dev/fd/{self._log.fileno()}", os.O_WRONLY | os.O_APPEND)
        try:
            descriptors = [log, *(end.fileno() for end in theirs)]
            nursery.fork(self, descriptors, memory_limit_bytes or 0)
        finally:
            os.close(log)
            for end in theirs:
                end.close()

    def has_ended(self, code: int | None) -> None:
        """It has ended, says the nursery: with this exit code, or None if that can't be known."""
        self.is_alive, self._code = False, code
        for channel in self._channels:
            channel.hang_up()

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
        text = tail.decode(errors="replace").strip()
        return "".join(
            c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text
        )

    def trim_log(self) -> None:
        """Empties a log that has grown long. Costs a system call."""
        if os.fstat(self._log.fileno()).st_size > LOG_LIMIT_BYTES:
            os.ftruncate(self._log.fileno(), 0)

    def interrupt(self) -> None:
        """Raises `KeyboardInterrupt` in the environment's code."""
        self._nursery.signal(self, signal.SIGINT)

    def how_it_ended(self) -> str:
        """In words, for a process that has ended."""
        if self._code is None:
            return "the environment's process no longer answers"
        if self._code >= 0:
            return f"the environment's process exited with status {self._code}"
        try:
            name = signal.Signals(-self._code).name
        except ValueError:
            name = f"signal {-self._code}"
        hint = " (out of memory?)" if name == "SIGKILL" else ""
        return f"the environment's process was killed by {name}{hint}"

    async def wait_ended(self, limit_s: float) -> bool:
        """Waits until it has ended; False if it has not within the limit."""
        with anyio.move_on_after(limit_s):
            while self.is_alive:
                self._nursery.read()
                await anyio.sleep(0.001)
        return not self.is_alive

    async def aclose(self, *, kill: bool = False) -> None:
        """Ends it and all it has started: by asking, or by force. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self._nursery.wake()
        with anyio.CancelScope(shield=True):
            for channel in self._channels:
                channel.close()
            if kill or not await self.wait_ended(EXIT_LIMIT_S):
                self._nursery.kill(self)
                await self.wait_ended(EXIT_LIMIT_S)
            self._log.close()

    def release(self) -> None:
        """Frees what is held here for a process that has ended."""
        self._closed = True
        self.is_alive = False
        for channel in self._channels:
            channel.release()
        self._log.close()


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
        self._waits = False  # in `_until`
        self.is_down = False

    async def ask(self, encoded: list[memoryview]) -> object:
        """Sends a request, encoded, and returns its answer.

        Raises:
            EOFError: The process is gone.
        """
        await self._send(encoded)
        return await self.answer()

    async def answer(self) -> object:
        """Waits for the answer to the last request, also after an earlier wait was cancelled."""
        loop = running_loop()
        while self._answer is NOTHING and self._error is None:
            if self.is_down:
                raise EOFError
            if loop is None:
                await self._until(anyio.wait_readable)
                if not self.is_down:
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
        if self._waits:  # nothing else ends that wait, and another socket may get its number
            anyio.notify_closing(self._socket)
        self._wake()

    def close(self) -> None:
        """Closes the socket, which tells the process to end."""
        self.hang_up()
        self._socket.close()

    def release(self) -> None:
        """Closes the socket where nobody waits any more."""
        self._waiter = None
        self.close()

    async def _send(self, parts: list[memoryview]) -> None:
        try:
            while parts:
                try:
                    parts = send(self._socket, parts)
                except BlockingIOError:
                    await self._until(anyio.wait_writable)
                    if self.is_down:
                        return
        except OSError:
            self.hang_up()

    async def _until(self, ready: Callable[[socket.socket], Awaitable[None]]) -> None:
        """Waits for the socket, no longer than until `hang_up`."""
        self._waits = True
        try:
            with contextlib.suppress(anyio.ClosedResourceError):
                await ready(self._socket)
        finally:
            self._waits = False

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

    def __init__(
        self, make_env: MakeEnv, *, envs_per_process: int, memory_limit_bytes: int | None
    ) -> None:
        """Starts nothing yet.

        Args:
            make_env: Makes an environment, in its process. It is sent by cloudpickle, so a function of a
                script or a notebook will do.
            envs_per_process: Environments that share a process.
            memory_limit_bytes: RLIMIT_DATA of a process.
        """
        self._make_env = make_env
        self._made: bytes | None = None
        self._seats, self._memory_limit_bytes = envs_per_process, memory_limit_bytes
        self._nursery: NurseryHandle | None = None
        self._started = 0
        self._open: list[EnvProcess] = []

    @property
    def made(self) -> bytes:
        """`make_env`, pickled.

        Raises:
            Exception: Whatever pickling raised.
        """
        if self._made is None:
            # Imported where it is needed; Gymnasium depends on it.
            cloudpickle = importlib.import_module("cloudpickle")
            spec = spec_of(self._make_env)
            make_env = MakeRegistered(self._make_env, spec) if spec else self._make_env
            self._made = cast("bytes", cloudpickle.dumps(make_env))
        return self._made

    def take(self) -> tuple[EnvProcess, Channel]:
        """A free seat."""
        for process in [process for process in self._open if not process.is_alive]:
            self._open.remove(process)
            if process.is_unused:  # else the last of its environments closes it
                process.release()
        self._open = [process for process in self._open if process.free]
        if not self._open:
            if self._nursery is not None and self._nursery.is_down:
                self._nursery.release()
                self._nursery = None
            if self._nursery is None:
                self._nursery = NurseryHandle(self.made)
            self._started += 1
            limit = self._memory_limit_bytes
            self._open.append(
                EnvProcess(self._started, self._seats, self._nursery, memory_limit_bytes=limit)
            )
        process = self._open[0]
        process.made += 1
        return process, process.free.pop()

    async def give_back(self, process: EnvProcess, channel: Channel, *, healthy: bool) -> None:
        """Takes a seat back, whose environment is closed if it is healthy.

        The process stays for others while it is well and has not made too many.
        """
        if healthy and not channel.is_down:
            process.free.append(channel)
            fresh = not process.is_worn and process.made < MOST_MADE * self._seats
            if not process.is_unused or fresh:
                if process not in self._open:
                    self._open.append(process)
                return
        if process in self._open:
            self._open.remove(process)
        await process.aclose(kill=not healthy)

    def abandon(self) -> None:
        """Has everything end, without waiting; from any thread."""
        if self._nursery is not None:
            self._nursery.abandon()

    def forget(self) -> None:
        """Lets go of everything that belongs to a loop that is closed."""
        if self._nursery is not None:
            self._nursery.release()
        self._nursery, self._open = None, []

    async def aclose(self) -> None:
        """Ends the processes that are left, the nursery, and whatever else is there."""
        left, self._open = self._open, []
        nursery, self._nursery = self._nursery, None
        if nursery is not None:
            async with anyio.create_task_group() as group:
                for process in left:
                    group.start_soon(process.aclose)
            await nursery.aclose()


class ProcessWorker:
    """Runs one environment in another process. Used from one loop."""

    def __init__(self, processes: EnvProcesses) -> None:
        """Starts nothing yet; `processes` gives it its seat."""
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
        made = self._processes.made
        self._process, self._channel = self._processes.take()
        if self._process.made > 1:  # it has idled, and may have died in the meantime
            try:
                return cast("EnvFacts", await self._ask("start", (made,), {}))
            except WorkerDied:
                await self.aclose()
                self._healthy = True
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
            encoded = encode(request)
        except Exception as error:
            raise Unsendable.of(request, f"{type(error).__name__}: {error}") from error
        try:
            answer = cast("tuple[Any, ...]", await channel.ask(encoded))
        except EOFError:
            self._healthy = False
            await process.wait_ended(EXIT_LIMIT_S)
            raise WorkerDied(process.how_it_ended()) from None
        if answer[0] == "ok":
            return answer[1]
        if answer[0] == "unread":
            raise Unsendable.of(request, str(answer[1]))
        trace = cast("RemoteTrace", answer[1])
        # What did not fit may fill the process still.
        kind, _, text = trace.summary.partition(":")
        self._healthy = "MemoryError" not in kind
        if kind == EnvTypeError.__name__:  # `Env` has looked at the answer there
            raise EnvTypeError(text.strip().rstrip("."))
        process.is_worn = True
        raise RemoteError(trace)

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
