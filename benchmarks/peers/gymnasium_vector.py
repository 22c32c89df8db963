"""Gymnasium's own vector environments: CPU a step of a trivial text environment in three stock wrappers.

python gymnasium_vector.py ENVIRONMENTS STEPS
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import gymnasium
from cpu_time import cpu_s
from gymnasium.vector import AsyncVectorEnv, SyncVectorEnv, VectorEnv
from gymnasium.wrappers import OrderEnforcing, RecordEpisodeStatistics, TimeLimit


class Trivial(gymnasium.Env[str, str]):
    """Answers at once."""

    def __init__(self) -> None:
        self.observation_space = self.action_space = gymnasium.spaces.Text(16)

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        return "begin", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return "on", 0.0, False, False, {}


def make() -> gymnasium.Env[str, str]:
    """The environment in its wrappers."""
    return RecordEpisodeStatistics(OrderEnforcing(TimeLimit(Trivial(), 10**9)))


def measure(vector: Callable[..., VectorEnv[Any, Any, Any]], count: int, steps: int) -> list[float]:
    """Microseconds of CPU and of wall time a step."""
    envs = vector([make] * count)
    envs.reset(seed=0)
    actions = ("left",) * count
    for _ in range(10):
        envs.step(actions)
    started, cpu = time.perf_counter(), cpu_s()
    for _ in range(steps):
        envs.step(actions)
    times = [time.perf_counter() - started, cpu_s() - cpu]
    envs.close()
    return [seconds * 1e6 / steps / count for seconds in times[::-1]]


if __name__ == "__main__":
    count, steps = map(int, sys.argv[1:])
    measured = {
        f"{name}_{what}_us": value
        for name, vector in (("sync", SyncVectorEnv), ("async", AsyncVectorEnv))
        for what, value in zip(("cpu", "wall"), measure(vector, count, steps), strict=True)
    }
    print(json.dumps(measured))
