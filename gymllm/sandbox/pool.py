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
    """Keeps up to `ahead` fresh sandboxes of each spec that was asked for, `most` of all together.

    A sandbox is used once. A start that is slow or fails holds up nobody but its own spec. Where there are
    `most`, those of the spec that nobody has asked for the longest are closed for new ones.
    """

    def __init__(self, *, ahead: int = 4, most: int = 64, opener: Opener = open_sandbox) -> None:
        """Starts nothing yet; use `async with`.

        Args:
            ahead: Fresh sandboxes kept of each spec, >= 1.
            most: Fresh ones of all specs, those being made included, >= `ahead`.
            opener: What makes one; `functools.partial(open_sandbox, kind="docker")`.
        """
        if ahead < 1:
            raise ConfigError(f"SandboxPool.ahead must be >= 1, got {ahead}.")
        if most < ahead:
            raise ConfigError(f"SandboxPool.most must be >= ahead ({ahead}), got {most}.")
        self._ahead, self._most, self._open = ahead, most, opener
        self._fresh: dict[SandboxSpec, deque[Sandbox]] = {}
        """The spec that was asked for last comes last."""
        self._tasks: TaskGroup | None = None
        self._making: dict[SandboxSpec, int] = {}

    def fresh(self, spec: SandboxSpec) -> int:
        """How many of it wait to be used."""
        return len(self._fresh.get(spec, ()))

    def prepare(self, spec: SandboxSpec) -> None:
        """Begins to make sandboxes of it ahead."""
        tasks = self._require_open()
        self._fresh[spec] = self._fresh.pop(spec, deque())
        missing = self._ahead - self.fresh(spec) - self._making.get(spec, 0)
        for _ in range(missing):
            if not self._has_room(spec, tasks):
                return  # all are being made; who asks later finds room
            self._making[spec] = self._making.get(spec, 0) + 1
            tasks.start_soon(self._make, spec, name="sandbox made ahead")

    def _has_room(self, spec: SandboxSpec, tasks: TaskGroup) -> bool:
        """Whether one more of it may be made; closes one of another spec if that is what it takes."""
        if sum(self._making.values()) + sum(map(len, self._fresh.values())) < self._most:
            return True
        for other, waiting in self._fresh.items():
            if other != spec and waiting:
                tasks.start_soon(waiting.popleft().aclose, name="sandbox nobody asks for")
                if not waiting:
                    del self._fresh[other]
                return True
        return False

    @asynccontextmanager
    async def lease(self, spec: SandboxSpec) -> AsyncGenerator[Sandbox]:
        """A fresh sandbox, closed at the end of the block; another is made ahead meanwhile."""
        self._require_open()
        waiting = self._fresh.get(spec, deque[Sandbox]())
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
            if not self._making[spec]:
                del self._making[spec]
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
