"""`InlineWorker`: the environment runs in the task that calls it, on the pool's own loop.

The cheapest worker by far, and the one for environments that wait asynchronously. An environment that
blocks its thread blocks the whole loop here: no limit can interrupt it. Those belong in a
`ThreadWorker`.
"""

from __future__ import annotations

from typing import Any

import gymnasium

from gymllm.bridge import run_sync
from gymllm.env import Env
from gymllm.workers.worker import MakeEnv


class InlineWorker:
    """Runs one environment through the greenlet bridge."""

    is_lost = False

    def __init__(self, make_env: MakeEnv) -> None:
        self._make_env = make_env
        self._env: gymnasium.Env[Any, Any] | None = None
        self._waits = True

    async def start(self) -> None:
        self._env = env = await run_sync(self._make_env)
        self._waits = not isinstance(env.unwrapped, Env) or env.unwrapped.waits

    async def call(self, method: str, *args: object, **kwargs: object) -> object:
        function = getattr(self._env, method)
        if self._waits:
            return await run_sync(function, *args, **kwargs)
        return function(*args, **kwargs)  # what never waits needs no greenlet

    async def aclose(self) -> None:
        env, self._env = self._env, None
        if env is not None:
            await run_sync(env.close)
