"""What the pool's benchmarks share: a trivial environment, a model that answers at once, and episodes."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import anyio

import gymllm
from gymllm.agent import Action, EpisodeContext
from gymllm.episode import EpisodeLimits, run_episode
from gymllm.pool import EnvPool
from gymllm.task import Task
from gymllm.timeline import Timeline
from gymllm.trajectory import Trajectory

Reset = tuple[str, dict[str, Any]]
Step = tuple[str, float, bool, bool, dict[str, Any]]


class Trivial(gymllm.Env):
    """Answers at once; awaited, as most environments are."""

    async def areset(self, *, seed: int | None = None, options: Any = None) -> Reset:
        return "begin", {}

    async def astep(self, action: str) -> Step:
        return "on", 0.0, False, False, {}


class Stub:
    """A model and its agent that answer at once."""

    def __init__(self, context: EpisodeContext) -> None:
        pass

    async def act(self, observation: str) -> Action:
        return Action(text="left")

    def segments(self) -> tuple[()]:
        return ()

    def messages(self) -> tuple[()]:
        return ()


async def episode(pool: EnvPool, timeline: Timeline, index: int, fault: str = "") -> Trajectory:
    """One episode, as `Rollout` and `evaluate` play it: `run_episode` in a lease, with the timeline."""
    async with pool.lease() as env:
        return await run_episode(
            env=env,
            make_agent=Stub,
            engine=None,  # type: ignore[arg-type]  # the stub asks none
            task=Task(
                index=index, id=str(index), seed=index, options={"fault": fault} if fault else {}
            ),
            member=0,
            run_seed=0,
            limits=EpisodeLimits(),
            timeline=timeline,
        )


async def all_at_once(calls: list[Callable[[], Awaitable[Trajectory]]]) -> list[Trajectory]:
    """What all of them return."""
    results: list[Trajectory] = []

    async def one(call: Callable[[], Awaitable[Trajectory]]) -> None:
        results.append(await call())

    async with anyio.create_task_group() as tasks:
        for call in calls:
            tasks.start_soon(one, call)
    return results
