"""GEM's asynchronous vector environment where steps take time: share of the slots' time spent in steps.

python gem_latency.py ENVIRONMENTS SLOW_RUN_STEPS SHARE_OF_SLOW_STEPS
"""

from __future__ import annotations

import json
import random
import sys
import time
from typing import Any

import gem
from gem.vector.async_vector_env import AsyncVectorEnv


class Sleeper(gem.Env):
    """A step takes 20 ms, a slow one 1 s."""

    def __init__(self, seed: int, slow_share: float) -> None:
        self.random, self.slow_share, self.drawn_s = random.Random(seed), slow_share, 0.0

    def reset(self, seed: int | None = None) -> tuple[str, dict[str, Any]]:
        return "begin", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        seconds = 1.0 if self.random.random() < self.slow_share else 0.02
        self.drawn_s += seconds
        time.sleep(seconds)
        return "on", 0.0, False, False, {}

    def sample_random_action(self) -> str:
        return "left"


def share(count: int, steps: int, slow_share: float) -> float:
    """Time that the environments drew by the time that their slots took; 1 is ideal."""
    envs = AsyncVectorEnv(
        env_ids=["sleeper"] * count,
        env_fns=[lambda i=i: Sleeper(i, slow_share) for i in range(count)],
    )
    envs.reset()
    actions = ["left"] * count
    envs.step(actions)
    before = sum(env.drawn_s for env in envs.envs)
    started = time.perf_counter()
    for _ in range(steps):
        envs.step(actions)
    taken = (time.perf_counter() - started) * count
    envs.thread_pool_executer.shutdown()
    return (sum(env.drawn_s for env in envs.envs) - before) / taken


if __name__ == "__main__":
    count, steps, slow = int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])
    print(json.dumps({"share": share(count, 100, 0.0), "slow_share": share(count, steps, slow)}))
