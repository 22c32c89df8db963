"""`ThreadWorker`: the environment runs in a daemon thread with an event loop of its own.

For environments that block. Calls hop to the thread and back without blocking the pool's loop. A call
that is cancelled (its limit passed, or its episode was) is cancelled in the thread too; if it blocks and
does not end within a moment, the thread is lost: it can't be killed, so it is told to end if it ever can
and otherwise left behind.
"""

from __future__ import annotations

import asyncio
import contextlib
from typing import Any

import anyio
import gymnasium

from gymllm.bridge import LoopThread, run_sync
from gymllm.workers.worker import MakeEnv

CANCEL_GRACE_S = 0.1
"""How long a cancelled call may take to clean up before its thread counts as lost."""
STOP_LIMIT_S = 1.0
"""How long an idle thread may take to end."""


class ThreadWorker:
    """Runs one environment in a thread. Used from one asyncio loop."""

    def __init__(self, make_env: MakeEnv, *, name: str) -> None:
        """Starts the thread.

        Args:
            make_env: Called in the thread.
            name: The thread's name.
        """
        self._make_env = make_env
        self._thread = LoopThread(name)
        self._env: gymnasium.Env[Any, Any] | None = None
        self.is_lost = False

    async def start(self) -> None:
        await self._run("start")

    async def call(self, method: str, *args: object, **kwargs: object) -> object:
        return await self._run("call", method, *args, **kwargs)

    async def aclose(self) -> None:
        try:
            if not self.is_lost:
                await self._run("close")
        finally:
            await self._stop()

    async def _stop(self) -> None:
        home, ended = asyncio.get_running_loop(), asyncio.Event()

        def tell() -> None:
            with contextlib.suppress(RuntimeError):  # the pool's loop is closed: nobody waits
                home.call_soon_threadsafe(ended.set)

        self._thread.stop(tell)
        if not self.is_lost:
            with anyio.move_on_after(STOP_LIMIT_S, shield=True):
                await ended.wait()
                self._thread.join(STOP_LIMIT_S)  # it has just called us as its last act

    async def _serve(self, what: str, *args: Any, **kwargs: Any) -> object:
        """In the thread: does one thing with the environment."""
        if what == "start":
            self._env = await run_sync(self._make_env)
            return None
        if what == "close":
            env, self._env = self._env, None
            return await run_sync(env.close) if env is not None else None
        method, *rest = args
        return await run_sync(getattr(self._env, method), *rest, **kwargs)

    async def _run(self, what: str, *args: object, **kwargs: object) -> object:
        home, there = asyncio.get_running_loop(), self._thread.loop
        ended: asyncio.Future[None] = home.create_future()
        tasks: list[asyncio.Task[object]] = []

        def settle() -> None:
            if not ended.done():
                ended.set_result(None)

        def tell(_: asyncio.Task[object]) -> None:
            with contextlib.suppress(RuntimeError):  # the pool's loop is closed: nobody waits
                home.call_soon_threadsafe(settle)

        def begin() -> None:
            task = there.create_task(self._serve(what, *args, **kwargs))
            task.add_done_callback(tell)
            tasks.append(task)

        there.call_soon_threadsafe(begin)
        try:
            await asyncio.shield(ended)
        except asyncio.CancelledError:
            there.call_soon_threadsafe(lambda: [task.cancel() for task in tasks])
            with anyio.move_on_after(CANCEL_GRACE_S, shield=True):
                await asyncio.shield(ended)
            self.is_lost = not ended.done()
            if not self.is_lost and not tasks[0].cancelled():
                tasks[0].exception()  # retrieved; the cancellation is what the caller gets
            raise
        return tasks[0].result()
