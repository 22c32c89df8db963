"""Lets synchronous code wait on an event loop without blocking it, and code without a loop use async code.

Gymnasium's wrappers call `env.step` as a plain function. In the pool, the whole wrapper stack runs in a
greenlet (`run_sync`); when the innermost `Env.step` has to wait, it switches to the task that started the
greenlet (`await_only`), which awaits on its behalf and switches back with the answer or the exception.
So a stack of stock wrappers never blocks the loop, and cancelling the task reaches the awaiting coroutine
first and then every frame of the stack, `finally` blocks included.

Without such a greenlet (a script, a thread, a notebook whose loop already runs) the coroutine is run on a
helper loop in a daemon thread, started on first use. A `HomeLoop` remembers which of the two an object
was first driven on and keeps to it, because what an environment opens (sockets, locks) belongs to one
loop.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import os
import threading
from collections.abc import Awaitable, Callable, Coroutine
from typing import ParamSpec, TypeVar, cast

import greenlet

P = ParamSpec("P")
T = TypeVar("T")

STOP_LIMIT_S = 1.0
"""How long a loop thread that was told to stop waits for its cancelled tasks."""


class _Bridge(greenlet.greenlet):
    """A greenlet that was started by `run_sync`; its parent awaits for it."""


async def run_sync(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Calls a synchronous function that may wait by `await_only`, and returns what it returns.

    Runs on the current task: context variables, cancel scopes and the current task are the caller's.
    Cancellation is raised in the coroutine that the function waits for, then in the function.
    """
    driver = greenlet.getcurrent()
    bridge = _Bridge(function, driver)
    bridge.gr_context = driver.gr_context
    answer = bridge.switch(*args, **kwargs)
    while not bridge.dead:
        try:
            value = await cast("Awaitable[object]", answer)
        except BaseException as error:
            answer = bridge.throw(error)
        else:
            answer = bridge.switch(value)
    return cast("T", answer)


def in_bridge() -> bool:
    """Whether `await_only` can be used here."""
    return isinstance(greenlet.getcurrent(), _Bridge)


def await_only(awaitable: Awaitable[T]) -> T:
    """Waits for `awaitable` from synchronous code that `run_sync` called.

    Raises:
        RuntimeError: Not called under `run_sync`.
    """
    bridge = greenlet.getcurrent()
    if not isinstance(bridge, _Bridge) or bridge.parent is None:
        if isinstance(awaitable, Coroutine):
            awaitable.close()
        raise RuntimeError(
            "await_only was called outside run_sync, so there is no task that could wait; "
            "call it from a function given to gymllm.bridge.run_sync."
        )
    return cast("T", bridge.parent.switch(awaitable))


def finish(coroutine: Coroutine[object, object, T]) -> T:
    """Runs a coroutine that never has to wait, on the spot and without a loop.

    Raises:
        RuntimeError: It did have to wait.
    """
    try:
        coroutine.send(None)
    except StopIteration as stop:
        return cast("T", stop.value)
    coroutine.close()
    raise RuntimeError(
        f"{coroutine!r} waited although its environment says waits = False; set waits = True."
    )


class LoopThread:
    """An event loop that runs in a daemon thread of its own."""

    def __init__(self, name: str) -> None:
        self.loop = asyncio.new_event_loop()
        self._pid = os.getpid()
        self._at_end: list[Callable[[], None]] = []
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            while not self._stopping:
                # asyncio lets these two through after it has given them to the task's waiters.
                with contextlib.suppress(SystemExit, KeyboardInterrupt):
                    self.loop.run_forever()
            tasks = asyncio.all_tasks(self.loop)
            for task in tasks:
                task.cancel()
            if tasks:
                self.loop.run_until_complete(asyncio.wait(tasks, timeout=STOP_LIMIT_S))
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        finally:
            self.loop.close()
            for callback in self._at_end:
                callback()

    @property
    def is_alive(self) -> bool:
        """Whether the thread still runs in this process (it does not after a fork)."""
        return self._thread.is_alive() and self._pid == os.getpid()

    def stop(self, at_end: Callable[[], None] | None = None) -> None:
        """Tells the thread to cancel its tasks and end; returns at once.

        Args:
            at_end: The last thing that the thread calls.
        """
        if at_end is not None:
            self._at_end.append(at_end)
        self._stopping = True
        with contextlib.suppress(RuntimeError):  # already closed
            self.loop.call_soon_threadsafe(self.loop.stop)

    def join(self, timeout_s: float) -> bool:
        """Blocks until the thread has ended; False if it has not within the limit."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()


_helper: LoopThread | None = None
_helper_lock = threading.Lock()


def helper_loop() -> asyncio.AbstractEventLoop:
    """The process's helper loop; started on first use, again after a fork, and stopped at exit."""
    global _helper
    with _helper_lock:
        if _helper is None or not _helper.is_alive:
            _helper = LoopThread("gymllm-helper-loop")
            atexit.register(_stop_at_exit, _helper)
        return _helper.loop


def _stop_at_exit(thread: LoopThread) -> None:
    if thread.is_alive:
        thread.stop()
        thread.join(2 * STOP_LIMIT_S)


def running_loop() -> asyncio.AbstractEventLoop | None:
    """asyncio's loop that runs in this thread, or None."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None


class HomeLoop:
    """The one loop that an object's coroutines run on, wherever they are called from.

    It is the first one that was used, until that is closed. Copies and unpickled ones start anew.
    """

    def __init__(self) -> None:
        self._loop: asyncio.AbstractEventLoop | None = None

    def __reduce__(self) -> tuple[type[HomeLoop], tuple[()]]:
        return (HomeLoop, ())

    def bind(self, owner: str) -> None:
        """Makes the running loop the home, for an object that is used from async code.

        Raises:
            RuntimeError: Another loop is, and it is still open.
        """
        running = running_loop()
        if self._loop is None or self._loop.is_closed():
            self._loop = running
        elif self._loop is not running:
            raise RuntimeError(
                f"{owner} already runs on another event loop; use it there, or make one for this loop."
            )

    def run(self, coroutine: Coroutine[object, object, T]) -> T:
        """Runs a coroutine to its end on the home loop and returns its result.

        Under `run_sync` it waits without blocking the loop; elsewhere it blocks the thread. Cancelling
        the task, or Ctrl-C in the blocked thread, cancels the coroutine.

        Raises:
            RuntimeError: The home loop is this thread's own and would wait for itself, or it stands.
        """
        bridged, running = in_bridge(), running_loop()
        if self._loop is None or self._loop.is_closed():
            self._loop = running if bridged else helper_loop()
        home = self._loop
        if bridged and home is running:
            return await_only(coroutine)
        if home is None or home is running or not home.is_running():
            coroutine.close()
            raise RuntimeError(
                "a synchronous call would wait for the event loop it is made on"
                if home is running
                else "the event loop that this object was first driven on no longer runs"
            ) from None
        future = asyncio.run_coroutine_threadsafe(coroutine, home)
        if bridged:
            return await_only(asyncio.wrap_future(future))
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise
