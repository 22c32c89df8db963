"""`Worker`: runs one environment somewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import gymnasium

MakeEnv = Callable[[], gymnasium.Env[Any, Any]]
"""Makes one environment, wrappers included."""


class Worker(Protocol):
    """Runs one environment, one call at a time. Limits and faults are the slot's business."""

    @property
    def is_lost(self) -> bool:
        """A cancelled call did not end: the worker can't be used or closed, only forgotten."""
        ...

    async def start(self) -> None:
        """Makes the environment. Called once, first."""
        ...

    async def call(self, method: str, *args: object, **kwargs: object) -> object:
        """Calls a method of the environment and returns what it returned, or raises what it raised.

        Cancellation reaches the environment's own code, and the call ends soon afterwards whether that
        reacts or not (unless it blocks the pool's own loop, which only an inline worker lets it do).
        """
        ...

    async def aclose(self) -> None:
        """Closes the environment, if it was made, and frees the rest."""
        ...
