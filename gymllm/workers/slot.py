"""`Slot`: one place of a pool, and everything that can go wrong in it.

A slot makes its environment on the first reset, bounds every call, checks every answer, and turns each
fault into an `EnvError` that names the environment, the slot and what happened. A faulty environment is
closed, within a limit, and the next reset makes a new one; nothing of it reaches the other slots.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from math import isfinite
from typing import Any, NamedTuple, TypeVar, cast

import anyio
import numpy as np
from gymnasium.error import ResetNeeded

from gymllm.bridge import Finished, running_loop, running_task
from gymllm.errors import (
    ClosedError,
    ConfigError,
    ConfigTypeError,
    EnvCrashedError,
    EnvTimeoutError,
    EnvTypeError,
    UnsendableError,
)
from gymllm.limit import Limit, LimitWithin
from gymllm.spaces import Unicode
from gymllm.workers.given import checked_options, checked_seed
from gymllm.workers.inline import InlineWorker
from gymllm.workers.limits import Limits, PoolStats
from gymllm.workers.supply import WorkerSupply
from gymllm.workers.thread import ThreadWorker
from gymllm.workers.worker import EnvFacts, RemoteError, Unsendable, Worker, WorkerDied

T = TypeVar("T")

log = logging.getLogger(__name__)

LONGEST_MESSAGE = 4_000
"""Characters of what an environment raised that its error keeps."""


class StepResult(NamedTuple):
    """What an environment answered to an action, as `gymnasium.Env.step` returns it; types are checked."""

    observation: Any
    """A text, or a chat message (`gymllm.spaces.Message`); in a pool with text=False, anything."""
    reward: float
    """Finite."""
    terminated: bool
    truncated: bool
    info: dict[str, object]


class Slot:
    """One environment at a time. One call at a time, all on one event loop."""

    def __init__(
        self,
        index: int,
        *,
        env_id: str,
        supply: WorkerSupply,
        limits: Limits,
        stats: PoolStats,
        text: bool = True,
    ) -> None:
        """Makes nothing yet.

        Args:
            index: The slot's number, for messages.
            env_id: What messages call the environment.
            supply: Gives started workers.
            limits: How long things may take.
            stats: Where things are counted.
            text: Whether observations must be texts or chat messages.
        """
        self.index = index
        self._env_id = env_id
        self._supply = supply
        self._limits = limits
        self._stats = stats
        self._text = text
        self._worker: Worker | None = None
        self._facts: EnvFacts | None = None
        self._was_built = False
        self._closed = False
        self._limit: Limit | LimitWithin | None = None  # of the call in progress
        self._busy = False
        self._call_ended: anyio.Event | None = (
            None  # what `aclose` waits for, if a call is in progress
        )

    async def start(self) -> EnvFacts:
        """Makes the environment if there is none.

        Raises:
            EnvError: It could not be made, or not in time.
            ClosedError: The slot was closed, perhaps meanwhile.
        """
        if self._worker is None:
            spare = self._supply.take()
            if spare is not None:
                self._worker, self._facts = spare
            else:
                async with self._supply.turn:  # waited for outside the limit
                    self._facts = await _end(
                        self._guarded(
                            "start",
                            self._limits.start_timeout_s,
                            self._start_worker,
                            self._check_facts,
                        )
                    )
            self._stats.rebuilt += self._was_built
            self._was_built = True
        assert self._facts is not None, "a started worker has told its facts"
        return self._facts

    def _start_worker(self) -> Finished[EnvFacts] | Awaitable[EnvFacts]:
        worker = self._worker = self._supply.make()
        return worker.start()

    async def reset(
        self, *, seed: int | None = None, options: Mapping[str, object] | None = None
    ) -> tuple[str, dict[str, object]]:
        """Resets the environment, which is made first if there is none.

        Raises:
            EnvError: It broke; the slot is empty again.
            ConfigError: The seed or the options can't be used; it is as it was.
            UnsendableError: An option can't be sent to its process; it is as it was.
            ClosedError: The slot was closed, perhaps meanwhile.
        """
        seed, given = checked_seed(seed), checked_options(options)
        if self._worker is None:
            await self.start()
        worker = self._made("reset")
        self._stats.resets += 1
        return await _end(
            self._guarded(
                "reset",
                self._limits.reset_timeout_s,
                lambda: worker.call("reset", seed=seed, options=given),
                lambda answer: check_reset(answer, text=self._text),
            )
        )

    def begin_step(
        self, action: Any, outer: Limit | None = None
    ) -> Finished[StepResult] | Coroutine[object, Any, StepResult]:
        """Takes one action.

        Args:
            action: Given to the environment.
            outer: A limit that the caller is in, and that ends if this step's own limit passes.

        Returns:
            The answer where nothing had to be waited for, else what to await for it, which raises:

            EnvError: It broke; the slot is empty and needs a reset.
            UnsendableError: The action can't be sent to its process; it is as it was.
            ClosedError: The slot was closed, perhaps meanwhile.

        Raises:
            ConfigTypeError: The action is no text, and the environment reads nothing else.
            ClosedError: The slot was closed.
            gymnasium.error.ResetNeeded: The slot is empty.
        """
        worker = self._made("step")
        if type(action) is not str:
            self.check_action(action)
        self._stats.steps += 1
        return self._guarded(
            "step",
            self._limits.step_timeout_s,
            lambda: worker.call("step", action),
            self._check_step,
            outer,
        )

    def check_action(self, action: object) -> None:
        """Raises `ConfigTypeError` for an action that the environment can't be given."""
        reads_text = self._facts is not None and isinstance(self._facts.action_space, Unicode)
        if reads_text and not isinstance(action, str):
            raise ConfigTypeError(
                f"{self._env_id}: the action must be a str, what an agent would write, got "
                f"{_shown(action)} of type {type(action).__name__} (slot {self.index})."
            )

    def forget(self) -> None:
        """Lets go of a worker whose loop is closed; one that runs on no loop of its own stays."""
        if not isinstance(self._worker, InlineWorker):
            self._worker = None

    async def render(self) -> object:
        """What the environment's `render` returns. Raises as `step`."""
        return await self.call("render")

    async def call(self, method: str, *args: object, **kwargs: object) -> object:
        """What `workers.worker.invoke` returns, within the limit of a step. Raises as `step`."""
        worker = self._made(method)
        return await _end(
            self._guarded(
                method,
                self._limits.step_timeout_s,
                lambda: worker.call(method, *args, **kwargs),
                lambda answer: answer,
            )
        )

    def check_idle(self, method: str) -> None:
        """Raises `ConfigError` while a call is in progress."""
        if self._busy:
            raise ConfigError(
                f"{self._env_id}: {method}: another call is in progress (slot {self.index}); an "
                "environment answers one at a time, so give each task a lease of its own."
            )

    async def wait_idle(self) -> None:
        """Waits for the call in progress, if there is one; no longer than closing may take."""
        if self._busy:
            self._call_ended = self._call_ended or anyio.Event()
            with anyio.move_on_after(self._limits.close_timeout_s, shield=True):
                await self._call_ended.wait()

    async def aclose(self) -> None:
        """Cancels the call in progress, which raises `ClosedError`, and closes the environment."""
        self._closed = True
        deadline = anyio.current_time() + self._limits.close_timeout_s
        if self._limit is not None:
            self._limit.cancel()
        if self._busy:
            self._call_ended = self._call_ended or anyio.Event()
            with anyio.CancelScope(deadline=deadline, shield=True):
                await self._call_ended.wait()
        await self._discard(deadline)

    def _made(self, method: str) -> Worker:
        if self._worker is None and not self._closed:
            raise ResetNeeded(self._say(method, "there is no environment: call reset() first"))
        return cast("Worker", self._worker)  # a closed slot's is never called

    def _guarded(
        self,
        method: str,
        limit_s: float,
        begin: Callable[[], Finished[object] | Awaitable[object]],
        check: Callable[[object], T],
        outer: Limit | None = None,
    ) -> Finished[T] | Coroutine[object, Any, T]:
        """One call; what waits does so within its limit, and what goes wrong closes the environment.

        A limit costs more than most steps, so there is one only where something waits.
        """
        if self._closed:
            raise ClosedError(self._say(method, "the pool is closed"))
        if self._busy:
            self.check_idle(method)
        try:
            started = begin()
        except KeyboardInterrupt:
            raise
        except BaseException as error:  # whatever its class: nothing of ours is awaited here
            return self._go_on(method, limit_s, error, check, outer)
        if not isinstance(started, Finished):
            return self._go_on(method, limit_s, started, check, outer)
        try:
            return Finished(check(started.value))
        except EnvTypeError as error:
            return self._go_on(method, limit_s, error, check, outer)

    async def _go_on(
        self,
        method: str,
        limit_s: float,
        started: Awaitable[object] | BaseException,
        check: Callable[[object], T],
        outer: Limit | None,
    ) -> T:
        """The rest of a call that has to wait, or has failed."""
        self._busy, healthy = True, False
        try:
            if isinstance(started, EnvTypeError):
                raise started
            if isinstance(started, BaseException):
                raise self._crashed(method, started) from started
            answer = check(await self._limited(method, limit_s, started, outer))
            healthy = True
            return answer
        except Unsendable as error:  # the caller's mistake, of which the environment knows nothing
            healthy = True
            raise UnsendableError(
                f"{self._env_id}: {method}: {error} (slot {self.index})."
            ) from error
        except EnvTypeError as error:
            self._stats.type_errors += 1
            raise EnvTypeError(self._say(method, str(error))) from None
        finally:
            if not healthy:
                await self._discard(anyio.current_time() + self._limits.close_timeout_s)
            self._busy = False
            if self._call_ended is not None:
                self._call_ended.set()
                self._call_ended = None

    async def _limited(
        self, method: str, limit_s: float, operation: Awaitable[object], outer: Limit | None
    ) -> object:
        """Waits for a call within its limit and says by the exception's type how it ended."""
        problem: BaseException
        loop = running_loop() if outer is None else outer.loop
        task = asyncio.current_task(loop) if loop is not None else None
        cancellations = task.cancelling() if task is not None else 0
        ours = task if task is not None else running_task()
        with Limit(limit_s) if outer is None else outer.within(limit_s) as limit:
            self._limit = limit
            try:
                return await operation
            except KeyboardInterrupt:
                raise
            except GeneratorExit as error:
                if ours is None or running_task() is not ours:
                    raise  # we are thrown away
                problem = error  # the environment raised it
            except Exception as error:
                if isinstance(error, EnvTypeError | Unsendable) and not limit.passed:
                    raise  # `Env` has looked at the answer already; or it was never asked
                if not limit.passed and task is not None and task.cancelling() > cancellations:
                    # It answered its caller's cancellation with an exception of its own.
                    self._stats.cancelled += 1
                    raise asyncio.CancelledError from error
                problem = error
            except BaseException as error:
                cancelled = isinstance(error, anyio.get_cancelled_exc_class())
                # On asyncio it can be told whether anybody cancelled us, or the environment raised it.
                stray = not cancelled or (
                    isinstance(error, asyncio.CancelledError)
                    and task is not None
                    and task.cancelling() == cancellations
                )
                if limit.passed or not stray:
                    self._stats.cancelled += not limit.passed
                    raise
                problem = error
            finally:
                self._limit = None
            if not limit.passed:  # else it is the cancellation that the environment raised from
                raise self._crashed(method, problem) from problem
        if self._closed:
            raise ClosedError(self._say(method, "the pool was closed meanwhile"))
        self._stats.timeouts += 1
        raise EnvTimeoutError(
            self._say(
                method,
                f"no answer within {limit_s:g} s; raise {_LIMITS.get(method, 'step_timeout_s')} if it "
                "needs longer",
            )
        )

    def _check_facts(self, answer: object) -> EnvFacts:
        assert isinstance(answer, EnvFacts), "that is what starting answers"
        if not self._text:
            self._supply.check_spaces(answer)
        return answer

    def _check_step(self, answer: object) -> StepResult:
        return check_step(answer, text=self._text)

    def _crashed(self, method: str, problem: BaseException) -> EnvCrashedError:
        self._stats.crashes += 1
        if isinstance(problem, WorkerDied):
            return EnvCrashedError(self._say(method, str(problem)))
        what = problem.summary if isinstance(problem, RemoteError) else _summary(problem)
        return EnvCrashedError(self._say(method, f"raised {what}"))

    async def _discard(self, deadline: float) -> None:
        """Closes the environment, by the deadline and come what may."""
        worker, self._worker = self._worker, None
        if worker is None:
            return
        self._stats.abandoned_threads += worker.is_lost and isinstance(worker, ThreadWorker)
        ended = False
        with anyio.CancelScope(deadline=deadline, shield=True):
            try:
                await worker.aclose()
                ended = True
            except (Exception, SystemExit) as error:
                log.warning("%s", self._say("close", f"raised {_summary(error)}"))
        self._stats.close_failures += not ended

    def _say(self, method: str, what: str) -> str:
        if len(what) > LONGEST_MESSAGE:
            what = f"{what[:LONGEST_MESSAGE]}..."
        text = f"{self._env_id}: {method}: {what} (slot {self.index})."
        tail = self._worker.log_tail if self._worker is not None else ""
        return f"{text}\nThe last that its process printed:\n{tail}" if tail else text


async def _end(begun: Finished[T] | Coroutine[object, Any, T]) -> T:
    return begun.value if isinstance(begun, Finished) else await begun


def _summary(problem: BaseException) -> str:
    try:
        return f"{type(problem).__name__}: {problem}"
    except Exception:  # a __str__ that raises
        return type(problem).__name__


_LIMITS = {"start": "start_timeout_s", "reset": "reset_timeout_s"}


def check_reset(answer: object, *, text: bool = True) -> tuple[Any, dict[str, object]]:
    """The answer of a reset, its types checked.

    Args:
        answer: What the environment returned.
        text: Whether the observation must be a text or a chat message.

    Raises:
        EnvTypeError: It is not a tuple of an observation and a dict.
    """
    observation, info = _parts(answer, 2)
    return _text(observation) if text else observation, _info(info)


def check_step(answer: object, *, text: bool = True) -> StepResult:
    """The answer of a step, its types checked.

    Args:
        answer: What the environment returned.
        text: Whether the observation must be a text or a chat message.

    Raises:
        EnvTypeError: It is not what `gymnasium.Env.step` returns.
    """
    observation, reward, terminated, truncated, info = _parts(answer, 5)
    if not _is_finite(reward):
        raise EnvTypeError(f"the reward must be a finite number, got {_shown(reward)}")
    if not (type(terminated) is bool and type(truncated) is bool):
        for name, flag in (("terminated", terminated), ("truncated", truncated)):
            if not isinstance(flag, bool | np.bool):
                raise EnvTypeError(f"{name} must be a bool, got {_shown(flag)}")
    return StepResult(
        _text(observation) if text else observation,
        float(cast("float", reward)),
        bool(terminated),
        bool(truncated),
        _info(info),
    )


def _parts(answer: object, count: int) -> tuple[object, ...]:
    if not isinstance(answer, tuple):
        raise EnvTypeError(f"must return a tuple of {count}, got {_shown(answer)}")
    parts = cast("tuple[object, ...]", answer)
    if len(parts) != count:
        raise EnvTypeError(f"must return a tuple of {count}, got {len(parts)}: {_shown(parts)}")
    return parts


def _is_finite(reward: object) -> bool:
    if type(reward) is float:
        return isfinite(reward)
    if not isinstance(reward, int | float | np.integer | np.floating | np.bool):
        return False
    try:
        return isfinite(cast("float", reward))
    except OverflowError:  # an int that no float holds
        return False


def _shown(value: object) -> str:
    try:
        text = repr(value)
    except Exception:  # a __repr__ that raises
        text = f"an object of {type(value).__name__}"
    return text if len(text) <= 200 else f"{text[:197]}..."


def _text(observation: object) -> object:
    if not isinstance(observation, str) and not _is_message(observation):
        raise EnvTypeError(
            f"the observation must be a str, got {type(observation).__name__}; "
            "wrap the environment in gymllm.TextAdapter"
        )
    return observation


def _is_message(observation: object) -> bool:
    if not isinstance(observation, dict):
        return False
    return {"role", "content"} <= cast("dict[object, object]", observation).keys()


def _info(info: object) -> dict[str, object]:
    if not isinstance(info, dict):
        raise EnvTypeError(f"info must be a dict, got {type(info).__name__}")
    return cast("dict[str, object]", info)
