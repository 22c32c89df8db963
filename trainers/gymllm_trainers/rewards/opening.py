"""Makes the reward model that a run's settings ask for."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager

import anyio.to_thread

from gymllm.engine import Engine
from gymllm.engines.openai import OPENAI_URL, OpenAIEngine
from gymllm.errors import ConfigError
from gymllm.timeline import Timeline
from gymllm_agents import Tokenizer
from gymllm_trainers.engine import EngineConfig, open_engine
from gymllm_trainers.models import load_model
from gymllm_trainers.rewards.config import OPENAI, POLICY, RewardConfig
from gymllm_trainers.rewards.function import FunctionReward, load_function
from gymllm_trainers.rewards.judge import JudgeReward
from gymllm_trainers.rewards.reward_model import RewardModel
from gymllm_trainers.rewards.score_model import load_score_model


@asynccontextmanager
async def open_reward(
    config: RewardConfig,
    *,
    engine: Engine | None = None,
    tokenizer: Tokenizer | None = None,
    engine_config: EngineConfig | None = None,
    timeline: Timeline | None = None,
) -> AsyncGenerator[RewardModel | None]:
    """The reward model, closed when the block ends; None where the environment's reward is all there is.

    Args:
        config: Which.
        engine: The run's own, for a judge called "policy"; not closed here.
        tokenizer: That engine's.
        engine_config: Of the engine of another judge, which is made here.
        timeline: Where such an engine's spans go.

    Raises:
        ConfigError: The function or the engine can't be had, or the model's judge has no engine to ask.
        ModelError: The model can't be read.
    """
    if config.kind == "environment":
        yield None
    elif config.kind == "function":
        yield FunctionReward(load_function(config.function))
    elif config.kind == "model":
        yield await anyio.to_thread.run_sync(
            lambda: load_score_model(config.model, rows=config.rows, row_tokens=config.row_tokens)
        )
    elif config.model == POLICY:
        if engine is None:
            raise ConfigError("reward.model policy asks the run's own engine, and there is none.")
        yield JudgeReward(engine, config, tokenizer=tokenizer)
    elif config.model.startswith(OPENAI):
        async with OpenAIEngine(
            config.model.removeprefix(OPENAI), url=config.url or OPENAI_URL
        ) as server:
            yield JudgeReward(server, config)
    else:
        model = await anyio.to_thread.run_sync(lambda: load_model(config.model))
        own = open_engine(
            model.decoder(),
            engine_config or EngineConfig(),
            timeline=timeline or Timeline(),
            tokenizer=model.tokenizer,
            name="judge_engine",
        )
        try:
            yield JudgeReward(own, config, tokenizer=model.tokenizer)
        finally:
            await own.aclose()
