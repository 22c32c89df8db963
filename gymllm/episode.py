"""One episode: an environment and its agents take turns until one of them, or a limit, ends it.

As a rule there is one agent. An environment with several says with `info["agent"]` who acts next, and with
`info["agent_rewards"]` what a step was worth to whom; see `Env`.

Everything that can be expected to happen to an episode is an `Ending`; only cancellation and mistakes in
gymllm itself leave as exceptions.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol, cast

import numpy as np

from gymllm.agent import Agent, AgentFactory, EpisodeContext
from gymllm.engine import Engine
from gymllm.errors import (
    ConfigError,
    EngineError,
    EngineTimeoutError,
    EnvError,
    EnvTypeError,
    UnknownNameError,
)
from gymllm.limit import Limit
from gymllm.task import Task, derive_seed
from gymllm.team import ANYONE, Player, Team
from gymllm.timeline import Timeline
from gymllm.trajectory import Ending, Trajectory, Turn


class StepResultLike(Protocol):
    """What a step of a leased environment answers."""

    @property
    def observation(self) -> str: ...
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
    ) -> tuple[str, Mapping[str, object]]: ...

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
        The trajectory, whatever its ending; a failed one says what broke in `reason`.
    """
    (trajectory,) = await run_team_episode(
        env=env,
        team={"": Player(make_agent)},
        engine=engine,
        task=task,
        member=member,
        attempt=attempt,
        run_seed=run_seed,
        limits=limits,
        timeline=timeline,
    )
    return trajectory


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
    name = f"episodes/{task.index}.{member}" + (f" retry {attempt}" if attempt else "")
    table = _Table(team, engine, task.member_seed(run_seed, member, attempt), name, timeline)
    started = time.perf_counter_ns()
    ending, reason = Ending.TRUNCATED, "episode_timeout"
    try:
        with Limit(limits.episode_timeout_s) as limit:
            env.limit = limit
            ending, reason = await _play(env, table, task, limits, limit, timeline)
    except EnvError as error:
        ending, reason = Ending.FAILED, f"{type(error).__name__}: {error}"
    except EngineError as error:
        who = f"{table.acting}: " if table.acting else ""
        ending, reason = Ending.FAILED, f"{type(error).__name__}: {who}{error}"
    finally:
        env.limit = None
    ended = time.perf_counter_ns()
    timeline.add(name, f"episode ({ending})", started, ended, {"turns": table.turns})
    return [
        Trajectory(
            task=task,
            member=member,
            attempt=attempt,
            agent=seat.name,
            segments=seat.agent.segments() if seat.agent is not None else (),
            turns=tuple(seat.turns),
            messages=seat.agent.messages() if seat.agent is not None else (),
            ending=ending,
            reason=reason,
            reward=sum(turn.reward for turn in seat.turns) + seat.early_reward,
            started_ns=started,
            ended_ns=ended,
        )
        for seat in table.trained()
    ]


async def _play(
    env: EnvSession,
    table: _Table,
    task: Task,
    limits: EpisodeLimits,
    limit: Limit,
    timeline: Timeline,
) -> tuple[Ending, str]:
    name, played = table.name, 0
    with timeline.span(name, "reset"):
        observation, info = await env.reset(seed=task.seed, options=task.options or None)
    seat, agent = table.next(info.get("agent", ""))
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
            return Ending.TRUNCATED, f"{action.limit} ({acting})" if acting else action.limit
        start = time.perf_counter_ns()
        result = await env.step(action.text)
        end = time.perf_counter_ns()
        timeline.add(name, "step", start, end)
        info = result.info
        rewards = info.get("agent_rewards")
        turns.append(
            Turn(
                observation=observation,
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
            table.reward(rewards)
        observation = result.observation
        if result.terminated:
            return Ending.TERMINATED, ""
        if result.truncated:
            return Ending.TRUNCATED, str(info.get("truncated_by", "environment"))
        if played >= limits.max_turns:
            return Ending.TRUNCATED, "max_turns"
        following = info.get("agent", "")
        if following is not acting:
            seat, agent = table.next(following)
            acting, turns = seat.name, seat.turns


class _Seat:
    """One agent's part in an episode."""

    __slots__ = ("agent", "early_reward", "name", "player", "turns")

    def __init__(self, name: str, player: Player) -> None:
        self.name, self.player = name, player
        self.agent: Agent | None = None
        self.turns: list[Turn] = []
        self.early_reward = 0.0
        """What it was given before its first turn."""


class _Table:
    """Everyone's part in one episode."""

    __slots__ = ("_engine", "_seats", "_seed", "_team", "_timeline", "acting", "name")

    def __init__(
        self, team: Team, engine: Engine, seed: int, name: str, timeline: Timeline
    ) -> None:
        self._team, self._engine, self._seed, self._timeline = team, engine, seed, timeline
        self._seats: dict[str, _Seat] = {}
        self.name = name
        self.acting = ""
        """Whose turn it is."""

    @property
    def turns(self) -> int:
        """Those of all."""
        return sum([len(seat.turns) for seat in self._seats.values()])

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
                    timeline=self._timeline,
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
            number = _finite(reward)
            if number is None:
                raise EnvTypeError(
                    f'info["agent_rewards"] must hold finite numbers, got {reward!r} for {name!r}.'
                )
            if seat.turns:
                last = seat.turns[-1]
                seat.turns[-1] = last._replace(reward=last.reward + number)
            else:
                seat.early_reward += number

    def trained(self) -> list[_Seat]:
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
                'team: a player for each of its agents, or one for "*".'
            )
        return str(UnknownNameError("agent", name, self._team, 'A player "*" would play it.'))


def _finite(number: object) -> float | None:
    """A reward as a float, or None if it is none."""
    if isinstance(number, bool) or not isinstance(number, int | float | np.integer | np.floating):
        return None
    try:
        value = float(cast("float", number))
    except OverflowError:  # an int that no float holds
        return None
    return value if math.isfinite(value) else None
