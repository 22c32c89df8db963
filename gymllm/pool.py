"""`EnvPool`: many environments at once, none of which waits for another.

Two faces. The asynchronous one lends environments to episodes: `async with pool.lease() as env`. The
synchronous one is a `gymnasium.vector.VectorEnv`: it steps all of them concurrently and returns when the
slowest has answered, as that interface wants. A pool is used by one face and on one event loop.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import inspect
import weakref
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import asynccontextmanager
from types import TracebackType
from typing import Any, Generic, Self, TypeVar, cast

import anyio
import gymnasium
import numpy as np
from anyio.abc import TaskGroup
from anyio.lowlevel import checkpoint
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream
from gymnasium.error import ResetNeeded
from gymnasium.vector import AutoresetMode

from gymllm.bridge import Finished, HomeLoop, current_host
from gymllm.errors import (
    ClosedError,
    ConfigError,
    ConfigTypeError,
    EngineError,
    EnvError,
    UnknownNameError,
)
from gymllm.limit import Limit
from gymllm.registration import check_id, entry_point_of, make
from gymllm.task import Task
from gymllm.tool_calls import ToolSchema
from gymllm.vector import VectorFace
from gymllm.workers import (
    EnvProcesses,
    InlineWorker,
    Limits,
    LoopWatch,
    MakeEnv,
    PoolStats,
    ProcessWorker,
    Slot,
    StepResult,
    ThreadWorker,
    Worker,
    WorkerSupply,
)
from gymllm.workers.process import MOST_SEATS

T = TypeVar("T")

BLOCKED_AFTER_S = 5.0
"""How long the loop of inline environments may stand still before it is said."""
WORKERS = ("inline", "thread", "process")


class LeasedEnv:
    """One environment of a pool, lent to one episode at a time. Not for use by two tasks at once."""

    def __init__(self, slot: Slot) -> None:
        self._slot: Slot | None = slot
        self._running = False
        self.slot = slot.index
        self.observation: Any = None
        """The last one; None before the first reset."""
        self.limit: Limit | None = None
        """Set it to a limit around the whole episode, and a step whose own limit passes ends that too:
        cheaper, where nothing goes on after such a step."""
        self.info: dict[str, object] = {}
        """The last one."""

    async def reset(
        self, *, seed: int | None = None, options: Mapping[str, object] | None = None
    ) -> tuple[Any, dict[str, object]]:
        """Starts an episode; makes the environment first if there is none or the last one broke.

        Cancellation reaches the environment's own code; the environment is then replaced.

        Raises:
            EnvError: The environment raised, passed its limit or answered with a wrong type. It is
                replaced: another `reset` gets a new one.
            ConfigError: What it is given is of a wrong type (`ConfigTypeError`) or can't be sent to its
                process (`UnsendableError`). It was not asked, and is as it was.
            ClosedError: The lease has ended or the pool is closed.
        """
        slot, was_running, self._running = self._lent(), self._running, False
        try:
            self.observation, self.info = await slot.reset(seed=seed, options=options)
        except ConfigError:  # it was not asked
            self._running = was_running
            raise
        self._running = True
        return self.observation, self.info

    async def step(self, action: Any) -> StepResult:
        """Takes one action. Cancellation and errors as for `reset`, and:

        Raises:
            gymnasium.error.ResetNeeded: This lease has no episode to step.
        """
        slot = self._lent()
        if not self._running:
            slot.check_idle("step")
            raise ResetNeeded(
                "this lease has no episode to step: it was not reset, or its last step ended the "
                "episode or raised. Call reset() first."
            )
        self._running = False  # stays so if the step raises or is cancelled
        try:
            begun = slot.begin_step(action, self.limit)
            result = begun.value if isinstance(begun, Finished) else await begun
        except ConfigError:  # it was not asked
            self._running = True
            raise
        self._running = not (result.terminated or result.truncated)
        self.observation, self.info = result.observation, result.info
        return result

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Played(Generic[T]):
    """What became of a task that `EnvPool.stream` was given."""

    task: Task
    result: T | None
    """What playing it returned; None if it was set aside."""
    error: EnvError | EngineError | None
    """Why it was set aside after its last try, else None."""
    tries: int
    """How often it was played, >= 1."""


class EnvPool(VectorFace):
    """Environments that are made when first needed, lent out fairly and replaced when they break."""

    def __init__(
        self,
        make_env: str | MakeEnv,
        num_envs: int,
        *,
        worker: str | None = None,
        autoreset_mode: AutoresetMode | str = AutoresetMode.DISABLED,
        start_timeout_s: float = 120.0,
        reset_timeout_s: float | None = None,
        step_timeout_s: float | None = None,
        close_timeout_s: float = 4.0,
        max_starts: int = 8,
        spares: int = 0,
        envs_per_process: int = 1,
        memory_limit_bytes: int | None = None,
        text: bool = True,
        env_id: str | None = None,
    ) -> None:
        """Sets the pool up; no environment is made yet.

        Args:
            make_env: An id, or a function that makes one environment with its wrappers.
            num_envs: Most environments at once.
            worker: "inline": on the pool's loop, for environments that wait asynchronously or not at
                all. "thread": each in a thread, for those that block. "process": in processes of
                their own, for those that compute, leak or crash. None: as the environment's
                `execution` says.
            autoreset_mode: Of the vector face: what happens after an episode's end. A reset that nobody
                asked for has no seed and no options, hence the default.
            start_timeout_s: Limit of making an environment, once it is its turn.
            reset_timeout_s: Limit of a reset. None: as the environment's class says, 60 s as a rule.
            step_timeout_s: Limit of a step, and of any other call. None: as for a reset.
            close_timeout_s: Limit of closing one environment, and of closing the pool.
            max_starts: Environments that are made at once, at most; steps don't wait for them.
            spares: Environments beyond `num_envs` that are made ahead while `async with pool` runs, to
                take the place of one that broke or is needed first. For those that start slowly.
            envs_per_process: With worker "process": environments that share a process. They step at
                the same time only as far as they wait asynchronously, and if one takes the process
                down, the others' episodes fail with it.
            memory_limit_bytes: With worker "process": how much data one process may hold (RLIMIT_DATA);
                beyond it, allocations fail there.
            text: Whether observations must be texts or chat messages. False lets in environments of any
                spaces, batched as Gymnasium does.
            env_id: What errors call the environment; by default its id or the function's name.

        Raises:
            ConfigError: A setting is wrong.
            UnknownNameError: There is no such environment or worker.
        """
        if not isinstance(make_env, str) and not callable(make_env):  # pyright: ignore[reportUnnecessaryIsInstance]  users' code
            raise ConfigTypeError(
                f'make_env must be an id such as "gymllm/FrozenLake-v0", or a function that makes one '
                f"environment, got {make_env!r}. Of one that is made already, give what makes it, for "
                "the pool makes its own."
            )
        num_envs = _whole("num_envs", num_envs, 1, ", the environments at once")
        for name, value, least in (
            ("max_starts", max_starts, 1),
            ("spares", spares, 0),
            ("envs_per_process", envs_per_process, 1),
        ):
            _whole(name, value, least)
        if envs_per_process > MOST_SEATS:
            raise ConfigError(f"envs_per_process must be <= {MOST_SEATS}, got {envs_per_process}.")
        if memory_limit_bytes is not None:
            _whole("memory_limit_bytes", memory_limit_bytes, 1, " or None")
        if worker is not None and worker not in WORKERS:
            raise UnknownNameError("worker", str(worker), WORKERS)
        try:
            self.autoreset_mode = AutoresetMode(autoreset_mode)
        except ValueError:
            known = [mode.value for mode in AutoresetMode]
            raise UnknownNameError("autoreset_mode", str(autoreset_mode), known) from None
        limits = Limits(
            start_timeout_s=start_timeout_s,
            reset_timeout_s=_own_limit("reset_timeout_s", reset_timeout_s, make_env),
            step_timeout_s=_own_limit("step_timeout_s", step_timeout_s, make_env),
            close_timeout_s=close_timeout_s,
        )
        for name, limit in dataclasses.asdict(limits).items():
            if isinstance(limit, bool) or not isinstance(limit, int | float | np.number):
                raise ConfigTypeError(f"{name} must be a number of seconds > 0, got {limit!r}.")
            if not limit > 0:
                raise ConfigError(f"{name} must be > 0, got {limit}.")
        if isinstance(make_env, str):
            check_id(make_env)
            env_id = env_id or make_env
            if text:
                make_env = functools.partial(make, make_env)
            else:
                make_env = functools.partial(gymnasium.make, make_env, disable_env_checker=True)
        self.env_id = env_id or getattr(make_env, "__name__", type(make_env).__name__)
        self.num_envs = num_envs
        self.worker = worker or execution_of(make_env)
        """Where the environments run: one of `WORKERS`."""
        if self.worker != "process" and (envs_per_process > 1 or memory_limit_bytes is not None):
            raise ConfigError(
                "envs_per_process and memory_limit_bytes are for worker='process'; this pool's is "
                f"{self.worker!r}."
            )
        self._text = text
        self._stats = PoolStats()
        self._home = HomeLoop()
        self._processes = EnvProcesses(
            make_env, envs_per_process=envs_per_process, memory_limit_bytes=memory_limit_bytes
        )
        self._supply = WorkerSupply(
            functools.partial(self._make_worker, make_env),
            spares=spares,
            max_starts=max_starts,
            limits=limits,
            stats=self._stats,
        )
        self._slots = [
            Slot(
                index,
                env_id=self.env_id,
                supply=self._supply,
                limits=limits,
                stats=self._stats,
                text=text,
            )
            for index in range(num_envs)
        ]
        self._keeper: TaskGroup | None = None
        self._host: object = None
        self._watch: LoopWatch | None = None
        self._threads = weakref.WeakSet[ThreadWorker]()
        # For a pool that nobody closes: what runs by itself would go on without it.
        weakref.finalize(self, _end_threads, self._threads)
        weakref.finalize(self, self._processes.abandon)
        self._idle = self._slots[::-1]
        self._waiters: deque[_Waiter] = deque()
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
            await slot.wait_idle()  # some task may have been left to wait for a call
            self._release(slot)

    @asynccontextmanager
    async def episode(self, task: Task) -> AsyncGenerator[LeasedEnv]:
        """Leases an environment and resets it with the task's seed and options.

        `observation` and `info` of what it gives are the reset's, then each step's.

        Raises:
            EnvError: The reset broke the environment; it is replaced.
            ClosedError: The pool is closed, perhaps meanwhile.
        """
        async with self.lease() as env:
            await env.reset(seed=task.seed, options=task.options or None)
            yield env

    @asynccontextmanager
    async def stream(
        self,
        tasks: Iterable[Task],
        play: Callable[[LeasedEnv, Task], Awaitable[T]],
        *,
        playing: int | None = None,
        retries: int = 2,
    ) -> AsyncGenerator[MemoryObjectReceiveStream[Played[T]]]:
        """Plays every task while the `with` block runs; gives the stream of what ended, as it ends.

        Nothing waits for anything else but for a free environment, and for whoever reads the stream.

        Args:
            tasks: Taken one by one, when an environment is free for it.
            play: Plays an episode on an environment that was reset for the task.
            playing: Episodes that are played at once, at most; by default `num_envs`. With fewer, the
                rest of the environments are reset ahead, for resets that take long.
            retries: Further tries, with the same seed, after an `EnvError` or `EngineError`. A task
                that fails them all is set aside: it comes out with its `error`, and the rest goes on.

        Raises:
            ConfigError: A setting is wrong.
            Exception: Whatever `play` raised besides; it ends the stream.
        """
        bound = f" and <= num_envs = {self.num_envs}"
        if playing is not None and _whole("playing", playing, 1, bound) > self.num_envs:
            raise ConfigError(f"playing must be >= 1{bound}, got {playing}.")
        _whole("retries", retries, 0)
        send, receive = anyio.create_memory_object_stream[Played[T]](self.num_envs)
        left = iter(tasks)
        turn = anyio.Semaphore(playing or self.num_envs)
        try:
            with receive:
                async with anyio.create_task_group() as group:
                    with send:
                        for number in range(self.num_envs):
                            group.start_soon(
                                self._play,
                                left,
                                play,
                                turn,
                                retries,
                                send.clone(),
                                name=f"player {number}",
                            )
                    try:
                        yield receive
                    finally:
                        group.cancel_scope.cancel()
        except BaseExceptionGroup as errors:
            first = errors.exceptions[0]  # several players may make the same mistake at once
            raise first from (errors if len(errors.exceptions) > 1 else first.__cause__)

    async def _play(
        self,
        left: Iterator[Task],
        play: Callable[[LeasedEnv, Task], Awaitable[T]],
        turn: anyio.Semaphore,
        retries: int,
        send: MemoryObjectSendStream[Played[T]],
    ) -> None:
        with send:
            for task in left:
                error: EnvError | EngineError | None = None
                for tries in range(1, retries + 2):
                    try:
                        async with self.episode(task) as env, turn:
                            result = await play(env, task)
                        await send.send(Played(task=task, result=result, error=None, tries=tries))
                        break
                    except (EnvError, EngineError) as problem:
                        error = problem
                else:
                    await send.send(Played(task=task, result=None, error=error, tries=retries + 1))

    async def tools(self) -> tuple[ToolSchema, ...]:
        """What the environments' actions are calls of; empty for most. See `Env.tools`.

        Asks an environment that is free, waiting for one if need be, and makes it if it isn't made yet.

        Raises:
            EnvError: It can't be made.
            ClosedError: The pool is closed, perhaps meanwhile.
        """
        slot = await self._acquire()
        try:
            return (await slot.start()).tools
        finally:
            self._release(slot)

    async def __aenter__(self) -> Self:
        """Starts to keep `spares` ready."""
        self._check_open()
        self._bind()
        self._keeper = await anyio.create_task_group().__aenter__()
        if self._supply.wants_spares:
            self._keeper.start_soon(self._supply.keep_ready, name=f"spares of {self.env_id}")
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool | None:
        """Closes the pool."""
        keeper, self._keeper = self._keeper, None
        assert keeper is not None, "__aenter__ came first"
        keeper.cancel_scope.cancel()
        try:
            return await keeper.__aexit__(kind, error, trace)
        except BaseExceptionGroup as errors:
            if errors.exceptions != (error,):
                raise
            return False  # as it was raised: that there is a task group in here is our business
        finally:
            await self.aclose()

    async def aclose(self) -> None:
        """Ends every call in progress and every wait with `ClosedError` and closes all environments.

        Ends within `close_timeout_s`, about; idempotent.
        """
        self.closed = True
        self._forget_closed_loop()
        if self._watch is not None:
            self._watch.stop()
            self._watch = None
        while self._waiters:
            self._waiters.popleft().woken.set()
        with anyio.CancelScope(shield=True):
            async with anyio.create_task_group() as group:
                group.start_soon(self._supply.aclose, name="close spares")
                for slot in self._slots:
                    group.start_soon(slot.aclose, name=f"close slot {slot.index}")
            await self._processes.aclose()

    async def _acquire(self) -> Slot:
        self._check_open()
        if self._vector is not None:
            raise ConfigError(
                f"the pool of {self.env_id} is stepped as a vector environment, so nothing can be "
                "leased from it; make another pool for that."
            )
        self._bind()
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

    def _bind(self) -> None:
        """Makes the running loop the pool's."""
        self._home.bind(f"the pool of {self.env_id}")
        self._forget_closed_loop()
        if self.worker == "inline" and self._watch is None and not self.closed:
            self._watch = LoopWatch(self.env_id, limit_s=BLOCKED_AFTER_S)
            weakref.finalize(self, self._watch.tell_to_end)

    def _forget_closed_loop(self) -> None:
        """Lets go of workers that wait on a loop that no longer runs; where this one is another."""
        host = current_host()
        if self._host is not None and self._host is not host and not _is_open(self._host):
            _end_threads(self._threads)
            self._processes.forget()
            for slot in self._slots:
                slot.forget()
            self._watch = None
            self._host = None
        self._host = self._host or host

    def _take_all(self) -> None:
        self._check_open()
        if len(self._idle) != self.num_envs:
            raise ConfigError(
                f"the pool of {self.env_id} has leased environments, so it can't be stepped as a "
                "vector environment; make another pool for that."
            )
        self._idle.clear()

    def _make_worker(self, make_env: MakeEnv) -> Worker:
        if self.worker == "process":
            return ProcessWorker(self._processes)
        if self.worker == "thread":
            worker = ThreadWorker(make_env, name=f"gymllm-env-{self._stats.built}")
            self._threads.add(worker)
            return worker
        return InlineWorker(make_env)


def _whole(name: str, value: object, least: int, what: str = "") -> int:
    """A setting that counts something, checked."""
    if isinstance(value, bool) or not isinstance(value, int | np.integer):
        raise ConfigTypeError(
            f"{name} must be a whole number >= {least}{what}, got {value!r} of type "
            f"{type(value).__name__}."
        )
    if value < least:
        raise ConfigError(f"{name} must be >= {least}{what}, got {value}.")
    return int(cast("int", value))


def _is_open(host: object) -> bool:
    """Whether a loop can run on: asyncio's says so; trio's token belongs to one run, and no other."""
    return isinstance(host, asyncio.AbstractEventLoop) and not host.is_closed()


def _end_threads(threads: Iterable[ThreadWorker]) -> None:
    for worker in list(threads):
        worker.tell_to_end()


def execution_of(make_env: Callable[..., object]) -> str:
    """Where an environment wants to run: its class's `execution`, or "inline".

    Args:
        make_env: The class, a function that carries the attribute, or a `functools.partial` of
            `gymllm.make` or `gymnasium.make` with an id, whose entry point is then looked at.
    """
    execution = getattr(entry_point_of(make_env), "execution", "inline")
    if execution not in WORKERS:
        raise UnknownNameError("execution", str(execution), WORKERS)
    return execution


USUAL_LIMIT_S = 60.0
"""Of a reset or a step, where neither the environment's class nor the pool's user says anything."""


def _own_limit(name: str, given: float | None, make_env: object) -> float:
    """A limit that was given, or else the one of the environment's class."""
    if given is not None:
        return given
    if isinstance(make_env, str):
        make_env = functools.partial(make, make_env)
    entry_point = entry_point_of(cast("Callable[..., object]", make_env))
    return cast("float", getattr(entry_point, name, USUAL_LIMIT_S))


def make_pool(env_id: str, /, num_envs: int = 1, **kwargs: Any) -> EnvPool:
    """A pool of one id's environments, as `gymnasium.make_vec` wants it.

    With the id filled in by `functools.partial`, this is an environment's `vector_entry_point`.

    Args:
        env_id: The environment's id.
        num_envs: As for `EnvPool`.
        **kwargs: What `EnvPool` knows (worker, autoreset_mode, ...) is given to it, the rest to each
            environment.
    """
    settings = {name: kwargs.pop(name) for name in POOL_SETTINGS & kwargs.keys()}
    make_env = functools.partial(make, env_id, **kwargs)
    inner = kwargs.get("env_id")  # of gymllm/Gym-v0
    return EnvPool(
        make_env, num_envs, env_id=f"{env_id} ({inner})" if inner else env_id, **settings
    )


POOL_SETTINGS = frozenset(
    name
    for name, parameter in inspect.signature(EnvPool).parameters.items()
    if parameter.kind is parameter.KEYWORD_ONLY
) - {"text", "env_id"}
"""Keyword arguments of `make_pool` that are the pool's; its environments are always played in text."""
