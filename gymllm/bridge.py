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
import sys
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from typing import Any, Generic, ParamSpec, TypeVar, cast

import anyio
import greenlet

from gymllm.event_loop import new_event_loop

P = ParamSpec("P")
T = TypeVar("T")
T_co = TypeVar("T_co", covariant=True)

STOP_LIMIT_S = 1.0
"""How long a loop thread that was told to stop waits for its cancelled tasks."""


class _Bridge(greenlet.greenlet):
    """A greenlet that `run_sync` runs functions in, one after another; its parent awaits for it.

    A new greenlet costs more than most steps of an environment, so they are used again.
    """

    def __init__(self, driver: greenlet.greenlet) -> None:
        super().__init__(self._serve, driver)

    def _serve(
        self, function: Callable[..., object], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        while True:
            try:
                done = Finished(function(*args, **kwargs))
            except greenlet.GreenletExit:  # it is thrown away, call and all
                raise
            except BaseException as error:
                done = _Raised(error)
            del function, args, kwargs  # not kept until the next call
            parent = self.parent
            assert parent is not None, "the driver lives as long as its call"
            function, args, kwargs = parent.switch(done)


class _Free(threading.local):
    """Bridges of this thread that wait for a call."""

    def __init__(self) -> None:
        self.bridges: list[_Bridge] = []


_free = _Free()
MOST_FREE = 64
"""Idle bridges that are kept in a thread."""


@dataclass(frozen=True, slots=True)
class Finished(Generic[T_co]):
    """What a call returned that did not have to wait."""

    value: T_co


@dataclass(frozen=True, slots=True)
class _Raised:
    error: BaseException


def start_sync(
    function: Callable[P, T], *args: P.args, **kwargs: P.kwargs
) -> Finished[T] | Coroutine[object, Any, T]:
    """Calls a synchronous function that may wait by `await_only`, up to where it waits.

    Returns:
        Its result if it did not wait; else a coroutine for the rest of the call, which the task that
        called this must await. Nothing that is awaited has begun by then, so a cancel scope around the
        coroutine is around all of it.
    """
    driver = greenlet.getcurrent()
    bridges = _free.bridges
    if bridges:
        bridge = bridges.pop()
        bridge.parent = driver
        bridge.gr_context = driver.gr_context
        answer = bridge.switch((function, args, kwargs))
    else:
        bridge = _Bridge(driver)
        bridge.gr_context = driver.gr_context
        answer = bridge.switch(function, args, kwargs)
    if isinstance(answer, Finished):
        _keep(bridge)
        return cast("Finished[T]", answer)
    if isinstance(answer, _Raised):
        _keep(bridge)
        raise answer.error
    return _go_on(bridge, answer)


def _keep(bridge: _Bridge) -> None:
    bridge.gr_context = None  # what the call left in it is not kept alive
    if len(_free.bridges) < MOST_FREE:
        _free.bridges.append(bridge)


async def _go_on(bridge: _Bridge, answer: Any) -> Any:
    while True:
        try:
            value = await answer
        except BaseException as error:
            # Its traceback must be said: throw() would begin a new one.
            answer = bridge.throw(type(error), error, error.__traceback__)
        else:
            answer = bridge.switch(value)
        if isinstance(answer, Finished):
            _keep(bridge)
            return answer.value  # pyright: ignore[reportUnknownVariableType, reportUnknownMemberType]
        if isinstance(answer, _Raised):
            _keep(bridge)
            raise answer.error


async def run_sync(function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Calls a synchronous function that may wait by `await_only`, and returns what it returns.

    Runs on the current task: context variables, cancel scopes and the current task are the caller's.
    Cancellation is raised in the coroutine that the function waits for, then in the function.
    """
    started = start_sync(function, *args, **kwargs)
    return started.value if isinstance(started, Finished) else await started


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


class LoopRunner:
    """An asyncio loop that runs until it is told to stop; what is left of its tasks is cancelled."""

    def __init__(self) -> None:
        self.loop = new_event_loop()
        self._stopping = False

    def run(self) -> None:
        """Runs the loop in this thread until `stop`, and closes it."""
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

    def stop(self) -> None:
        """Tells it to stop, from any thread; returns at once."""
        self._stopping = True
        with contextlib.suppress(RuntimeError):  # already closed
            self.loop.call_soon_threadsafe(self.loop.stop)


class LoopThread(LoopRunner):
    """An event loop that runs in a daemon thread of its own."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self.run, name=name, daemon=True)
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether the thread still runs in this process (it does not after a fork)."""
        return self._thread.is_alive() and self._pid == os.getpid()

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


def running_task() -> object:
    """The task that runs in this thread, asyncio's or trio's; None where none does."""
    loop = running_loop()
    if loop is not None:
        return asyncio.current_task(loop)
    if "trio" not in sys.modules:
        return None
    import trio  # optional; it runs here, or says that it does not

    try:
        return trio.lowlevel.current_task()
    except RuntimeError:
        return None


class Reply(Generic[T]):
    """One value, or one exception, that a callback hands to one task of the same loop."""

    def __init__(self) -> None:
        loop = running_loop()
        self._future: asyncio.Future[T] | None = loop.create_future() if loop else None
        self._event = anyio.Event() if loop is None else None  # trio has no futures
        self._value: T | None = None
        self._error: BaseException | None = None

    def set(self, value: T) -> None:
        """Hands the value over; nothing happens if the task no longer waits or has its answer."""
        if self._future is not None:
            if not self._future.done():
                self._future.set_result(value)
        elif self._event is not None and not self._event.is_set():
            self._value = value
            self._event.set()

    def fail(self, error: BaseException) -> None:
        """Hands an exception over, as `set` does a value."""
        if self._future is not None:
            if not self._future.done():
                self._future.set_exception(error)
        elif self._event is not None and not self._event.is_set():
            self._error = error
            self._event.set()

    async def wait(self) -> T:
        """Waits for the value, once. A wait that is cancelled can't be repeated.

        Raises:
            BaseException: The exception that was handed over.
        """
        if self._future is not None:
            return await self._future
        assert self._event is not None, "one of the two is there"
        await self._event.wait()
        if self._error is not None:
            raise self._error
        return cast("T", self._value)


class Inbox:
    """Callbacks that other threads leave for one loop, which is woken once for all that are there.

    Waking a loop costs a system call and a switch of threads; many environments answer at once.
    """

    def __init__(self) -> None:
        """Belongs to the loop that runs here, asyncio's or trio's."""
        self._callbacks: deque[tuple[Callable[..., object], tuple[object, ...]]] = deque()
        self._woken = False
        self._wake = threadsafe_wake()

    def post(self, callback: Callable[..., object], *args: object) -> None:
        """Has the loop call `callback(*args)` soon; from any thread. Does nothing once it is closed."""
        self._callbacks.append((callback, args))
        if not self._woken:
            self._woken = True
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits
                self._wake(self._deliver)

    def _deliver(self) -> None:
        # Before the deque is emptied: what is posted from here on wakes the loop again.
        self._woken = False
        while self._callbacks:
            callback, args = self._callbacks.popleft()
            callback(*args)


def current_host() -> object:
    """The loop that runs in this thread: asyncio's loop or trio's token.

    Raises:
        RuntimeError: None does.
    """
    loop = running_loop()
    if loop is not None:
        return loop
    if "trio" not in sys.modules:
        raise RuntimeError("no event loop runs in this thread, asyncio's or trio's.")
    import trio  # optional; it runs here, or says that it does not

    return trio.lowlevel.current_trio_token()


def threadsafe_wake() -> Callable[[Callable[[], object]], object]:
    """What has the loop that runs here call something soon, from any thread.

    It raises RuntimeError once the loop is closed.
    """
    host = current_host()
    if isinstance(host, asyncio.AbstractEventLoop):
        return host.call_soon_threadsafe
    return cast("Any", host).run_sync_soon


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
