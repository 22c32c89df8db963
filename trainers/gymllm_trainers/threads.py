"""Work beside the event loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import anyio.to_thread

T = TypeVar("T")


async def in_thread(function: Callable[[], T]) -> T:
    """Runs something that computes in a worker thread; Ctrl-C doesn't wait for it."""
    return await anyio.to_thread.run_sync(function, abandon_on_cancel=True)
