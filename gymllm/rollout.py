"""Many episodes at once: tasks in, groups out, everything in between bounded.

One producer opens groups and starts their members; at most `concurrency` episodes play at a time; a group
goes out the moment its last member ends. What admits a new group is an `AdmissionGate`, so lag is bounded
where work starts, and back-pressure reaches the task source.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import asynccontextmanager
from dataclasses import dataclass

import anyio
import anyio.lowlevel
from anyio.abc import TaskGroup
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from gymllm.agent import AgentFactory
from gymllm.engine import Engine
from gymllm.episode import EnvSource, EpisodeLimits, run_episode
from gymllm.errors import ConfigError, RunError
from gymllm.groups import GroupStream
from gymllm.task import Task, TaskSource
from gymllm.timeline import Timeline
from gymllm.trajectory import Ending, Group, Trajectory


@dataclass(frozen=True, kw_only=True)
class RolloutConfig:
    """How episodes are played."""

    group_size: int = 8
    """Episodes of each task, the group that a baseline is made of."""
    concurrency: int = 32
    """Episodes in flight at most."""
    max_lag: int = 2
    """Policy versions that a trained token may be behind; groups are admitted so that work rarely gets
    older, and tokens that do are masked and counted."""
    max_turns: int = 100
    """Turns after which an episode is truncated."""
    episode_timeout_s: float = 600.0
    """Seconds after which an episode is truncated."""
    generate_timeout_s: float = 300.0
    """Longest turn of the agent, in seconds; past it the episode has failed."""
    retries: int = 2
    """Further tries for a failed episode before its whole group is replaced by another task."""
    max_failed_groups: int = 20
    """Groups replaced one after another, with none finished between, before the run stops."""

    def __post_init__(self) -> None:
        if self.group_size < 2:
            raise ConfigError(
                f"rollout.group_size must be >= 2 for a group baseline, got {self.group_size}."
            )
        for name in ("concurrency", "max_turns", "max_failed_groups"):
            if getattr(self, name) < 1:
                raise ConfigError(f"rollout.{name} must be >= 1, got {getattr(self, name)}.")
        for name in ("max_lag", "retries"):
            if getattr(self, name) < 0:
                raise ConfigError(f"rollout.{name} must be >= 0, got {getattr(self, name)}.")
        for name in ("episode_timeout_s", "generate_timeout_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"rollout.{name} must be > 0, got {getattr(self, name)}.")

    @property
    def limits(self) -> EpisodeLimits:
        """The limits of each episode."""
        return EpisodeLimits(
            max_turns=self.max_turns,
            episode_timeout_s=self.episode_timeout_s,
            generate_timeout_s=self.generate_timeout_s,
        )


class AdmissionGate:
    """Decides when another group may start.

    A group may start while fewer than `(1 + max_lag) * groups_per_step` are between their start and the
    optimizer step that trains on them: then, in order, none is trained more than `max_lag` versions after
    it started.
    """

    def __init__(self, *, groups_per_step: int, max_lag: int) -> None:
        self.limit = groups_per_step * (1 + max_lag)
        self._outstanding = 0
        self._opened = anyio.Event()

    @property
    def outstanding(self) -> int:
        """Groups that started and are neither trained on, replaced nor set aside."""
        return self._outstanding

    @property
    def open(self) -> bool:
        """Whether another group may start now."""
        return self._outstanding < self.limit

    async def enter(self) -> None:
        """Waits until another group may start, and counts it."""
        await anyio.lowlevel.checkpoint()
        while not self.open:
            await self._opened.wait()
        self._outstanding += 1

    def leave(self, groups: int = 1) -> None:
        """Says that groups were trained on, replaced or set aside."""
        if groups > self._outstanding:
            raise ValueError(f"{groups} groups leave, but only {self._outstanding} are in.")
        self._outstanding -= groups
        self._opened.set()
        self._opened = anyio.Event()


@dataclass
class RolloutCounts:
    """What has happened since the rollout started."""

    started: int = 0
    finished: int = 0
    failed: int = 0
    groups: int = 0
    replaced_groups: int = 0
    lost_episodes: int = 0
    """Finished members that were lost with a replaced group."""
    generated_tokens: int = 0
    in_flight: int = 0


class Rollout:
    """Plays groups of episodes and streams them out as they complete."""

    def __init__(
        self,
        *,
        pool: EnvSource,
        make_agent: AgentFactory,
        engine: Engine,
        tasks: TaskSource,
        config: RolloutConfig,
        gate: AdmissionGate,
        run_seed: int,
        timeline: Timeline,
        first_index: int = 0,
        again: Iterable[int] = (),
        on_trajectory: Callable[[Trajectory], None] = lambda trajectory: None,
    ) -> None:
        """Says what to play; nothing starts before `stream`.

        Args:
            pool: Where environments come from; not closed here.
            make_agent: Makes each episode's agent.
            engine: The model; not closed here.
            tasks: The tasks, by index.
            config: Sizes and limits.
            gate: Admits groups; whoever consumes the groups calls its `leave`.
            run_seed: Seed of the run.
            timeline: Where spans go.
            first_index: First task index that was never started.
            again: Indices below `first_index` that must be played again, after a resume.
            on_trajectory: Called with each trajectory as it ends, failed ones too.
        """
        self._pool, self._make_agent, self._engine = pool, make_agent, engine
        self._tasks, self._config, self._gate = tasks, config, gate
        self._run_seed, self._timeline, self._on_trajectory = run_seed, timeline, on_trajectory
        self._groups = GroupStream(config.group_size)
        self._next_index = first_index
        self._again = sorted(again)
        heapq.heapify(self._again)
        self._unfinished: set[int] = set()
        self._slots = anyio.Semaphore(config.concurrency)
        self._failed_in_a_row = 0
        self._unbegun_in_a_row = 0
        self.counts = RolloutCounts()
        self.failures: Counter[str] = Counter()
        """Failed episodes by what broke."""

    def position(self) -> tuple[int, list[int]]:
        """`first_index` and `again` for a resume: every started task that `settle` was not told of."""
        return self._next_index, sorted(self._unfinished | set(self._again))

    def settle(self, task: Task) -> None:
        """Says that a task's group was trained on or set aside: a resume must not play it again."""
        self._unfinished.discard(task.index)

    @asynccontextmanager
    async def stream(self) -> AsyncGenerator[MemoryObjectReceiveStream[Group]]:
        """Plays while the `with` block runs; gives the stream of groups, oldest completion first.

        Raises:
            RunError: `max_failed_groups` groups in a row had to be replaced, or ended before their
                first turn because it does not fit in the engine's context.
        """
        # The gate bounds groups in existence, so this buffer can't fill before the gate closes.
        send, receive = anyio.create_memory_object_stream[Group](self._gate.limit)
        try:
            with send, receive:
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(self._produce, tasks, send, name="rollout")
                    try:
                        yield receive
                    finally:
                        tasks.cancel_scope.cancel()
        except BaseExceptionGroup as errors:
            if len(errors.exceptions) == 1:
                error = errors.exceptions[0]  # a group of one would only hide which it is
                raise error from error.__cause__
            raise

    async def _produce(self, tasks: TaskGroup, send: MemoryObjectSendStream[Group]) -> None:
        while True:
            await self._gate.enter()
            task = self._tasks.task(self._take_index())
            self._unfinished.add(task.index)
            self._groups.open(task)
            scope = anyio.CancelScope()
            for member in range(self._config.group_size):
                # A slot is taken here, not in the member's own task: members start in task order.
                await self._slots.acquire()
                if scope.cancel_called:  # an earlier member gave the group up meanwhile
                    self._slots.release()
                    break
                tasks.start_soon(
                    self._member, task, member, scope, send, name=f"{task.index}.{member}"
                )

    def _take_index(self) -> int:
        if self._again:
            return heapq.heappop(self._again)
        self._next_index += 1
        return self._next_index - 1

    async def _member(
        self, task: Task, member: int, group: anyio.CancelScope, send: MemoryObjectSendStream[Group]
    ) -> None:
        try:
            # A scope can be entered once, so each member has its own; giving a group up cancels nothing
            # that others wait for: its other members notice at their next retry or end.
            if group.cancel_called:
                return
            self.counts.in_flight += 1
            try:
                trajectory = await self._play(task, member, group)
            finally:
                self.counts.in_flight -= 1
        finally:
            self._slots.release()
        if group.cancel_called:
            self.counts.lost_episodes += trajectory.ending is not Ending.FAILED
            return
        if trajectory.ending is Ending.FAILED:
            group.cancel()
            self._replace(task, trajectory.reason)
            return
        complete = self._groups.add(trajectory)
        if complete is not None:
            self.counts.groups += 1
            self._failed_in_a_row = 0
            self._check_begun(complete)
            await send.send(complete)

    def _check_begun(self, group: Group) -> None:
        """Raises once group after group has ended before its first turn: it would go on for ever."""
        begun = any(t.turns or t.reason != "context_length" for t in group.trajectories)
        self._unbegun_in_a_row = 0 if begun else self._unbegun_in_a_row + 1
        if self._unbegun_in_a_row >= self._config.max_failed_groups:
            raise RunError(
                f"{self._unbegun_in_a_row} groups in a row ended before their first turn: the first "
                f"prompt leaves no room in a context of {self._engine.context_length} tokens. Raise "
                "engine.context_length, or shorten what the agent is told."
            )

    async def _play(self, task: Task, member: int, group: anyio.CancelScope) -> Trajectory:
        attempt = 0
        while True:
            self.counts.started += 1
            async with self._pool.lease() as env:
                trajectory = await run_episode(
                    env=env,
                    make_agent=self._make_agent,
                    engine=self._engine,
                    task=task,
                    member=member,
                    attempt=attempt,
                    run_seed=self._run_seed,
                    limits=self._config.limits,
                    timeline=self._timeline,
                )
            self._on_trajectory(trajectory)
            if trajectory.ending is not Ending.FAILED:
                self.counts.finished += 1
                self.counts.generated_tokens += trajectory.generated_tokens
                return trajectory
            self.counts.failed += 1
            self.failures[trajectory.reason.split(":", 1)[0]] += 1
            if attempt >= self._config.retries or group.cancel_called:
                return trajectory
            attempt += 1

    def _replace(self, task: Task, reason: str) -> None:
        """Gives a group up: the gate lets another task in its place."""
        self.counts.lost_episodes += self._groups.drop(task)
        self.counts.replaced_groups += 1
        self._unfinished.discard(task.index)
        self._failed_in_a_row += 1
        self._gate.leave()
        if self._failed_in_a_row >= self._config.max_failed_groups:
            kinds = ", ".join(f"{kind} x{count}" for kind, count in self.failures.most_common(5))
            raise RunError(
                f"{self._failed_in_a_row} groups in a row failed after {self._config.retries} retries "
                f"each ({kinds}), the last with {reason.splitlines()[0]} Look at the failed "
                f"trajectories of the run, or raise rollout.max_failed_groups."
            )
