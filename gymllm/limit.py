"""`Limit`: a time limit around something that waits, for half of what a cancel scope's own deadline costs.

A scope with a deadline starts and stops a timer of its event loop. Here all limits of one length share
one timer: they pass in the order they began, so the timer need only look at the oldest.
"""

from __future__ import annotations

import asyncio
import weakref
from types import TracebackType
from typing import Self

import anyio

from gymllm.bridge import running_loop


class Limit:
    """Cancels its block once it has taken longer than so many seconds; `passed` says if it did.

    As `anyio.move_on_after`: the block is left at its end without an exception. Use it once.
    """

    __slots__ = ("_queue", "loop", "passes_at", "queues", "scope", "seconds")

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.passes_at = 0.0
        self.loop: asyncio.AbstractEventLoop | None = None
        """asyncio's loop that it was entered on; None on trio."""
        self.queues: dict[float, _Queue] = {}
        """That loop's; looked up once for all limits within this one."""
        self._queue: _Queue | None = None

    @property
    def passed(self) -> bool:
        """Whether the block was cancelled, by the limit or by `cancel`."""
        return self.scope.cancel_called

    def cancel(self) -> None:
        """Cancels the block now."""
        self.scope.cancel()

    def within(self, seconds: float) -> LimitWithin:
        """A shorter limit around a part of this block, after which the whole block must end."""
        return LimitWithin(self, seconds)

    def __enter__(self) -> Self:
        self.loop = loop = running_loop()
        if loop is None:  # trio's own deadlines are cheap
            self.scope = anyio.CancelScope(deadline=anyio.current_time() + self.seconds)
        else:
            self.scope = anyio.CancelScope()
            self.passes_at = loop.time() + self.seconds
            self.queues = _queues_of(loop)
            self._queue = _queue(self.queues, loop, self.seconds)
            self._queue.add(self)
        self.scope.__enter__()
        if loop is not None and loop.time() >= self.passes_at:
            self.scope.cancel()  # a timer would let the first wait through
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        if self._queue is not None:
            self._queue.remove(self)
        return self.scope.__exit__(kind, error, trace)


class LimitWithin:
    """A limit that has no cancel scope of its own, but cancels the block of an outer `Limit`.

    So it costs next to nothing, and once it has passed, nothing else in the outer block can wait. Use it
    in the outer limit's task, with no cancel scope between the two.
    """

    __slots__ = ("_outer", "_queue", "_scope", "passed", "passes_at", "seconds")

    def __init__(self, outer: Limit, seconds: float) -> None:
        self._outer, self.seconds = outer, seconds
        self.passes_at = 0.0
        self.passed = False
        """Whether this limit, not the outer one, was what cancelled the block."""
        self._queue: _Queue | None = None
        self._scope: anyio.CancelScope | None = None

    def cancel(self) -> None:
        """Cancels the block, and the outer one, now."""
        self.passed = True
        self._outer.scope.cancel()

    def __enter__(self) -> Self:
        outer = self._outer
        loop = outer.loop
        if loop is None:
            self._scope = anyio.CancelScope(deadline=anyio.current_time() + self.seconds)
            self._scope.__enter__()
            return self
        self.passes_at = loop.time() + self.seconds
        self._queue = outer.queues.get(self.seconds) or _queue(outer.queues, loop, self.seconds)
        self._queue.add(self)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        if self._queue is not None:
            self._queue.remove(self)
            return self.passed and isinstance(error, asyncio.CancelledError)
        assert self._scope is not None, "it was entered"
        self.passed = self.passed or self._scope.cancel_called
        return self._scope.__exit__(kind, error, trace)


class _Queue:
    """The open limits of one length on one loop, oldest first."""

    def __init__(self, loop: asyncio.AbstractEventLoop, seconds: float) -> None:
        self._loop, self._seconds = loop, seconds
        self._open: dict[Limit | LimitWithin, None] = {}  # in order; any can be taken out
        self._timer: asyncio.TimerHandle | None = None

    def add(self, limit: Limit | LimitWithin) -> None:
        self._open[limit] = None
        if self._timer is None:
            self._timer = self._loop.call_at(limit.passes_at, self._look)

    def remove(self, limit: Limit | LimitWithin) -> None:
        self._open.pop(limit, None)

    def _look(self) -> None:
        self._timer = None
        now = self._loop.time()
        for limit in list(self._open):
            if limit.passes_at > now:
                self._timer = self._loop.call_at(limit.passes_at, self._look)
                return
            del self._open[limit]
            limit.cancel()


_queues: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[float, _Queue]] = (
    weakref.WeakKeyDictionary()
)


def _queues_of(loop: asyncio.AbstractEventLoop) -> dict[float, _Queue]:
    queues = _queues.get(loop)
    if queues is None:
        queues = _queues[loop] = {}
    return queues


def _queue(queues: dict[float, _Queue], loop: asyncio.AbstractEventLoop, seconds: float) -> _Queue:
    queue = queues.get(seconds)
    if queue is None:
        queue = queues[seconds] = _Queue(loop, seconds)
    return queue
