"""Makes environments and agents from settings, for training and evaluation alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from typing import Literal

import gymnasium

from gymllm.agent import AgentFactory
from gymllm.pool import EnvPool
from gymllm.registration import check_id, make
from gymllm_agents import (
    ConversationAgent,
    HermesParser,
    PlainParser,
    Tokenizer,
    Tool,
    ToolAgent,
    ToolConfig,
    calculator,
)

ToolName = Literal["calculator"]
ToolForm = Literal["hermes", "plain"]
_TOOLS: Mapping[ToolName, Callable[[], Tool]] = {"calculator": calculator}


def build_pool(
    env_id: str,
    kwargs: Mapping[str, bool | int | float | str],
    num_envs: int,
    *,
    worker: str,
    reset_timeout_s: float = 60.0,
    step_timeout_s: float = 60.0,
) -> EnvPool:
    """A pool of one environment; makes and closes one first, so that a mistake shows at once.

    Raises:
        UnknownNameError: There is no such environment.
        ConfigError: The environment doesn't take these arguments.
    """
    check_id(env_id)

    def make_env() -> gymnasium.Env[str, str]:
        return make(env_id, **kwargs)

    make_env.__name__ = env_id  # the pool's errors call the environment by it
    make_env().close()
    return EnvPool(
        make_env,
        num_envs,
        worker=worker,
        reset_timeout_s=reset_timeout_s,
        step_timeout_s=step_timeout_s,
    )


def build_agents(
    tokenizer: Tokenizer,
    config: ToolConfig,
    tools: Sequence[ToolName] = (),
    *,
    form: ToolForm = "hermes",
) -> AgentFactory:
    """What makes the agent of each episode: with tools a `ToolAgent`, else a `ConversationAgent`.

    Args:
        tokenizer: Has a chat template.
        config: The agents' settings.
        tools: What they may call.
        form: How they write calls.

    Raises:
        ConfigError: A tool can't be called in this form.
        ModelError: The tokenizer's chat template can't be used.
    """
    # Settings may be of a class derived from ToolConfig; the agents are given just theirs.
    plain = ToolConfig(**{field.name: getattr(config, field.name) for field in fields(ToolConfig)})
    if not tools:
        return ConversationAgent.factory(tokenizer, plain)
    made = [_TOOLS[name]() for name in tools]
    parser = HermesParser() if form == "hermes" else PlainParser([tool.schema for tool in made])
    return ToolAgent.factory(tokenizer, plain, tools=made, parser=parser)
