"""What tools hold open during one episode: made at the first call, closed when the episode ends.

A tool is shared by all episodes. One that needs something of its own in each (a sandbox, a login) asks
for it with `Held.here().get(...)` inside its function.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Generator, Hashable
from contextlib import AsyncExitStack, contextmanager
from contextvars import ContextVar
from typing import Protocol, TypeVar, cast, final

import anyio

from gymllm.errors import ClosedError, GymLLMError


class Closable(Protocol):
    """Something that must be closed."""

    async def aclose(self) -> object: ...


R = TypeVar("R", bound=Closable)
_here: ContextVar[Held] = ContextVar("gymllm_held")


@final
class Held:
    """What the tools of one episode hold open. An agent has one, and closes it."""

    def __init__(self) -> None:
        self._made: dict[Hashable, Closable] = {}
        self._making = anyio.Lock()
        self._closed = False

    @staticmethod
    def here() -> Held:
        """That of the episode whose tool is running.

        Raises:
            GymLLMError: None is.
        """
        held = _here.get(None)
        if held is None:
            raise GymLLMError(
                "this tool holds something open during an episode, and is called outside of one: call it "
                "in `async with Held() as held: with held.during(): ...`, or by an agent."
            )
        return held

    @contextmanager
    def during(self) -> Generator[None]:
        """Calls in the block, and in tasks that it starts, are this episode's."""
        token = _here.set(self)
        try:
            yield
        finally:
            _here.reset(token)

    async def get(self, key: Hashable, make: Callable[[], Awaitable[R]]) -> R:
        """What was made under a key, or made now.

        Raises:
            ClosedError: The episode is over.
            Exception: What `make` raises; the next one who asks tries again.
        """
        async with self._making:
            if self._closed:
                raise ClosedError("the episode is over, and what its tools held open is closed.")
            if key not in self._made:
                self._made[key] = await make()
            return cast(R, self._made[key])

    async def drop(self, key: Hashable) -> None:
        """Closes what was made under a key; the next one who asks gets a new one."""
        made = self._made.pop(key, None)
        if made is not None:
            await made.aclose()

    async def aclose(self) -> None:
        """Closes everything, the newest first, whichever raises. Safe to call twice."""
        self._closed = True
        made, self._made = self._made, {}
        with anyio.CancelScope(shield=True):
            async with AsyncExitStack() as stack:
                for one in made.values():
                    stack.push_async_callback(one.aclose)

    async def __aenter__(self) -> Held:
        return self

    async def __aexit__(self, *raised: object) -> None:
        await self.aclose()
