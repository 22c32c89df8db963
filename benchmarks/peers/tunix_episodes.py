"""google-tunix's RolloutOrchestrator: many episodes of ten steps of 100 ms at once, with a stub model.

The loop's threads are as many as its own learner gives it: one for each episode, and one.

python tunix_episodes.py EPISODES...
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from tunix.rl.agentic import utils
from tunix.rl.agentic.agents.model_agent import ModelAgent
from tunix.rl.agentic.environments.base_environment import BaseTaskEnv, EnvStepResult
from tunix.rl.agentic.pipeline.rollout_orchestrator import RolloutOrchestrator
from tunix.rl.rollout.base_rollout import RolloutOutput


class Sleeper(BaseTaskEnv):
    """Ten steps of 100 ms."""

    def _initial_observation(self) -> Any:
        return {"question": "begin"}

    def _step_impl(self, action: Any) -> EnvStepResult:
        time.sleep(0.1)
        return EnvStepResult(observation="on", reward=0.0, done=False, info={})


def model_call(*args: Any, **kwargs: Any) -> RolloutOutput:
    """Answers at once."""
    return RolloutOutput(
        text=["left"], logits=[], tokens=[], left_padded_prompt_tokens=None, logprobs=None
    )


async def main(episodes: int) -> float:
    """Seconds that all of them take."""
    loop = asyncio.get_running_loop()
    loop.set_default_executor(ThreadPoolExecutor(max_workers=episodes + 1))
    orchestrator = RolloutOrchestrator(
        rollout_sync_lock=utils.RolloutSyncLock(),
        engine_kwargs={"model_call": model_call},
        max_concurrency=episodes,
    )
    pairs = [
        (ModelAgent("play"), Sleeper(task={}, max_steps=10, pair_index=i, group_id=i))
        for i in range(episodes)
    ]
    started, ended = time.perf_counter(), 0
    producers = asyncio.create_task(
        orchestrator.run_producers_from_stream(pairs, group_size=1, collect_mode="Trajectory")
    )
    await asyncio.sleep(0)
    async for batch in orchestrator.yield_batches(1):
        ended += len(batch)
    await producers
    if ended != episodes:
        raise SystemExit(f"{ended} of {episodes} episodes came")
    return time.perf_counter() - started


if __name__ == "__main__":
    print(json.dumps({count: asyncio.run(main(int(count))) for count in sys.argv[1:]}))
