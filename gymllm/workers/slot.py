"""`Slot`: one place of a pool, and everything that can go wrong in it.

A slot makes its environment on the first reset, bounds every call, checks every answer, and turns each
fault into an `EnvError` that names the environment, the slot and what happened. A faulty environment is
closed, within a limit, and the next reset makes a new one; nothing of it reaches the other slots.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from math import isfinite
from typing import TypeVar, cast

import anyio
import numpy as np

from gymllm.errors import (
    ClosedError,
    EnvCrashedError,
    EnvError,
    EnvTimeoutError,
    EnvTypeError,
)
from gymllm.workers.worker import Worker

T = TypeVar("T")

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What an environment answered to an action; types are checked."""

    observation: str
    reward: float
    """Finite."""
    terminated: bool
    truncated: bool
    info: dict[str, object] = field(default_factory=dict[str, object])


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How long things may take in a slot, in seconds."""

    reset_timeout_s: float
    """A reset, and making the environment where that comes first."""
    step_timeout_s: float
    close_timeout_s: float


@dataclass(kw_only=True)
class PoolStats:
    """What a pool has counted since it was made."""

    resets: int = 0
    steps: int = 0
    crashes: int = 0
    """Calls that raised."""
    timeouts: int = 0
    """Calls that passed their limit."""
    type_errors: int = 0
    """Answers of a wrong type."""
    cancelled: int = 0
    """Calls that were cancelled by whoever made them."""
    close_failures: int = 0
    """Environments that raised in `close` or did not end it in time."""
    built: int = 0
    """Environments that were made, the first ones included."""
    rebuilt: int = 0
    """... of these, in place of one that broke."""
    abandoned_threads: int = 0
    """Threads left behind because their environment never came back."""


class Slot:
    """One environment at a time. One call at a time, all on one event loop."""

    def __init__(
        self,
        index: int,
        *,
        env_id: str,
        make_worker: Callable[[], Worker],
        limits: Limits,
        stats: PoolStats,
    ) -> None:
        self.index = index
        self._env_id = env_id
        self._make_worker = make_worker
        self._limits = limits
        self._stats = stats
        self._worker: Worker | None = None
        self._was_built = False
        self._closed = False
        self._scope: anyio.CancelScope | None = None  # of the call in progress
        self._call_ended = anyio.Event()

    async def reset(
        self, *, seed: int | None = None, options: Mapping[str, object] | None = None
    ) -> tuple[str, dict[str, object]]:
        """Resets the environment, which is made first if there is none.

        Raises:
            EnvError: It broke; the slot is empty again.
            ClosedError: The slot was closed, perhaps meanwhile.
        """
        self._stats.resets += 1

        async def operation() -> object:
            worker = self._worker
            if worker is None:
                worker = self._worker = self._make_worker()
                self._stats.rebuilt += self._was_built
                self._stats.built += 1
                self._was_built = True
                await worker.start()
            return await worker.call(
                "reset", seed=seed, options=dict(options) if options is not None else None
            )

        return await self._guarded("reset", self._limits.reset_timeout_s, operation, check_reset)

    async def step(self, action: str) -> StepResult:
        """Takes one action.

        Raises:
            EnvError: It broke; the slot is empty and needs a reset.
            ClosedError: The slot was closed, perhaps meanwhile.
        """
        self._stats.steps += 1
        return await self._guarded(
            "step", self._limits.step_timeout_s, lambda: self._call("step", action), check_step
        )

    async def render(self) -> object:
        """What the environment's `render` returns."""
        return await self._guarded(
            "render", self._limits.step_timeout_s, lambda: self._call("render"), lambda value: value
        )

    async def aclose(self) -> None:
        """Cancels the call in progress, which raises `ClosedError`, and closes the environment."""
        self._closed = True
        if self._scope is not None:
            ended = self._call_ended = anyio.Event()
            self._scope.cancel()
            with anyio.move_on_after(self._limits.close_timeout_s, shield=True):
                await ended.wait()
        await self._discard()

    async def _call(self, method: str, *args: object) -> object:
        if self._worker is None:
            raise EnvCrashedError(self._say(method, "there is no environment; reset first"))
        return await self._worker.call(method, *args)

    async def _guarded(
        self,
        method: str,
        limit_s: float,
        operation: Callable[[], Awaitable[object]],
        check: Callable[[object], T],
    ) -> T:
        """Runs one call within its limit and turns whatever goes wrong into an `EnvError`."""
        if self._closed:
            raise ClosedError(self._say(method, "the pool is closed"))
        problem: BaseException | None = None
        answered, answer = False, None
        try:
            with anyio.move_on_after(limit_s) as self._scope:
                answer = await operation()
                answered = True
        except EnvError:
            raise
        except (Exception, SystemExit) as error:
            problem = error
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                self._stats.cancelled += 1
                await self._discard()
                raise
            problem = error  # nobody cancelled us: the environment's own code raised it
        except BaseException:
            self._stats.cancelled += 1
            await self._discard()
            raise
        finally:
            scope, self._scope = self._scope, None
            self._call_ended.set()
        if answered:
            try:
                return check(answer)
            except EnvTypeError as error:
                self._stats.type_errors += 1
                await self._discard()
                raise EnvTypeError(self._say(method, str(error))) from None
        await self._discard()
        if self._closed:
            raise ClosedError(self._say(method, "the pool was closed meanwhile")) from problem
        if scope is not None and scope.cancel_called:
            self._stats.timeouts += 1
            raise EnvTimeoutError(
                self._say(method, f"no answer within {limit_s:g} s; raise the limit or mend it")
            ) from problem
        self._stats.crashes += 1
        raise EnvCrashedError(
            self._say(method, f"raised {type(problem).__name__}: {problem}")
        ) from problem

    async def _discard(self) -> None:
        """Closes the environment, within its limit and come what may."""
        worker, self._worker = self._worker, None
        if worker is None:
            return
        if worker.is_lost:
            self._stats.abandoned_threads += 1
        ended = False
        with anyio.move_on_after(self._limits.close_timeout_s, shield=True):
            try:
                await worker.aclose()
                ended = True
            except (Exception, SystemExit) as error:
                log.warning("%s", self._say("close", f"raised {type(error).__name__}: {error}"))
        if not ended:
            self._stats.close_failures += 1

    def _say(self, method: str, what: str) -> str:
        return f"{self._env_id}: {method}: {what} (slot {self.index})."


def check_reset(answer: object) -> tuple[str, dict[str, object]]:
    """The answer of a reset, its types checked.

    Raises:
        EnvTypeError: It is not a tuple of a string and a dict.
    """
    observation, info = _parts(answer, 2)
    return _text(observation), _info(info)


def check_step(answer: object) -> StepResult:
    """The answer of a step, its types checked.

    Raises:
        EnvTypeError: It is not what `gymnasium.Env.step` returns in a text environment.
    """
    observation, reward, terminated, truncated, info = _parts(answer, 5)
    if not isinstance(reward, int | float | np.number) or not isfinite(cast("float", reward)):
        raise EnvTypeError(f"the reward must be a finite number, got {reward!r}")
    for name, flag in (("terminated", terminated), ("truncated", truncated)):
        if not isinstance(flag, bool | np.bool):
            raise EnvTypeError(f"{name} must be a bool, got {flag!r}")
    return StepResult(
        observation=_text(observation),
        reward=float(cast("float", reward)),
        terminated=bool(terminated),
        truncated=bool(truncated),
        info=_info(info),
    )


def _parts(answer: object, count: int) -> tuple[object, ...]:
    if not isinstance(answer, tuple) or len(cast("tuple[object, ...]", answer)) != count:
        shown = (
            f"{len(cast('tuple[object]', answer))}" if isinstance(answer, tuple) else repr(answer)
        )
        raise EnvTypeError(f"must return a tuple of {count}, got {shown}")
    return cast("tuple[object, ...]", answer)


def _text(observation: object) -> str:
    if not isinstance(observation, str):
        raise EnvTypeError(
            f"the observation must be a str, got {type(observation).__name__}; "
            "wrap the environment in gymllm.TextAdapter"
        )
    return observation


def _info(info: object) -> dict[str, object]:
    if not isinstance(info, dict):
        raise EnvTypeError(f"info must be a dict, got {type(info).__name__}")
    return cast("dict[str, object]", info)
