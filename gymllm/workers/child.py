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
from contextlib import suppress
from typing import Any, cast

import gymnasium

from gymllm.bridge import run_sync
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
    async with asyncio.TaskGroup() as group:
        for seat in seats:
            seat.socket.setblocking(False)
            group.create_task(_serve_on_loop(seat))


async def _serve_on_loop(seat: Seat) -> None:
    loop = asyncio.get_running_loop()
    running: asyncio.Task[None] | None = None
    readable = asyncio.Event()
    loop.add_reader(seat.socket.fileno(), readable.set)
    try:
        while True:
            request = seat.reader.read()
            if request is NOTHING:
                readable.clear()
                await readable.wait()
            elif cast("Request", request)[0] == CANCEL:
                if running is not None:
                    running.cancel()
            else:
                running = loop.create_task(_answer(seat, cast("Request", request)))
    except EOFError:
        return
    finally:
        loop.remove_reader(seat.socket.fileno())
        if running is not None:
            running.cancel()


async def _answer(seat: Seat, request: Request) -> None:
    try:
        answer = ok(await run_sync(seat.serve, *request))
    except BaseException as error:
        answer = raised(error)
    loop = asyncio.get_running_loop()
    while answer:
        try:
            answer = send(seat.socket, answer)
        except BlockingIOError:
            writable = asyncio.Event()
            loop.add_writer(seat.socket.fileno(), writable.set)
            try:
                await writable.wait()
            finally:
                loop.remove_writer(seat.socket.fileno())


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
