"""The places a tool's calls run in, and threads that may be left behind in one."""

from __future__ import annotations

import contextlib
import contextvars
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import final

import anyio
import anyio.from_thread
import anyio.lowlevel

RECHECK_S = 0.25
"""A waiter is woken by what ends on its own event loop; for all else it looks this often."""


@dataclass(kw_only=True, eq=False)
class _Waiter:
    loop: anyio.lowlevel.EventLoopToken
    woken: anyio.Event = field(default_factory=anyio.Event)
    granted: bool = False


@final
class Places:
    """A bounded number of places, first come first served, for every episode and event loop.

    anyio's limiters belong to one event loop, and forget a thread that is left behind. Here it keeps
    its place until it ends, so that neither threads nor a tool's own limit run over.
    """

    def __init__(self, total: int) -> None:
        """Makes free ones.

        Args:
            total: How many, >= 1.
        """
        self.total = total
        self._free, self._hanging = total, 0
        self._waiting: deque[_Waiter] = deque()
        self._lock = threading.Lock()

    async def take(self) -> bool:
        """Waits for a place. False: every one is held by a thread that was left behind."""
        with self._lock:
            if self._free:
                self._free -= 1
                return True
            if self._hanging >= self.total:
                return False
            waiter = _Waiter(loop=anyio.lowlevel.current_token())
            self._waiting.append(waiter)
        try:
            while True:
                with anyio.move_on_after(RECHECK_S):
                    await waiter.woken.wait()
                with self._lock:
                    if waiter.granted:
                        return True
                    if self._hanging >= self.total:
                        self._waiting.remove(waiter)
                        return False
        except BaseException:
            with self._lock:
                if waiter.granted:
                    self._give_on()
                else:
                    self._waiting.remove(waiter)
            raise

    def leave(self, *, hung: bool = False) -> None:
        """Gives a place back, from any thread.

        Args:
            hung: It was said of the place that it hangs.
        """
        with self._lock:
            self._hanging -= hung
            self._give_on()

    def hang(self) -> None:
        """Says that a place is held by a thread that was left behind."""
        with self._lock:
            self._hanging += 1
            if self._hanging >= self.total:
                for waiter in self._waiting:
                    _wake(waiter)

    def _give_on(self) -> None:
        if not self._waiting:
            self._free += 1
            return
        waiter = self._waiting.popleft()
        waiter.granted = True
        _wake(waiter)


async def run_in_thread(work: Callable[[], object], places: Places, *, name: str) -> object:
    """Runs `work` in a thread of its own and gives back the place that the caller took for it.

    Cancelled, it leaves the thread behind. anyio's worker threads would then keep the interpreter
    from exiting; these are daemons.

    Args:
        work: Raises what it likes, but no cancellation.
        places: Where the caller took a place.
        name: The thread's.
    """
    call = _ThreadCall(work, places)
    try:
        threading.Thread(target=call.run, name=name, daemon=True).start()
    except BaseException:
        places.leave()
        raise
    return await call.outcome()


@final
class _ThreadCall:
    def __init__(self, work: Callable[[], object], places: Places) -> None:
        self._work, self._places = work, places
        self._context = contextvars.copy_context()
        self._loop, self._done = anyio.lowlevel.current_token(), anyio.Event()
        self._lock = threading.Lock()
        self._ended = self._left_behind = False
        self._value: object = None
        self._error: BaseException | None = None

    def run(self) -> None:
        try:
            self._value = self._context.run(self._work)
        except BaseException as error:
            self._error = error
        with self._lock:
            self._ended = True
        if self._left_behind:
            self._places.leave(hung=True)
        else:
            with contextlib.suppress(anyio.RunFinishedError):
                anyio.from_thread.run_sync(self._done.set, token=self._loop)

    async def outcome(self) -> object:
        try:
            await self._done.wait()
        finally:
            with self._lock:
                self._left_behind = not self._ended
            if self._left_behind:
                self._places.hang()
            else:
                self._places.leave()
        if self._error is not None:
            raise self._error
        return self._value


def _wake(waiter: _Waiter) -> None:
    """Sets the waiter's event where that is safe: on its own loop."""
    try:
        here = anyio.lowlevel.current_token()
    except RuntimeError:  # a thread without a loop
        return
    if here == waiter.loop:
        waiter.woken.set()
