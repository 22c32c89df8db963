"""Many episodes at once: tasks in, groups out, everything in between bounded.

One producer opens groups and starts their members; at most `concurrency` episodes play at a time; a group
goes out the moment its last member ends. What admits a new group is an `AdmissionGate`, so lag is bounded
where work starts, and back-pressure reaches the task source. A task has a group for each agent that is
trained: one, unless a team plays.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

import anyio
import anyio.lowlevel
from anyio.abc import TaskGroup
from anyio.streams.memory import MemoryObjectReceiveStream, MemoryObjectSendStream

from gymllm.agent import AgentFactory
from gymllm.engine import Engine
from gymllm.episode import EnvSource, EpisodeLimits, run_team_episode
from gymllm.errors import ConfigError, RunError
from gymllm.groups import GroupStream
from gymllm.task import Task, TaskSource
from gymllm.team import Team, team_of, trained_agents
from gymllm.timeline import Timeline
from gymllm.trajectory import Ending, Group, Trajectory

ScoreEpisode = Callable[[list[Trajectory]], Awaitable[list[Trajectory]]]
"""Gives the trajectories of one episode other rewards, in the same order."""


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
        if self.group_size < 1:
            raise ConfigError(f"rollout.group_size must be >= 1, got {self.group_size}.")
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
    """Decides when another group, or the groups of another task, may start.

    At most `(1 + max_lag) * groups_per_step` are between their start and the optimizer step that trains on
    them: then, in order, none is trained more than `max_lag` versions after it started. Groups that start
    together also may while those are fewer than one step needs, which would otherwise wait for ever;
    without lag, tokens of a few of them can then be too old to be trained on.
    """

    def __init__(self, *, groups_per_step: int, max_lag: int) -> None:
        self.limit = groups_per_step * (1 + max_lag)
        self._groups_per_step = groups_per_step
        self._outstanding = 0
        self._opened = anyio.Event()

    @property
    def outstanding(self) -> int:
        """Groups that started and are neither trained on, replaced nor set aside."""
        return self._outstanding

    @property
    def open(self) -> bool:
        """Whether another group may start now."""
        return self.has_room(1)

    def has_room(self, groups: int) -> bool:
        """Whether so many may start now, together."""
        after = self._outstanding + groups
        return after <= self.limit or self._outstanding < self._groups_per_step

    async def enter(self, groups: int = 1) -> None:
        """Waits until so many groups may start, and counts them."""
        await anyio.lowlevel.checkpoint()
        while not self.has_room(groups):
            await self._opened.wait()
        self._outstanding += groups

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
        make_agent: AgentFactory | None = None,
        team: Team | None = None,
        engine: Engine,
        tasks: TaskSource,
        config: RolloutConfig,
        gate: AdmissionGate,
        run_seed: int,
        timeline: Timeline,
        first_index: int = 0,
        again: Iterable[int] = (),
        settled: Mapping[int, Iterable[str]] | None = None,
        on_trajectory: Callable[[Trajectory], None] = lambda trajectory: None,
        score_episode: ScoreEpisode | None = None,
    ) -> None:
        """Says what to play; nothing starts before `stream`.

        Args:
            pool: Where environments come from; not closed here.
            make_agent: Makes each episode's agent, where there is one.
            team: Who plays, where there are several; instead of `make_agent`.
            engine: The model; not closed here. Of a team, that of players without one of their own.
            tasks: The tasks, by index.
            config: Sizes and limits.
            gate: Admits groups; whoever consumes the groups calls its `leave`.
            run_seed: Seed of the run.
            timeline: Where spans go.
            first_index: First task index that was never started.
            again: Indices below `first_index` that must be played again, after a resume.
            settled: Of those, agents whose group must not come again.
            on_trajectory: Called with each trajectory as it ends, failed ones too.
            score_episode: Called with an episode's trajectories as it ends, before that; returns them with
                other rewards, or as failed ones if it can't. It may wait; it must not raise.

        Raises:
            ConfigError: Not exactly one of `make_agent` and `team` was given, the team has nobody to
                train, or the gate could never let the groups of one task in together in time.
        """
        self._team = team_of(make_agent, team)
        self._agents = trained_agents(self._team)
        if len(self._agents) > gate.limit:
            raise ConfigError(
                f"a task has {len(self._agents)} groups, one for each of {', '.join(self._agents)}, but "
                f"only {gate.limit} may be in play: raise learner.groups_per_step or rollout.max_lag, or "
                "make some of the players not trainable."
            )
        self._pool, self._engine = pool, engine
        self._tasks, self._config, self._gate = tasks, config, gate
        self._run_seed, self._timeline, self._on_trajectory = run_seed, timeline, on_trajectory
        self._score_episode = score_episode
        self._groups = GroupStream(config.group_size)
        self._next_index = first_index
        self._again = sorted(again)
        heapq.heapify(self._again)
        self._unfinished: dict[int, set[str]] = {}
        """Agents of each started task whose groups are not settled."""
        self._settled = {index: frozenset(agents) for index, agents in (settled or {}).items()}
        """Of tasks that are to be played again."""
        self._slots = anyio.Semaphore(config.concurrency)
        self._failed_in_a_row = 0
        self._unbegun_in_a_row = 0
        self.counts = RolloutCounts()
        self.failures: Counter[str] = Counter()
        """Failed episodes by what broke."""

    def position(self) -> tuple[int, list[int]]:
        """`first_index` and `again` for a resume: every started task that `settle` was not told of."""
        return self._next_index, sorted(self._unfinished.keys() | set(self._again))

    def settled(self) -> dict[int, list[str]]:
        """`settled` for a resume: of the tasks to play again, agents that `settle` was told of."""
        done = {
            index: [agent for agent in self._agents if agent not in left]
            for index, left in self._unfinished.items()
        }
        done |= {index: sorted(agents) for index, agents in self._settled.items()}
        return {index: agents for index, agents in sorted(done.items()) if agents}

    def settle(self, task: Task, agent: str = "") -> None:
        """Says that a task's group of an agent was trained on or set aside: it must not come again.

        Once all of its groups are settled, a resume does not play the task again.

        Raises:
            ValueError: The agent has no groups.
        """
        if agent not in self._agents:
            raise ValueError(f"no groups of agent {agent!r}, only of {', '.join(self._agents)}.")
        unsettled = self._unfinished.get(task.index, set())
        unsettled.discard(agent)
        if not unsettled:
            self._unfinished.pop(task.index, None)

    @asynccontextmanager
    async def stream(self) -> AsyncGenerator[MemoryObjectReceiveStream[Group]]:
        """Plays while the `with` block runs; gives the stream of groups, oldest completion first.

        Raises:
            RunError: `max_failed_groups` groups in a row had to be replaced, or ended before their
                first turn because it does not fit in the engine's context.
        """
        # The gate bounds groups in existence, so this buffer can't fill before the gate closes.
        size = self._gate.limit + len(self._agents)
        send, receive = anyio.create_memory_object_stream[Group](size)
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
            await self._gate.enter(len(self._agents))
            task = self._tasks.task(self._take_index())
            settled = self._settled.pop(task.index, frozenset[str]())
            agents = [agent for agent in self._agents if agent not in settled]
            self._gate.leave(len(self._agents) - len(agents))
            self._unfinished[task.index] = set(agents)
            self._groups.open(task, agents)
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
                trajectories = await self._play(task, member, group)
            finally:
                self.counts.in_flight -= 1
        finally:
            self._slots.release()
        failed = trajectories[0].ending is Ending.FAILED
        if group.cancel_called:
            self.counts.lost_episodes += not failed
            return
        if failed:
            group.cancel()
            self._replace(task, trajectories[0].reason)
            return
        wanted = self._unfinished[task.index]
        complete = [self._groups.add(t) for t in trajectories if t.agent in wanted]
        for one in complete:
            if one is not None:
                self.counts.groups += 1
                self._failed_in_a_row = 0
                self._check_begun(one)
                await send.send(one)

    def _check_begun(self, group: Group) -> None:
        """Raises once group after group has ended before its first turn: it would go on for ever."""
        begun = any(
            t.turns or not t.reason.startswith("context_length") for t in group.trajectories
        )
        self._unbegun_in_a_row = 0 if begun else self._unbegun_in_a_row + 1
        if self._unbegun_in_a_row >= self._config.max_failed_groups:
            raise RunError(
                f"{self._unbegun_in_a_row} groups in a row ended before their first turn: the first "
                f"prompt leaves no room in a context of {self._engine.context_length} tokens. Raise "
                "engine.context_length, or shorten what the agent is told."
            )

    async def _play(self, task: Task, member: int, group: anyio.CancelScope) -> list[Trajectory]:
        attempt = 0
        while True:
            self.counts.started += 1
            async with self._pool.lease() as env:
                trajectories = await run_team_episode(
                    env=env,
                    team=self._team,
                    engine=self._engine,
                    task=task,
                    member=member,
                    attempt=attempt,
                    run_seed=self._run_seed,
                    limits=self._config.limits,
                    timeline=self._timeline,
                )
            if self._score_episode is not None:
                trajectories = await self._score_episode(trajectories)
            for trajectory in trajectories:
                self._on_trajectory(trajectory)
            first = trajectories[0]
            if first.ending is not Ending.FAILED:
                self.counts.finished += 1
                self.counts.generated_tokens += sum(t.generated_tokens for t in trajectories)
                return trajectories
            self.counts.failed += 1
            self.failures[first.reason.split(":", 1)[0]] += 1
            if attempt >= self._config.retries or group.cancel_called:
                return trajectories
            attempt += 1

    def _replace(self, task: Task, reason: str) -> None:
        """Gives a task's groups up: the gate lets another task in its place."""
        self.counts.lost_episodes += self._groups.drop(task)
        groups = len(self._unfinished.pop(task.index))
        self.counts.replaced_groups += groups
        self._failed_in_a_row += 1
        self._gate.leave(groups)
        if self._failed_in_a_row >= self._config.max_failed_groups:
            kinds = ", ".join(f"{kind} x{count}" for kind, count in self.failures.most_common(5))
            raise RunError(
                f"{self._failed_in_a_row} groups in a row failed after {self._config.retries} retries "
                f"each ({kinds}), the last with {reason.splitlines()[0].rstrip('.')}. Look at the "
                f"failed trajectories of the run, or raise rollout.max_failed_groups."
            )
