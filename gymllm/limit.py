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

    __slots__ = ("_queue", "passes_at", "scope", "seconds")

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.passes_at = 0.0
        self._queue: _Queue | None = None

    @property
    def passed(self) -> bool:
        """Whether the block was cancelled, by the limit or through `scope`."""
        return self.scope.cancel_called

    def __enter__(self) -> Self:
        loop = running_loop()
        if loop is None:  # trio's own deadlines are cheap
            self.scope = anyio.CancelScope(deadline=anyio.current_time() + self.seconds)
        else:
            self.scope = anyio.CancelScope()
            self.passes_at = loop.time() + self.seconds
            self._queue = _queue(loop, self.seconds)
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


class _Queue:
    """The open limits of one length on one loop, oldest first."""

    def __init__(self, loop: asyncio.AbstractEventLoop, seconds: float) -> None:
        self._loop, self._seconds = loop, seconds
        self._open: dict[Limit, None] = {}  # in order, and any of them can be taken out
        self._timer: asyncio.TimerHandle | None = None

    def add(self, limit: Limit) -> None:
        self._open[limit] = None
        if self._timer is None:
            self._timer = self._loop.call_at(limit.passes_at, self._look)

    def remove(self, limit: Limit) -> None:
        self._open.pop(limit, None)

    def _look(self) -> None:
        self._timer = None
        now = self._loop.time()
        for limit in list(self._open):
            if limit.passes_at > now:
                self._timer = self._loop.call_at(limit.passes_at, self._look)
                return
            del self._open[limit]
            limit.scope.cancel()


_queues: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, dict[float, _Queue]] = (
    weakref.WeakKeyDictionary()
)


def _queue(loop: asyncio.AbstractEventLoop, seconds: float) -> _Queue:
    queues = _queues.get(loop)
    if queues is None:
        queues = _queues[loop] = {}
    queue = queues.get(seconds)
    if queue is None:
        queue = queues[seconds] = _Queue(loop, seconds)
    return queue
