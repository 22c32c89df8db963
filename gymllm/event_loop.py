"""An asyncio loop whose timers keep their time.

asyncio's own waits in whole milliseconds on Linux, rounded up: a step of 20 ms takes 20.7, and
everything that is due meanwhile comes in a bunch. Here it waits to the microsecond.
"""

from __future__ import annotations

import asyncio
import select
import selectors
import sys
from collections.abc import Callable

if sys.platform == "linux":

    class _FineSelector(selectors.EpollSelector):
        """epoll for what is ready, select for how long to wait."""

        def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
            if timeout is not None and timeout > 0:
                # epoll's own descriptor is readable once there is something to take from it.
                select.select((self.fileno(),), (), (), timeout)
                timeout = 0
            return super().select(timeout)

    _HIGHEST_SELECTABLE = 1023


def new_event_loop() -> asyncio.AbstractEventLoop:
    """A loop with fine timers, on Linux; elsewhere the usual one.

    For `anyio.run(main, backend_options={"loop_factory": new_event_loop})` and for
    `asyncio.Runner(loop_factory=new_event_loop)`. gymllm's commands use it.
    """
    if sys.platform == "linux":
        selector = _FineSelector()
        if selector.fileno() <= _HIGHEST_SELECTABLE:
            return asyncio.SelectorEventLoop(selector)
        selector.close()  # select can't take so high a number
    return asyncio.new_event_loop()


LOOP_OPTIONS: dict[str, Callable[[], asyncio.AbstractEventLoop]] = {"loop_factory": new_event_loop}
"""`backend_options` of `anyio.run`."""
