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
from gymnasium.error import ResetNeeded

from gymllm.bridge import running_loop
from gymllm.errors import ClosedError, EnvCrashedError, EnvTimeoutError, EnvTypeError
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
        self._busy = False
        self._call_ended: anyio.Event | None = (
            None  # what `aclose` waits for, if a call is in progress
        )

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
            return await worker.call("reset", seed=seed, options=dict(options) if options else None)

        return await self._guarded("reset", self._limits.reset_timeout_s, operation, check_reset)

    async def step(self, action: str) -> StepResult:
        """Takes one action.

        Raises:
            EnvError: It broke; the slot is empty and needs a reset.
            ClosedError: The slot was closed, perhaps meanwhile.
            gymnasium.error.ResetNeeded: The slot is empty.
        """
        worker = self._made("step")
        self._stats.steps += 1
        return await self._guarded(
            "step", self._limits.step_timeout_s, lambda: worker.call("step", action), check_step
        )

    async def render(self) -> object:
        """What the environment's `render` returns. Raises as `step`."""
        worker = self._made("render")
        return await self._guarded(
            "render",
            self._limits.step_timeout_s,
            lambda: worker.call("render"),
            lambda frame: frame,
        )

    async def aclose(self) -> None:
        """Cancels the call in progress, which raises `ClosedError`, and closes the environment."""
        self._closed = True
        deadline = anyio.current_time() + self._limits.close_timeout_s
        if self._scope is not None:
            self._scope.cancel()
        if self._busy:
            self._call_ended = anyio.Event()
            with anyio.CancelScope(deadline=deadline, shield=True):
                await self._call_ended.wait()
        await self._discard(deadline)

    def _made(self, method: str) -> Worker:
        if self._worker is None and not self._closed:
            raise ResetNeeded(self._say(method, "there is no environment: call reset() first"))
        return cast("Worker", self._worker)  # a closed slot's is never called

    async def _guarded(
        self,
        method: str,
        limit_s: float,
        operation: Callable[[], Awaitable[object]],
        check: Callable[[object], T],
    ) -> T:
        """Runs one call within its limit; unless it is answered well, the environment is closed."""
        if self._closed:
            raise ClosedError(self._say(method, "the pool is closed"))
        self._busy, healthy = True, False
        try:
            answer = check(await self._limited(method, limit_s, operation))
            healthy = True
            return answer
        except EnvTypeError as error:
            self._stats.type_errors += 1
            raise EnvTypeError(self._say(method, str(error))) from None
        finally:
            if not healthy:
                await self._discard(anyio.current_time() + self._limits.close_timeout_s)
            self._busy = False
            if self._call_ended is not None:
                self._call_ended.set()

    async def _limited(
        self, method: str, limit_s: float, operation: Callable[[], Awaitable[object]]
    ) -> object:
        """Runs one call within its limit and says by the exception's type how it ended."""
        problem: BaseException
        cancellations = _cancellations()
        with anyio.CancelScope(deadline=anyio.current_time() + limit_s) as scope:
            self._scope = scope
            try:
                return await operation()
            except (Exception, SystemExit) as error:
                if not scope.cancel_called and _cancellations() > cancellations:
                    # It answered its caller's cancellation with an exception of its own.
                    self._stats.cancelled += 1
                    raise asyncio.CancelledError from error
                problem = error
            except BaseException as error:
                stray = isinstance(error, asyncio.CancelledError) and (
                    _cancellations()
                    == cancellations  # nobody cancelled us: the environment raised it
                )
                if scope.cancel_called or not stray:
                    self._stats.cancelled += not scope.cancel_called
                    raise
                problem = error
            finally:
                self._scope = None
            if (
                not scope.cancel_called
            ):  # else it is the cancellation that the environment raised from
                self._stats.crashes += 1
                raise EnvCrashedError(
                    self._say(method, f"raised {type(problem).__name__}: {problem}")
                ) from problem
        if self._closed:
            raise ClosedError(self._say(method, "the pool was closed meanwhile"))
        self._stats.timeouts += 1
        raise EnvTimeoutError(
            self._say(
                method,
                f"no answer within {limit_s:g} s; raise {method}_timeout_s if it needs longer",
            )
        )

    async def _discard(self, deadline: float) -> None:
        """Closes the environment, by the deadline and come what may."""
        worker, self._worker = self._worker, None
        if worker is None:
            return
        self._stats.abandoned_threads += worker.is_lost
        ended = False
        with anyio.CancelScope(deadline=deadline, shield=True):
            try:
                await worker.aclose()
                ended = True
            except (Exception, SystemExit) as error:
                log.warning("%s", self._say("close", f"raised {type(error).__name__}: {error}"))
        self._stats.close_failures += not ended

    def _say(self, method: str, what: str) -> str:
        return f"{self._env_id}: {method}: {what} (slot {self.index})."


def _cancellations() -> int:
    """How often the current asyncio task was asked to cancel; 0 elsewhere."""
    task = asyncio.current_task() if running_loop() is not None else None
    return task.cancelling() if task is not None else 0


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
    if not isinstance(answer, tuple):
        raise EnvTypeError(f"must return a tuple of {count}, got {_shown(answer)}")
    parts = cast("tuple[object, ...]", answer)
    if len(parts) != count:
        raise EnvTypeError(f"must return a tuple of {count}, got {len(parts)}: {_shown(parts)}")
    return parts


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 200 else f"{text[:197]}..."


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
