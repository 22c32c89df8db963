"""`InlineWorker`: the environment runs in the task that calls it, on the pool's own loop.

The cheapest worker by far, and the one for environments that wait asynchronously. An environment that
blocks its thread blocks the whole loop here: no limit can interrupt it. Those belong in a
`ThreadWorker`.
"""

from __future__ import annotations

from collections.abc import Awaitable
from typing import Any

import gymnasium

from gymllm.bridge import Finished, run_sync, start_sync
from gymllm.workers.worker import EnvFacts, MakeEnv, invoke, made_by


class InlineWorker:
    """Runs one environment through the greenlet bridge."""

    is_lost = False
    log_tail = ""

    def __init__(self, make_env: MakeEnv) -> None:
        self._make_env = make_env
        self._env: gymnasium.Env[Any, Any] | None = None

    def start(self) -> Finished[EnvFacts] | Awaitable[EnvFacts]:
        return start_sync(self._make)

    def _make(self) -> EnvFacts:
        self._env = env = made_by(self._make_env)
        return EnvFacts.of(env)

    def call(
        self, method: str, *args: object, **kwargs: object
    ) -> Finished[object] | Awaitable[object]:
        assert self._env is not None, "start() comes first"
        return start_sync(invoke, self._env, method, args, kwargs)

    async def aclose(self) -> None:
        env, self._env = self._env, None
        if env is not None:
            await run_sync(env.close)
