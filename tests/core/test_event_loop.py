"""The loop with fine timers is asyncio's loop in everything else."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable
from typing import Any

import anyio
import pytest

from gymllm.event_loop import LOOP_OPTIONS


def run(main: Callable[[], Any]) -> Any:
    return anyio.run(main, backend_options=LOOP_OPTIONS)


def test_timers_go_off_in_order_and_not_early() -> None:
    async def main() -> list[float]:
        loop = asyncio.get_running_loop()
        gone: list[float] = []

        async def wait(seconds: float) -> None:
            due = loop.time() + seconds
            await asyncio.sleep(seconds)
            assert loop.time() >= due - 1e-6
            gone.append(seconds)

        await asyncio.gather(*(wait(s) for s in (0.003, 0.0004, 0.002, 0.0, 0.001)))
        return gone

    assert run(main) == [0.0, 0.0004, 0.001, 0.002, 0.003]


@pytest.mark.skipif(sys.platform != "linux", reason="the fine loop is Linux's")
def test_it_waits_to_less_than_a_millisecond() -> None:
    """Asked of the selector alone, whose waits the usual one rounds up to 1 ms."""

    async def main() -> float:
        loop = asyncio.get_running_loop()
        waits: list[float] = []
        for _ in range(50):
            before = loop.time()
            await asyncio.sleep(0.0002)
            waits.append(loop.time() - before)
        return min(waits)

    assert run(main) < 0.001


def test_sockets_and_threads_wake_it_from_a_long_wait() -> None:
    async def main() -> tuple[bytes, int]:
        loop = asyncio.get_running_loop()
        ours, theirs = socket.socketpair()
        ours.setblocking(False)
        with ours, theirs:
            timer = loop.call_later(3600, lambda: None)
            threading.Thread(target=theirs.sendall, args=(b"hello",)).start()
            data = await loop.sock_recv(ours, 10)
            future: asyncio.Future[int] = loop.create_future()
            threading.Thread(target=loop.call_soon_threadsafe, args=(future.set_result, 7)).start()
            answer = await future
            timer.cancel()
        return data, answer

    assert run(main) == (b"hello", 7)


def test_processes_and_signals_wake_it_from_a_long_wait() -> None:
    async def main() -> tuple[bytes, bool]:
        loop = asyncio.get_running_loop()
        timer = loop.call_later(3600, lambda: None)
        process = await anyio.run_process([sys.executable, "-c", "print('done')"])
        heard = asyncio.Event()
        loop.add_signal_handler(signal.SIGUSR1, heard.set)
        threading.Thread(target=os.kill, args=(os.getpid(), signal.SIGUSR1)).start()
        await heard.wait()
        loop.remove_signal_handler(signal.SIGUSR1)
        timer.cancel()
        return process.stdout.strip(), heard.is_set()

    assert run(main) == (b"done", True)
