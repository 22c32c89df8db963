"""`SandboxPool`: sandboxes made ahead, so that nobody waits for a start."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Self

import anyio
from anyio.abc import TaskGroup

from gymllm.errors import ClosedError, ConfigError, SandboxError
from gymllm.sandbox.interface import Sandbox, SandboxSpec
from gymllm.sandbox.opening import open_sandbox

Opener = Callable[[SandboxSpec], Awaitable[Sandbox]]


class SandboxPool:
    """Keeps up to `ahead` fresh sandboxes of each spec that was asked for.

    A sandbox is used once. A start that is slow or fails holds up nobody but its own spec.
    """

    def __init__(self, *, ahead: int = 4, opener: Opener = open_sandbox) -> None:
        """Starts nothing yet; use `async with`.

        Args:
            ahead: Fresh sandboxes kept of each spec, >= 1.
            opener: What makes one.
        """
        if ahead < 1:
            raise ConfigError(f"SandboxPool.ahead must be >= 1, got {ahead}.")
        self._ahead, self._open = ahead, opener
        self._fresh: dict[SandboxSpec, deque[Sandbox]] = {}
        self._tasks: TaskGroup | None = None
        self._making: dict[SandboxSpec, int] = {}

    def fresh(self, spec: SandboxSpec) -> int:
        """How many of it wait to be used."""
        return len(self._fresh.get(spec, ()))

    def prepare(self, spec: SandboxSpec) -> None:
        """Begins to make sandboxes of it ahead."""
        tasks = self._require_open()
        missing = self._ahead - self.fresh(spec) - self._making.get(spec, 0)
        for _ in range(missing):
            self._making[spec] = self._making.get(spec, 0) + 1
            tasks.start_soon(self._make, spec, name="sandbox made ahead")

    @asynccontextmanager
    async def lease(self, spec: SandboxSpec) -> AsyncGenerator[Sandbox]:
        """A fresh sandbox, closed at the end of the block; another is made ahead meanwhile."""
        self._require_open()
        waiting = self._fresh.setdefault(spec, deque())
        sandbox: Sandbox | None = None
        while waiting and sandbox is None:
            candidate = waiting.popleft()
            if candidate.alive:
                sandbox = candidate
            else:
                await candidate.aclose()
        if sandbox is None:
            sandbox = await self._open(spec)
        try:
            self.prepare(spec)
            yield sandbox
        finally:
            await sandbox.aclose()

    async def _make(self, spec: SandboxSpec) -> None:
        try:
            sandbox = await self._open(spec)
        except SandboxError:
            return  # whoever needs one next starts it and hears why it fails
        finally:
            self._making[spec] -= 1
        self._fresh.setdefault(spec, deque()).append(sandbox)

    def _require_open(self) -> TaskGroup:
        if self._tasks is None:
            raise ClosedError("The pool of sandboxes isn't open: use `async with SandboxPool()`.")
        return self._tasks

    async def __aenter__(self) -> Self:
        self._tasks = await anyio.create_task_group().__aenter__()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        tasks, self._tasks = self._tasks, None
        assert tasks is not None
        tasks.cancel_scope.cancel()
        try:
            await tasks.__aexit__(kind, error, trace)
        finally:
            with anyio.CancelScope(shield=True):
                for waiting in self._fresh.values():
                    while waiting:
                        await waiting.popleft().aclose()
