"""One episode: an environment and an agent take turns until one of them, or a limit, ends it.

Everything that can be expected to happen to an episode is an `Ending`; only cancellation and mistakes in
gymllm itself leave `run_episode` as exceptions.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from typing import Protocol

from gymllm.agent import Agent, AgentFactory, EpisodeContext
from gymllm.engine import Engine
from gymllm.errors import ConfigError, EngineError, EngineTimeoutError, EnvError
from gymllm.limit import Limit
from gymllm.task import Task
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
    """Turns after which the episode is truncated ("max_turns")."""
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
    """Plays one episode.

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
    name = f"episodes/{task.index}.{member}" + (f" retry {attempt}" if attempt else "")
    agent = make_agent(
        EpisodeContext(
            engine=engine,
            seed=task.member_seed(run_seed, member, attempt),
            name=name,
            timeline=timeline,
        )
    )
    turns: list[Turn] = []
    started = time.perf_counter_ns()
    ending, reason = Ending.TRUNCATED, "episode_timeout"
    try:
        with Limit(limits.episode_timeout_s) as limit:
            env.limit = limit
            ending, reason = await _play(env, agent, task, turns, limits, limit, timeline, name)
    except (EnvError, EngineError) as error:
        ending, reason = Ending.FAILED, f"{type(error).__name__}: {error}"
    finally:
        env.limit = None
    ended = time.perf_counter_ns()
    timeline.add(name, f"episode ({ending})", started, ended, {"turns": len(turns)})
    return Trajectory(
        task=task,
        member=member,
        attempt=attempt,
        segments=agent.segments(),
        turns=tuple(turns),
        messages=agent.messages(),
        ending=ending,
        reason=reason,
        reward=sum(turn.reward for turn in turns),
        started_ns=started,
        ended_ns=ended,
    )


async def _play(
    env: EnvSession,
    agent: Agent,
    task: Task,
    turns: list[Turn],
    limits: EpisodeLimits,
    limit: Limit,
    timeline: Timeline,
    name: str,
) -> tuple[Ending, str]:
    with timeline.span(name, "reset"):
        observation, _ = await env.reset(seed=task.seed, options=task.options or None)
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
            return Ending.TRUNCATED, action.limit
        start = time.perf_counter_ns()
        result = await env.step(action.text)
        end = time.perf_counter_ns()
        timeline.add(name, "step", start, end)
        turns.append(
            Turn(
                observation=observation,
                action=action.text,
                reward=result.reward,
                prompt_tokens=action.prompt_tokens,
                generated_tokens=action.generated_tokens,
                invalid_action=bool(result.info.get("invalid_action", False)),
                tool_calls=action.tool_calls,
                tool_errors=action.tool_errors,
                engine_s=action.engine_s,
                env_s=(end - start) / 1e9,
            )
        )
        observation = result.observation
        if result.terminated:
            return Ending.TERMINATED, ""
        if result.truncated:
            return Ending.TRUNCATED, str(result.info.get("truncated_by", "environment"))
        if len(turns) >= limits.max_turns:
            return Ending.TRUNCATED, "max_turns"
