"""What runs in the process of a `ProcessWorker`.

One socket an environment. A request is `(method, args, kwargs)`, an answer is `("ok", value)` or
`("raised", RemoteTrace)`. Everything runs in the main thread, on one event loop: environments that
share the process wait at the same time, and one that is alone can be interrupted in whatever it does.
"""

from __future__ import annotations

import asyncio
import atexit
import os
import pickle
import signal
import socket
import sys
from collections.abc import Coroutine, Generator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, cast

import gymnasium
import numpy as np

from gymllm.bridge import Finished, start_sync
from gymllm.workers.frames import NOTHING, FrameReader, encode, send
from gymllm.workers.worker import CANCEL, EnvFacts, MakeEnv, RemoteTrace, Request, invoke, made_by


class Seat:
    """One environment and its socket."""

    def __init__(self, sock: socket.socket) -> None:
        self.socket = sock
        self.reader = FrameReader(sock)
        self._env: gymnasium.Env[Any, Any] | None = None

    def serve(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
        """Does what is asked for."""
        if method == "start":
            make_env: MakeEnv = pickle.loads(args[0])  # made by cloudpickle
            self._env = env = made_by(make_env)
            return EnvFacts.of(env)
        env = self._env
        if method == "close":
            self._env = None
            return env.close() if env is not None else None
        assert env is not None, "start comes first"
        return invoke(env, method, args, kwargs)


def ok(value: object) -> list[memoryview]:
    """An answer; that it can't be sent is one too."""
    try:
        return encode(("ok", value))
    except Exception as error:
        try:
            shown = repr(value)
        except Exception:  # a __repr__ that raises
            shown = f"of type {type(value).__name__}"
        shown = shown if len(shown) <= 200 else f"{shown[:197]}..."
        return raised(TypeError(f"the answer {shown} can't leave its process: {error}"))


def raised(error: BaseException) -> list[memoryview]:
    """An answer that says what was raised, in words: the exception itself may not be picklable."""
    return encode(("raised", RemoteTrace.of(error)))


class Interrupts:
    """SIGINT raises `KeyboardInterrupt` in the environment's code, and nowhere else."""

    def __init__(self, *, wanted: bool) -> None:
        """Takes the signal over.

        Args:
            wanted: False ignores it: where several environments run, it would hit any of them.
        """
        self._running = False
        signal.signal(signal.SIGINT, self._handle if wanted else signal.SIG_IGN)

    def _handle(self, signum: int, frame: object) -> None:
        if self._running:
            self._running = False
            raise KeyboardInterrupt

    @contextmanager
    def running(self) -> Generator[None]:
        """Around the environment's code."""
        self._running = True
        try:
            yield
        finally:
            self._running = False

    def over(self, rest: Coroutine[object, Any, object]) -> Generator[object, Any, object]:
        """Awaits the rest of a call, with `running` around each of its steps."""
        value, error = None, None
        while True:
            try:
                with self.running():
                    waiting = rest.send(value) if error is None else rest.throw(error)
            except StopIteration as stop:
                return stop.value
            value, error = None, None
            try:
                value = yield waiting
            except BaseException as thrown:
                error = thrown


class Server:
    """Serves one environment; what does not have to wait is answered on the spot."""

    def __init__(self, seat: Seat, interrupts: Interrupts, ended: asyncio.Event) -> None:
        """Begins on the running loop; sets `ended` when the pool hangs up."""
        self._seat, self._interrupts, self._ended = seat, interrupts, ended
        self._loop = asyncio.get_running_loop()
        self._call: asyncio.Task[None] | None = None
        self._pid = os.getpid()
        seat.socket.setblocking(False)
        self._loop.add_reader(seat.socket.fileno(), self._on_readable)

    def _on_readable(self) -> None:
        try:
            # What is left in the socket has the loop call again; that costs less than to look twice.
            while (request := self._read()) is not NOTHING:
                self._take(cast("Request", request))
                if not self._seat.reader.holds_more:
                    break
        except (EOFError, OSError):
            self._loop.remove_reader(self._seat.socket.fileno())
            self._ended.set()  # the pool closes all of them or none

    def _read(self) -> object:
        try:
            return self._seat.reader.read()
        except (EOFError, OSError):
            raise
        except Exception as error:  # it can't be unpickled here
            self._send(encode(("unread", f"{type(error).__name__}: {error}")))
            return NOTHING

    def _take(self, request: Request) -> None:
        if request[0] == CANCEL:
            if self._call is not None:
                self._call.cancel()
            return
        try:
            with self._interrupts.running():
                started = start_sync(self._seat.serve, *request)
        except BaseException as error:
            self._send(raised(error))
        else:
            if isinstance(started, Finished):
                self._send(ok(started.value))
            else:
                self._call = self._loop.create_task(self._wait(started))

    async def _wait(self, rest: Coroutine[object, Any, object]) -> None:
        try:
            answer = ok(await _Awaitable(self._interrupts.over(rest)))
        except BaseException as error:
            answer = raised(error)
        self._send(answer)

    def _send(self, answer: list[memoryview]) -> None:
        if (
            os.getpid() != self._pid
        ):  # the environment forked, and its child came back out of its code
            os._exit(1)
        try:
            while answer:
                answer = send(self._seat.socket, answer)
        except BlockingIOError:
            self._loop.add_writer(self._seat.socket.fileno(), self._send_rest, answer)
        except OSError:
            return  # the pool is gone, which the reader will see

    def _send_rest(self, answer: list[memoryview]) -> None:
        self._loop.remove_writer(self._seat.socket.fileno())
        self._send(answer)


class _Awaitable:
    """A generator of what is waited for, to be awaited."""

    def __init__(self, steps: Generator[object, Any, object]) -> None:
        self._steps = steps

    def __await__(self) -> Generator[object, Any, object]:
        return self._steps


async def serve(seats: list[Seat]) -> None:
    """Serves environments until the pool hangs up."""
    ended = asyncio.Event()
    interrupts = Interrupts(wanted=len(seats) == 1)
    servers = [Server(seat, interrupts, ended) for seat in seats]
    await ended.wait()
    del servers


def main(sockets: Sequence[int], memory_limit_bytes: int) -> None:
    """Serves an environment a socket until the pool hangs up.

    Args:
        sockets: Descriptors.
        memory_limit_bytes: How much data the process may hold; 0 is no limit.
    """
    if memory_limit_bytes:
        import resource

        which = resource.RLIMIT_DATA if sys.platform == "linux" else resource.RLIMIT_AS
        resource.setrlimit(which, (memory_limit_bytes, memory_limit_bytes))
    np.random.seed()  # the global state, which forks would otherwise have in common
    for number in sockets:
        os.set_inheritable(number, False)
    seats = [Seat(socket.socket(fileno=number)) for number in sockets]
    with suppress(ConnectionError):  # the pool hung up in the middle of an answer
        asyncio.run(serve(seats))
    # What libraries want done at the end is done; taking the interpreter apart would take longer.
    atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage]
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
