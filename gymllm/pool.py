"""`EnvPool`: many environments at once, none of which waits for another.

Two faces. The asynchronous one lends environments to episodes: `async with pool.lease() as env`. The
synchronous one is a `gymnasium.vector.VectorEnv`: it steps all of them concurrently and returns when the
slowest has answered, as that interface wants. A pool is used by one face and on one event loop.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import anyio
import numpy as np
import numpy.typing as npt
from anyio.lowlevel import checkpoint
from gymnasium import spaces
from gymnasium.error import ResetNeeded
from gymnasium.vector import AutoresetMode, VectorEnv
from gymnasium.vector.utils import batch_space

from gymllm.bridge import HomeLoop
from gymllm.errors import ClosedError, ConfigError, EnvBatchError, EnvError, UnknownNameError
from gymllm.registration import check_id, make
from gymllm.workers import (
    InlineWorker,
    Limits,
    MakeEnv,
    PoolStats,
    Slot,
    StepResult,
    ThreadWorker,
    Worker,
)

T = TypeVar("T")
Texts = tuple[str, ...]

WORKERS = ("inline", "thread")


class LeasedEnv:
    """One environment of a pool, lent to one episode at a time. Not for use by two tasks at once."""

    def __init__(self, slot: Slot) -> None:
        self._slot: Slot | None = slot
        self._running = False
        self.slot = slot.index

    async def reset(
        self, *, seed: int | None = None, options: Mapping[str, object] | None = None
    ) -> tuple[str, dict[str, object]]:
        """Starts an episode; makes the environment first if there is none or the last one broke.

        Cancellation reaches the environment's own code; the environment is then replaced.

        Raises:
            EnvError: The environment raised, passed its limit or answered with a wrong type. It is
                replaced: another `reset` gets a new one.
            ClosedError: The lease has ended or the pool is closed.
        """
        slot, self._running = self._lent(), False
        answer = await slot.reset(seed=seed, options=options)
        self._running = True
        return answer

    async def step(self, action: str) -> StepResult:
        """Takes one action. Cancellation and errors as for `reset`, and:

        Raises:
            gymnasium.error.ResetNeeded: This lease has no episode to step.
        """
        slot = self._lent()
        if not self._running:
            raise ResetNeeded(
                "this lease has no episode to step: it was not reset, or its last step ended the "
                "episode or raised. Call reset() first."
            )
        self._running = False  # stays so if the step raises or is cancelled
        result = await slot.step(action)
        self._running = not (result.terminated or result.truncated)
        return result

    def end(self) -> None:
        """Takes the environment back; further calls raise `ClosedError`."""
        self._slot = None

    def _lent(self) -> Slot:
        if self._slot is None:
            raise ClosedError("this environment's lease has ended; take another with pool.lease().")
        return self._slot


@dataclasses.dataclass(kw_only=True)
class _VectorState:
    observations: list[str]
    ended: npt.NDArray[np.bool]
    """Which have no episode to step: never reset, ended or broken."""


@dataclasses.dataclass
class _Waiter:
    woken: anyio.Event = dataclasses.field(default_factory=anyio.Event)
    slot: Slot | None = None


class EnvPool(VectorEnv[Texts, Texts, npt.NDArray[Any]]):
    """Environments that are made when first needed, lent out fairly and replaced when they break."""

    def __init__(
        self,
        make_env: str | MakeEnv,
        num_envs: int,
        *,
        worker: str = "inline",
        autoreset_mode: AutoresetMode | str = AutoresetMode.DISABLED,
        reset_timeout_s: float = 60.0,
        step_timeout_s: float = 60.0,
        close_timeout_s: float = 4.0,
        env_id: str | None = None,
    ) -> None:
        """Sets the pool up; no environment is made yet.

        Args:
            make_env: An id, or a function that makes one environment with its wrappers.
            num_envs: Most environments at once.
            worker: "inline": on the pool's loop, for environments that wait asynchronously or not at
                all. "thread": each in a thread, for those that block.
            autoreset_mode: Of the vector face: what happens after an episode's end. A reset that nobody
                asked for has no seed and no options, hence the default.
            reset_timeout_s: Limit of a reset, the making of the environment included.
            step_timeout_s: Limit of a step.
            close_timeout_s: Limit of closing one environment, and of closing the pool.
            env_id: What errors call the environment; by default its id or the function's name.

        Raises:
            ConfigError: A setting is wrong.
            UnknownNameError: There is no such environment or worker.
        """
        if num_envs < 1:
            raise ConfigError(f"num_envs must be >= 1, got {num_envs}.")
        if worker not in WORKERS:
            raise UnknownNameError("worker", worker, WORKERS)
        try:
            self.autoreset_mode = AutoresetMode(autoreset_mode)
        except ValueError:
            known = [mode.value for mode in AutoresetMode]
            raise UnknownNameError("autoreset_mode", str(autoreset_mode), known) from None
        limits = Limits(
            reset_timeout_s=reset_timeout_s,
            step_timeout_s=step_timeout_s,
            close_timeout_s=close_timeout_s,
        )
        for name, limit in dataclasses.asdict(limits).items():
            if not limit > 0:
                raise ConfigError(f"{name} must be > 0, got {limit}.")
        if isinstance(make_env, str):
            check_id(make_env)
            env_id = env_id or make_env
            make_env = functools.partial(make, make_env)
        self.env_id = env_id or getattr(make_env, "__name__", type(make_env).__name__)
        self.num_envs = num_envs
        self.metadata = {"autoreset_mode": self.autoreset_mode}
        self._make_env = make_env
        self._limits = limits
        self._stats = PoolStats()
        self._home = HomeLoop()
        self._slots = [
            Slot(
                index,
                env_id=self.env_id,
                make_worker=self._worker_maker(worker, make_env, index),
                limits=limits,
                stats=self._stats,
            )
            for index in range(num_envs)
        ]
        self._idle = self._slots[::-1]
        self._waiters: deque[_Waiter] = deque()
        self._vector: _VectorState | None = None
        self.closed = False

    @property
    def stats(self) -> PoolStats:
        """A copy of the counts so far."""
        return dataclasses.replace(self._stats)

    @asynccontextmanager
    async def lease(self) -> AsyncGenerator[LeasedEnv]:
        """Waits for a free environment, first come first served, and takes it back at the end.

        Raises:
            ClosedError: The pool is closed, perhaps meanwhile.
        """
        slot = await self._acquire()
        env = LeasedEnv(slot)
        try:
            yield env
        finally:
            env.end()
            self._release(slot)

    async def aclose(self) -> None:
        """Ends every call in progress and every wait with `ClosedError` and closes all environments.

        Ends within `close_timeout_s`, about; idempotent.
        """
        self.closed = True
        while self._waiters:
            self._waiters.popleft().woken.set()
        with anyio.CancelScope(shield=True):
            async with anyio.create_task_group() as group:
                for slot in self._slots:
                    group.start_soon(slot.aclose, name=f"close slot {slot.index}")

    def reset(
        self,
        *,
        seed: int | Sequence[int | None] | None = None,
        options: dict[str, Any] | None = None,
    ) -> tuple[Texts, dict[str, Any]]:
        """Resets all environments at once, or those of `options["reset_mask"]`.

        Args:
            seed: Of environment 0; environment i gets `seed + i`. Or one for each. None goes on.
            options: Given to each environment. "reset_mask", a bool array of shape [num_envs], is taken
                out: where it is False the environment stays as it is.

        Raises:
            EnvBatchError: Some broke; the others are reset and `error.answers` has their answers.
        """
        options = dict(options or {})
        mask = _mask(options.pop("reset_mask", None), self.num_envs)
        seeds = _seeds(seed, self.num_envs)
        state = self._vector_state()
        answers = self._home.run(
            self._gather(
                {
                    i: functools.partial(self._slots[i].reset, seed=seeds[i], options=options)
                    for i in mask.nonzero()[0].tolist()
                }
            )
        )
        infos: dict[str, Any] = {}
        for i, answer in answers.items():
            state.ended[i] = isinstance(answer, EnvError)
            if not isinstance(answer, EnvError):
                state.observations[i], info = answer
                infos = self._add_info(infos, info, i)
        _raise_failures(answers, self.num_envs)
        return tuple(state.observations), infos

    def step(
        self, actions: Sequence[str]
    ) -> tuple[Texts, npt.NDArray[Any], npt.NDArray[Any], npt.NDArray[Any], dict[str, Any]]:
        """Steps all environments at once.

        One that broke needs a reset (by mask, or by itself where the autoreset mode is NEXT_STEP); the
        others have taken their step and go on.

        Raises:
            EnvBatchError: Some broke; `error.answers` has the `StepResult` of each of the others.
            gymnasium.error.ResetNeeded: Some have no episode to step; none has been stepped.
            ConfigError: There are not as many actions as environments.
        """
        if len(actions) != self.num_envs:
            raise ConfigError(f"expected {self.num_envs} actions, got {len(actions)}.")
        state = self._vector_state()
        if state.ended.any() and self.autoreset_mode is not AutoresetMode.NEXT_STEP:
            raise ResetNeeded(
                f"environments {state.ended.nonzero()[0].tolist()} have no episode to step; reset "
                'them, e.g. with options={"reset_mask": terminated | truncated}.'
            )
        answers = self._home.run(
            self._gather(
                {
                    i: functools.partial(self._step_slot, i, action, reset_first=state.ended[i])
                    for i, action in enumerate(actions)
                }
            )
        )
        infos: dict[str, Any] = {}
        rewards = np.zeros(self.num_envs, np.float64)
        terminated, truncated = np.zeros((2, self.num_envs), np.bool)
        for i, answer in answers.items():
            if isinstance(answer, EnvError):
                state.ended[i] = True
                continue
            state.observations[i] = answer.observation
            rewards[i] = answer.reward
            terminated[i], truncated[i] = answer.terminated, answer.truncated
            infos = self._add_info(infos, answer.info, i)
            ended = answer.terminated or answer.truncated
            state.ended[i] = ended and self.autoreset_mode is not AutoresetMode.SAME_STEP
        _raise_failures(answers, self.num_envs)
        return tuple(state.observations), rewards, terminated, truncated, infos

    def render(self) -> tuple[Any, ...]:
        """What each environment's `render` returns."""
        self._vector_state()
        frames = self._home.run(self._gather(dict(enumerate(s.render for s in self._slots))))
        _raise_failures(frames, self.num_envs)
        return tuple(frames[i] for i in range(self.num_envs))

    def close_extras(self, **kwargs: Any) -> None:
        """What `close` calls: `aclose`, from synchronous code."""
        self._home.run(self.aclose())

    @functools.cached_property
    def _spaces(self) -> tuple[spaces.Space[Any], spaces.Space[Any]]:
        env = self._make_env()  # only the vector face's users ask, so no environment is made before
        try:
            return env.observation_space, env.action_space
        finally:
            env.close()

    # Gymnasium declares these four as attributes; properties, because they need an environment.

    @property
    def single_observation_space(self) -> spaces.Space[Any]:  # type: ignore[override]  # see above
        """Space of one environment's observation."""
        return self._spaces[0]

    @property
    def single_action_space(self) -> spaces.Space[Any]:  # type: ignore[override]  # see above
        """Space of one environment's action."""
        return self._spaces[1]

    @functools.cached_property
    def observation_space(self) -> spaces.Space[Any]:  # type: ignore[override]  # see above
        """Space of the observations of all environments."""
        return batch_space(self._spaces[0], self.num_envs)

    @functools.cached_property
    def action_space(self) -> spaces.Space[Any]:  # type: ignore[override]  # see above
        """Space of the actions of all environments."""
        return batch_space(self._spaces[1], self.num_envs)

    def _vector_state(self) -> _VectorState:
        self._check_open()
        if self._vector is None:
            if len(self._idle) != self.num_envs:
                raise ConfigError(
                    f"the pool of {self.env_id} has leased environments, so it can't be stepped as a "
                    "vector environment; make another pool for that."
                )
            self._idle.clear()
            self._vector = _VectorState(
                observations=[""] * self.num_envs, ended=np.ones(self.num_envs, np.bool)
            )
        return self._vector

    async def _gather(
        self, calls: Mapping[int, Callable[[], Awaitable[T]]]
    ) -> dict[int, T | EnvError]:
        """Makes all calls at once; each one's answer or fault, in order."""
        answers: dict[int, T | EnvError] = {}

        async def one(index: int, call: Callable[[], Awaitable[T]]) -> None:
            try:
                answers[index] = await call()
            except EnvError as error:
                answers[index] = error

        async with anyio.create_task_group() as group:
            for index, call in calls.items():
                group.start_soon(one, index, call, name=f"{self.env_id} slot {index}")
        return {index: answers[index] for index in calls}

    async def _step_slot(self, index: int, action: str, *, reset_first: bool) -> StepResult:
        slot = self._slots[index]
        if reset_first:
            observation, info = await slot.reset()
            return StepResult(
                observation=observation, reward=0.0, terminated=False, truncated=False, info=info
            )
        result = await slot.step(action)
        ended = result.terminated or result.truncated
        if ended and self.autoreset_mode is AutoresetMode.SAME_STEP:
            observation, info = await slot.reset()
            final = {"final_obs": result.observation, "final_info": result.info}
            return dataclasses.replace(result, observation=observation, info={**info, **final})
        return result

    async def _acquire(self) -> Slot:
        self._check_open()
        if self._vector is not None:
            raise ConfigError(
                f"the pool of {self.env_id} is stepped as a vector environment, so nothing can be "
                "leased from it; make another pool for that."
            )
        self._home.bind(f"the pool of {self.env_id}")
        await checkpoint()
        self._check_open()
        if self._idle and not self._waiters:
            return self._idle.pop()
        waiter = _Waiter()
        self._waiters.append(waiter)
        try:
            await waiter.woken.wait()
        except BaseException:
            if waiter.slot is not None:  # it was ours already, at the moment of the cancellation
                self._release(waiter.slot)
            elif waiter in self._waiters:
                self._waiters.remove(waiter)
            raise
        if waiter.slot is None:
            self._check_open()
        assert waiter.slot is not None, "a waiter is woken with a slot or because the pool closed"
        return waiter.slot

    def _release(self, slot: Slot) -> None:
        if self._waiters:
            waiter = self._waiters.popleft()
            waiter.slot = slot
            waiter.woken.set()
        else:
            self._idle.append(slot)  # the last one in is the first one out: fewest are ever made

    def _check_open(self) -> None:
        if self.closed:
            raise ClosedError(f"the pool of {self.env_id} is closed; make a new one.")

    @staticmethod
    def _worker_maker(worker: str, make_env: MakeEnv, index: int) -> Callable[[], Worker]:
        if worker == "thread":
            return lambda: ThreadWorker(make_env, name=f"gymllm-env-{index}")
        return lambda: InlineWorker(make_env)


def make_pool(
    env_id: str,
    num_envs: int = 1,
    *,
    worker: str = "inline",
    autoreset_mode: AutoresetMode | str = AutoresetMode.DISABLED,
    **kwargs: Any,
) -> EnvPool:
    """A pool of one id's environments, as `gymnasium.make_vec` wants it.

    With the id filled in by `functools.partial`, this is an environment's `vector_entry_point`.

    Args:
        env_id: The environment's id.
        num_envs: As for `EnvPool`.
        worker: As for `EnvPool`.
        autoreset_mode: As for `EnvPool`.
        **kwargs: Given to each environment.
    """
    make_env = functools.partial(make, env_id, **kwargs)
    return EnvPool(make_env, num_envs, worker=worker, autoreset_mode=autoreset_mode, env_id=env_id)


def _mask(mask: object, count: int) -> npt.NDArray[np.bool]:
    if mask is None:
        return np.ones(count, np.bool)
    array = np.asarray(mask)
    if array.dtype != np.bool or array.shape != (count,):
        raise ConfigError(f"reset_mask must be a bool array of shape ({count},), got {mask!r}.")
    if not array.any():
        raise ConfigError("reset_mask must be True somewhere.")
    return array


def _seeds(seed: int | Sequence[int | None] | None, count: int) -> Sequence[int | None]:
    if seed is None:
        return [None] * count
    if isinstance(seed, int | np.integer):
        return [int(seed) + i for i in range(count)]
    if len(seed) != count:
        raise ConfigError(f"expected {count} seeds, got {len(seed)}.")
    return seed


def _raise_failures(answers: Mapping[int, object], count: int) -> None:
    failures = [answer for answer in answers.values() if isinstance(answer, EnvError)]
    if failures:
        raise EnvBatchError(
            f"{len(failures)} of {len(answers)} environments broke: "
            + " ".join(str(failure) for failure in failures),
            [answers.get(i) for i in range(count)],
        ) from failures[0]
