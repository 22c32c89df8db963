"""What runs in the process of a `ProcessWorker`: `python -m gymllm.workers.child`.

One socket an environment. A request is `(method, args, kwargs)`, an answer is `("ok", value)` or
`("raised", summary, traceback)`. One environment is served in the main thread, so that the pool can
interrupt it (SIGINT raises `KeyboardInterrupt` in whatever it does); several share an event loop, so that
those that wait asynchronously do so at the same time.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import signal
import socket
import sys
import threading
import traceback
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any, cast

import gymnasium

from gymllm.bridge import Finished, start_sync
from gymllm.workers.frames import NOTHING, FrameReader, encode, send
from gymllm.workers.worker import EnvFacts, MakeEnv, invoke

CANCEL = "cancel"
"""Request that cancels the one before it; it is not answered."""
Request = tuple[str, tuple[Any, ...], dict[str, Any]]


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
            self._env = env = make_env()
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
        shown = repr(value)
        shown = shown if len(shown) <= 200 else f"{shown[:197]}..."
        return raised(TypeError(f"the answer {shown} can't leave its process: {error}"))


def raised(error: BaseException) -> list[memoryview]:
    """An answer that says what was raised, in words: the exception itself may not be picklable."""
    try:
        summary = f"{type(error).__name__}: {error}"
    except Exception:  # a __str__ that raises
        summary = type(error).__name__
    return encode(("raised", summary, "".join(traceback.format_exception(error))))


class Interrupts:
    """SIGINT raises `KeyboardInterrupt`, but only while the environment runs."""

    def __init__(self) -> None:
        self.armed = False
        signal.signal(signal.SIGINT, self._handle)

    def _handle(self, signum: int, frame: object) -> None:
        if self.armed:
            self.armed = False
            raise KeyboardInterrupt


def serve_one(seat: Seat) -> None:
    """Serves one environment in this thread until the pool hangs up."""
    interrupts = Interrupts()
    with suppress(EOFError):
        while True:
            request = cast("Request", seat.reader.read())
            try:
                try:
                    interrupts.armed = True
                    value = seat.serve(*request)
                finally:
                    interrupts.armed = False
            except BaseException as error:
                answer = raised(error)
            else:
                answer = ok(value)
            while answer:
                answer = send(seat.socket, answer)


async def serve_many(seats: list[Seat]) -> None:
    """Serves several environments on one event loop until the pool hangs up."""
    ended = asyncio.Event()
    for seat in seats:
        seat.socket.setblocking(False)
        _OnLoop(seat, asyncio.get_running_loop(), ended)
    await ended.wait()


class _OnLoop:
    """Serves one of several environments; what does not have to wait is answered on the spot."""

    def __init__(self, seat: Seat, loop: asyncio.AbstractEventLoop, ended: asyncio.Event) -> None:
        self._seat, self._loop, self._ended = seat, loop, ended
        self._running: asyncio.Task[None] | None = None
        loop.add_reader(seat.socket.fileno(), self._on_readable)

    def _on_readable(self) -> None:
        try:
            while (request := self._seat.reader.read()) is not NOTHING:
                self._take(cast("Request", request))
        except (EOFError, OSError):
            self._loop.remove_reader(self._seat.socket.fileno())
            self._ended.set()  # the pool closes all of them or none

    def _take(self, request: Request) -> None:
        if request[0] == CANCEL:
            if self._running is not None:
                self._running.cancel()
            return
        try:
            started = start_sync(self._seat.serve, *request)
        except BaseException as error:
            self._send(raised(error))
        else:
            if isinstance(started, Finished):
                self._send(ok(started.value))
            else:
                self._running = self._loop.create_task(self._wait(started))

    async def _wait(self, started: Coroutine[object, object, object]) -> None:
        try:
            answer = ok(await started)
        except BaseException as error:
            answer = raised(error)
        self._send(answer)

    def _send(self, answer: list[memoryview]) -> None:
        self._loop.remove_writer(self._seat.socket.fileno())
        try:
            while answer:
                answer = send(self._seat.socket, answer)
        except BlockingIOError:
            self._loop.add_writer(self._seat.socket.fileno(), self._send, answer)
        except OSError:
            return  # the pool is gone, which the reader will see


def _end_with_the_pool(life: int) -> None:
    """Ends this process, and all it has started, once the pool's is gone, whatever it does then."""
    os.read(life, 1)  # nothing is ever written: this returns at the end of the other side
    os.killpg(0, signal.SIGKILL)


def _limit_memory(limit_bytes: int) -> None:
    import resource

    which = resource.RLIMIT_DATA if sys.platform == "linux" else resource.RLIMIT_AS
    resource.setrlimit(which, (limit_bytes, limit_bytes))


def main() -> None:
    """`child.py LIFE MEMORY_LIMIT SOCKET...`: descriptors, and bytes or 0."""
    life, memory_limit_bytes, *sockets = (int(word) for word in sys.argv[1:])
    original = os.environ.pop("GYMLLM_PYTHONPATH", None)
    if (
        original is None
    ):  # ours brought the pool's sys.path; the environment's children get the user's
        os.environ.pop("PYTHONPATH", None)
    else:
        os.environ["PYTHONPATH"] = original
    threading.Thread(target=_end_with_the_pool, args=(life,), daemon=True).start()
    if memory_limit_bytes:
        _limit_memory(memory_limit_bytes)
    seats = [Seat(socket.socket(fileno=number)) for number in sockets]
    with suppress(ConnectionError):  # the pool hung up in the middle of an answer
        if len(seats) == 1:
            serve_one(seats[0])
        else:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            asyncio.run(serve_many(seats))


if __name__ == "__main__":
    main()
