"""`EnvPool`: many environments at once, none of which waits for another.

Two faces. The asynchronous one lends environments to episodes: `async with pool.lease() as env`. The
synchronous one is a `gymnasium.vector.VectorEnv` that steps all of them concurrently. A pool is used by
one face and on one event loop.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager

import anyio
from anyio.lowlevel import checkpoint

from gymllm.bridge import HomeLoop
from gymllm.errors import ClosedError, ConfigError, UnknownNameError
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

WORKERS = ("inline", "thread")


class LeasedEnv:
    """One environment of a pool, lent to one episode at a time. Not for use by two tasks at once."""

    def __init__(self, slot: Slot) -> None:
        self._slot: Slot | None = slot
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
        return await self._lent().reset(seed=seed, options=options)

    async def step(self, action: str) -> StepResult:
        """Takes one action. Cancellation and errors as for `reset`."""
        return await self._lent().step(action)

    def end(self) -> None:
        """Takes the environment back; further calls raise `ClosedError`."""
        self._slot = None

    def _lent(self) -> Slot:
        if self._slot is None:
            raise ClosedError("this environment's lease has ended; take another with pool.lease().")
        return self._slot


@dataclasses.dataclass
class _Waiter:
    woken: anyio.Event = dataclasses.field(default_factory=anyio.Event)
    slot: Slot | None = None


class EnvPool:
    """Environments that are made when first needed, lent out fairly and replaced when they break."""

    def __init__(
        self,
        make_env: str | MakeEnv,
        num_envs: int,
        *,
        worker: str = "inline",
        reset_timeout_s: float = 60.0,
        step_timeout_s: float = 60.0,
        close_timeout_s: float = 4.0,
    ) -> None:
        """Sets the pool up; no environment is made yet.

        Args:
            make_env: An id, or a function that makes one environment with its wrappers.
            num_envs: Most environments at once.
            worker: "inline": on the pool's loop, for environments that wait asynchronously or not at
                all. "thread": each in a thread, for those that block.
            reset_timeout_s: Limit of a reset, the making of the environment included.
            step_timeout_s: Limit of a step.
            close_timeout_s: Limit of closing one environment, and of closing the pool.

        Raises:
            ConfigError: A setting is wrong.
            UnknownNameError: There is no such environment or worker.
        """
        if num_envs < 1:
            raise ConfigError(f"num_envs must be >= 1, got {num_envs}.")
        if worker not in WORKERS:
            raise UnknownNameError("worker", worker, WORKERS)
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
            self.env_id = make_env
            make_env = functools.partial(make, make_env)
        else:
            self.env_id = getattr(make_env, "__name__", type(make_env).__name__)
        self.num_envs = num_envs
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
        self.closed = False

    @property
    def stats(self) -> PoolStats:
        """A copy of the counts so far."""
        return dataclasses.replace(self._stats)

    @asynccontextmanager
    async def lease(self) -> AsyncIterator[LeasedEnv]:
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

    async def _acquire(self) -> Slot:
        self._check_open()
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
