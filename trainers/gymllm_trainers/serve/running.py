"""What is being generated: how much may, under which names, and how it is ended from outside."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import aclosing
from typing import Protocol, final

import anyio

from gymllm.engine import GenerateRequest
from gymllm_trainers.engine import Delta, EmbeddedEngine
from gymllm_trainers.serve.problems import RefusedError


class Give(Protocol):
    """Takes what the engine generates."""

    async def __call__(self, sequence: int, delta: Delta | None) -> None:
        """What a sequence has more, by its place among the requests; None: it was aborted, and nothing
        follows."""
        ...


@final
class Running:
    """The sequences that the engine works on for clients."""

    def __init__(self, engine: EmbeddedEngine, *, most: int) -> None:
        """Takes the engine.

        Args:
            engine: Who generates.
            most: Sequences at once; more are refused.
        """
        self.most = most
        self.sequences = 0
        """Those there are."""
        self.ending = False
        """Whether `end` was called."""
        self._engine = engine
        self._scopes: dict[str, list[anyio.CancelScope]] = {}

    async def run(self, requests: Sequence[GenerateRequest], give: Give) -> None:
        """Generates all of them at once; being cancelled ends them.

        Args:
            requests: Several with the same `request_id` are aborted together.
            give: Awaited with each piece; a sequence goes on once it returns.

        Raises:
            RefusedError: There is too much to do already, or a name is in use.
            GymLLMError: As the engine says of the first request that fails; the others are ended.
        """
        self._take(requests)
        scopes = [(request.request_id, anyio.CancelScope()) for request in requests]
        for name, scope in scopes:
            self._scopes.setdefault(name, []).append(scope)
        try:
            async with anyio.create_task_group() as group:
                for sequence, (request, (name, scope)) in enumerate(
                    zip(requests, scopes, strict=True)
                ):
                    group.start_soon(self._generate, sequence, request, scope, give, name=name)
        except BaseExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            self.sequences -= len(requests)
            for name, _ in scopes:
                self._scopes.pop(name, None)

    def end(self) -> None:
        """Ends everything with an error, for good; nothing is taken any more."""
        self.ending = True
        self.abort()

    def abort(self, name: str | None = None) -> int:
        """Ends what is called so, or everything; what was generated is still answered with.

        Returns:
            How many sequences.
        """
        scopes = (
            [scope for held in self._scopes.values() for scope in held]
            if name is None
            else self._scopes.get(name, [])
        )
        for scope in scopes:
            scope.cancel()
        return len(scopes)

    def _take(self, requests: Sequence[GenerateRequest]) -> None:
        count = len(requests)
        self._refuse_if_ending()
        if count > self.most:
            raise RefusedError(
                400,
                f"{count} sequences in one request are more than the {self.most} this server takes.",
            )
        if self.sequences + count > self.most:
            raise RefusedError(
                429,
                f"{self.sequences} sequences are generating or waiting and at most {self.most} may: try "
                "again later, or start the server with a larger --queue.",
                code="queue_full",
            )
        for name in {request.request_id for request in requests}:
            if name in self._scopes:
                raise RefusedError(400, f"a request called {name!r} is running.", param="rid")
        self.sequences += count

    async def _generate(
        self, sequence: int, request: GenerateRequest, scope: anyio.CancelScope, give: Give
    ) -> None:
        with scope:
            async with aclosing(self._engine.stream(request)) as deltas:
                async for delta in deltas:
                    await give(sequence, delta)
            return
        self._refuse_if_ending()
        await give(sequence, None)

    def _refuse_if_ending(self) -> None:
        if self.ending:
            raise RefusedError(503, "the server is ending.", code="unavailable")
