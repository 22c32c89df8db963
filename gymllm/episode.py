"""One episode: an environment and its agents take turns until one of them, or a limit, ends it.

As a rule there is one agent. An environment with several says with `info["agent"]` who acts next, and with
`info["agent_rewards"]` what a step was worth to whom; see `Env`.

Everything that can be expected to happen to an episode is an `Ending`; only cancellation and mistakes in
gymllm itself leave as exceptions.
"""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, cast

import anyio

from gymllm.agent import Agent, AgentFactory, EpisodeContext
from gymllm.engine import Engine
from gymllm.errors import (
    ConfigError,
    EngineError,
    EngineTimeoutError,
    EnvError,
    EnvTypeError,
    SandboxError,
    UnknownNameError,
)
from gymllm.limit import Limit
from gymllm.spaces import TextOrMessage, text_of
from gymllm.task import Task, derive_seed
from gymllm.team import ANYONE, Player, Team, finite_reward
from gymllm.timeline import Timeline
from gymllm.trajectory import Ending, Trajectory, Turn


class StepResultLike(Protocol):
    """What a step of a leased environment answers."""

    @property
    def observation(self) -> TextOrMessage: ...
    @property
    def reward(self) -> float: ...
    @property
    def terminated(self) -> bool: ...
    @property
    def truncated(self) -> bool: ...
    @property
    def info(self) -> Mapping[str, object]: ...


class EnvSession(Protocol):
    """An environment leased from a pool; every failure of it is an `EnvError`."""

    async def reset(
        self, *, seed: int, options: Mapping[str, object] | None = None
    ) -> tuple[TextOrMessage, Mapping[str, object]]: ...

    async def step(self, action: str) -> StepResultLike: ...

    limit: Limit | None
    """A limit around the whole episode, which may then end with a step's own; see `LeasedEnv`."""


class EnvSource(Protocol):
    """Where episodes get their environments from: an `EnvPool`."""

    def lease(self) -> AbstractAsyncContextManager[EnvSession]: ...


@dataclass(frozen=True, kw_only=True)
class EpisodeLimits:
    """What ends an episode that nothing else has ended."""

    max_turns: int = 100
    """Turns, of all agents together, after which the episode is truncated ("max_turns")."""
    episode_timeout_s: float = 600.0
    """Wall time after which it is truncated ("episode_timeout")."""
    generate_timeout_s: float = 300.0
    """Longest that one turn of the agent may take; past it the episode has failed."""

    def __post_init__(self) -> None:
        for name in ("max_turns", "episode_timeout_s", "generate_timeout_s"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"limits.{name} must be > 0, got {getattr(self, name)}.")


async def run_episode(
    *,
    env: EnvSession,
    make_agent: AgentFactory,
    engine: Engine,
    task: Task,
    member: int,
    attempt: int = 0,
    run_seed: int,
    limits: EpisodeLimits,
    timeline: Timeline,
) -> Trajectory:
    """Plays one episode of one agent, in an environment that names none.

    Args:
        env: A leased environment; it is reset first, so its past does not matter.
        make_agent: Makes the agent that plays.
        engine: The model behind the agent.
        task: What is played.
        member: Which member of the task's group this is.
        attempt: How many failed episodes of this member came before.
        run_seed: Seed of the run; with task, member and attempt it decides everything sampled.
        limits: What ends the episode if nothing else does.
        timeline: Where the episode's spans go.

    Returns:
        The trajectory, whatever its ending; a failed one says what broke in `reason`. Agents that have an
        `aclose` have been closed by then, also where the episode is cancelled.
    """
    episode = _Episode(
        env, {"": Player(make_agent)}, engine, task, member, attempt, run_seed, limits, timeline
    )
    try:
        with episode:
            await _play(episode)
    finally:
        await episode.close_agents()
    return episode.trajectories()[0]


async def run_team_episode(
    *,
    env: EnvSession,
    team: Team,
    engine: Engine,
    task: Task,
    member: int,
    attempt: int = 0,
    run_seed: int,
    limits: EpisodeLimits,
    timeline: Timeline,
) -> list[Trajectory]:
    """Plays one episode of a team. Arguments as for `run_episode`; `engine` is for players without one.

    An agent is made when it first acts. What ends the episode ends it for all: where it was an agent, its
    name is in the `reason`.

    Returns:
        The trajectory of each trainable agent, in the team's order. One that never acted has no tokens
        and no turns, yet the reward that it was given. Those that a trainable `ANYONE` played follow in
        the order in which they appeared; if there was none, one of the agent "" says how it ended.
    """
    episode = _Episode(env, team, engine, task, member, attempt, run_seed, limits, timeline)
    try:
        with episode:
            await _play(episode)
    finally:
        await episode.close_agents()
    return episode.trajectories()


async def _play(episode: _Episode) -> None:
    env, task, limits, limit = episode.env, episode.task, episode.limits, episode.limit
    timeline, name, played = episode.timeline, episode.name, 0
    with timeline.span(name, "reset"):
        observation, info = await env.reset(seed=task.seed, options=task.options or None)
    seat, agent = episode.next(info.get("agent", ""))
    acting, turns = seat.name, seat.turns
    while True:
        action = None
        with limit.within(limits.generate_timeout_s):
            action = await agent.act(observation)
        if action is None:
            raise EngineTimeoutError(
                f"the agent's turn took longer than limits.generate_timeout_s "
                f"({limits.generate_timeout_s:g} s) in episode {name}; raise it or look at the engine."
            )
        if action.limit:
            episode.reason = f"{action.limit} ({acting})" if acting else action.limit
            return
        start = time.perf_counter_ns()
        result = await env.step(action.text)
        end = time.perf_counter_ns()
        timeline.add(name, "step", start, end)
        info = result.info
        rewards = info.get("agent_rewards")
        turns.append(
            Turn(
                observation=(observation if isinstance(observation, str) else text_of(observation)),
                action=action.text,
                reward=result.reward if rewards is None else 0.0,
                prompt_tokens=action.prompt_tokens,
                generated_tokens=action.generated_tokens,
                invalid_action=bool(info.get("invalid_action", False)),
                tool_calls=action.tool_calls,
                tool_errors=action.tool_errors,
                engine_s=action.engine_s,
                env_s=(end - start) / 1e9,
            )
        )
        played += 1
        if rewards is not None:
            episode.reward(rewards)
        observation = result.observation
        if result.terminated or result.truncated:
            episode.metrics = _metrics(info)
        if result.terminated:
            episode.ending, episode.reason = Ending.TERMINATED, ""
            return
        if result.truncated:
            episode.reason = str(info.get("truncated_by", "environment"))
            return
        if played >= limits.max_turns:
            episode.reason = "max_turns"
            return
        following = info.get("agent", "")
        if following is not acting:
            seat, agent = episode.next(following)
            acting, turns = seat.name, seat.turns


def _metrics(info: Mapping[str, object]) -> Mapping[str, float]:
    """The numbers in `info["metrics"]`; nothing else of it."""
    said = info.get("metrics")
    if not isinstance(said, Mapping):
        return {}
    metrics = cast("Mapping[object, object]", said)
    return {str(name): float(n) for name, n in metrics.items() if isinstance(n, int | float)}


class _Seat:
    """One agent's part in an episode."""

    __slots__ = ("agent", "early_reward", "name", "player", "turns")

    def __init__(self, name: str, player: Player) -> None:
        self.name, self.player = name, player
        self.agent: Agent | None = None
        self.turns: list[Turn] = []
        self.early_reward = 0.0
        """What it was given before its first turn."""


def _aclose_of(seat: _Seat) -> Callable[[], Awaitable[object]] | None:
    return getattr(seat.agent, "aclose", None)


class _Episode:
    """Everyone's part in one episode, and how it ended.

    As a context manager it is the episode's time limit, and takes what is expected to break it.
    """

    __slots__ = (
        "_attempt",
        "_engine",
        "_member",
        "_seats",
        "_seed",
        "_started",
        "_team",
        "acting",
        "ending",
        "env",
        "limit",
        "limits",
        "metrics",
        "name",
        "reason",
        "task",
        "timeline",
    )

    def __init__(
        self,
        env: EnvSession,
        team: Team,
        engine: Engine,
        task: Task,
        member: int,
        attempt: int,
        run_seed: int,
        limits: EpisodeLimits,
        timeline: Timeline,
    ) -> None:
        self.env, self.task, self.limits, self.timeline = env, task, limits, timeline
        self._team, self._engine, self._member, self._attempt = team, engine, member, attempt
        self._seed = task.member_seed(run_seed, member, attempt)
        self._seats: dict[str, _Seat] = {}
        self.name = f"episodes/{task.index}.{member}" + (f" retry {attempt}" if attempt else "")
        self.acting = ""
        """Whose turn it is."""
        self.ending, self.reason = Ending.TRUNCATED, "episode_timeout"  # until it ends otherwise
        self.metrics: Mapping[str, float] = {}
        """What the environment says of it at its end."""
        self.limit = Limit(limits.episode_timeout_s)
        self._started = 0

    def __enter__(self) -> None:
        self._started = time.perf_counter_ns()
        self.limit.__enter__()
        self.env.limit = self.limit

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> bool:
        self.env.limit = None
        if self.limit.__exit__(kind, error, trace):
            return True
        if not isinstance(error, (EnvError, EngineError, SandboxError)):
            return False
        who = f"{self.acting}: " if self.acting and not isinstance(error, EnvError) else ""
        self.ending, self.reason = Ending.FAILED, f"{type(error).__name__}: {who}{error}"
        return True

    async def close_agents(self) -> None:
        """Closes those agents that hold something open, whatever ended the episode."""
        held = [aclose for aclose in map(_aclose_of, self._seats.values()) if aclose is not None]
        if not held:
            return
        with anyio.CancelScope(shield=True):
            async with AsyncExitStack() as stack:  # closes all, whichever raises
                for aclose in held:
                    stack.push_async_callback(aclose)

    def trajectories(self) -> list[Trajectory]:
        """Those of trainable agents, once it has ended."""
        ended, turns = time.perf_counter_ns(), 0
        for seat in self._seats.values():
            turns += len(seat.turns)
        self.timeline.add(
            self.name, f"episode ({self.ending})", self._started, ended, {"turns": turns}
        )
        return [
            Trajectory(
                task=self.task,
                member=self._member,
                attempt=self._attempt,
                agent=seat.name,
                segments=seat.agent.segments() if seat.agent is not None else (),
                turns=tuple(seat.turns),
                messages=seat.agent.messages() if seat.agent is not None else (),
                ending=self.ending,
                reason=self.reason,
                reward=sum(turn.reward for turn in seat.turns) + seat.early_reward,
                started_ns=self._started,
                ended_ns=ended,
                metrics=dict(self.metrics),
            )
            for seat in self._trained()
        ]

    def next(self, name: object) -> tuple[_Seat, Agent]:
        """Whose turn it is now; its agent is made if this is its first.

        Raises:
            EnvTypeError: That is no name of an agent in the team.
        """
        seat = self._seat(name, 'info["agent"]')
        self.acting = seat.name
        if seat.agent is None:
            seat.agent = seat.player.make_agent(
                EpisodeContext(
                    engine=self._engine if seat.player.engine is None else seat.player.engine,
                    seed=derive_seed("agent", self._seed, seat.name) if seat.name else self._seed,
                    name=f"{self.name}/{seat.name}" if seat.name else self.name,
                    timeline=self.timeline,
                )
            )
        return seat, seat.agent

    def reward(self, rewards: object) -> None:
        """Adds what a step was worth to each, to its latest turn.

        Raises:
            EnvTypeError: It is no mapping of agents in the team to finite numbers.
        """
        if not isinstance(rewards, Mapping):
            raise EnvTypeError(
                f'info["agent_rewards"] must be a mapping of agents to rewards, got {rewards!r}.'
            )
        for name, reward in cast("Mapping[object, object]", rewards).items():
            seat = self._seat(name, 'info["agent_rewards"]')
            number = finite_reward(reward)
            if number is None:
                raise EnvTypeError(
                    f'info["agent_rewards"] must hold finite numbers, got {reward!r} for {name!r}.'
                )
            if seat.turns:
                last = seat.turns[-1]
                seat.turns[-1] = last._replace(reward=last.reward + number)
            else:
                seat.early_reward += number

    def _trained(self) -> list[_Seat]:
        """The seats of trainable agents, those that the team names first."""
        named = [
            self._seat(name, "") for name, p in self._team.items() if p.trainable and name != ANYONE
        ]
        if ANYONE not in self._team or not self._team[ANYONE].trainable:
            return named
        others = [seat for name, seat in self._seats.items() if name not in self._team]
        return named + others or [self._seat("", "")]

    def _seat(self, name: object, where: str) -> _Seat:
        if not isinstance(name, str):
            raise EnvTypeError(f"{where} must name an agent with a str, got {name!r}.")
        seat = self._seats.get(name)
        if seat is None:
            player = self._team.get(name) or self._team.get(ANYONE)
            if player is None:
                raise EnvTypeError(f"{where}: {self._unknown(name)}")
            seat = self._seats[name] = _Seat(name, player)
        return seat

    def _unknown(self, name: str) -> str:
        """Why nobody plays that agent, and what to do."""
        if not name:
            return f"absent, so who acts has no name, but the team is {', '.join(self._team)}."
        if list(self._team) == [""]:
            return (
                f"the environment has an agent {name!r}, but one agent without a name plays. Give a "
                'team (players, in a configuration): one for each of its agents, or one for "*".'
            )
        return str(UnknownNameError("agent", name, self._team, 'A player "*" would play it.'))
