"""Makes environments and agents from settings, for training and evaluation alike."""

from __future__ import annotations

import functools
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, fields
from typing import Literal, TypeVar, cast

import anyio.to_thread
import gymnasium

from gymllm.agent import AgentFactory
from gymllm.env import Env
from gymllm.errors import ConfigError, EnvError, GymLLMError
from gymllm.pool import EnvPool, execution_of
from gymllm.registration import check_id, entry_point_of, make
from gymllm.task import ListedTasks, SeededTasks, TaskSource
from gymllm.tool_calls import ToolSchema, tool_name
from gymllm_agents import (
    ConversationConfig,
    EnvToolAgent,
    EnvToolConfig,
    FormatAgent,
    FormatConfig,
    ModelAgent,
    ReActAgent,
    Tokenizer,
    Tool,
    ToolAgent,
    ToolConfig,
)

ToolForm = Literal[
    "auto",
    "deepseek",
    "gemma",
    "glm",
    "gpt-oss",
    "hermes",
    "json",
    "kimi",
    "llama",
    "mistral",
    "plain",
    "qwen",
]
AgentKind = Literal["auto", "model", "tool", "react", "format", "env-tools"]


@dataclass(frozen=True, kw_only=True)
class EnvSettings:
    """The environment, its tasks, and where and how its copies run."""

    id: str = "gymllm/FrozenLake-v0"
    """Any environment that Gymnasium has registered; one that isn't text is adapted."""
    kwargs: Mapping[str, bool | int | float | str] = field(default_factory=dict)
    """Arguments of the environment; on the command line --env.kwargs.size 5, one flag each."""
    tasks: int | None = None
    """How many different tasks there are, played over and over; none is endless, or all that the
    environment lists."""
    worker: Literal["auto", "inline", "thread", "process"] = "auto"
    """inline: environments run on the event loop, for those that never block; thread: each in a
    thread of its own; process: in processes of their own, for those that compute, leak or crash;
    auto: as the environment's class says."""
    start_timeout_s: float = 120.0
    """Longest making of an environment, in seconds; past it it has failed."""
    reset_timeout_s: float | None = None
    """Longest reset, in seconds; past it it has failed. None: as the environment's class says, else 60."""
    step_timeout_s: float | None = None
    """Longest step, in seconds; past it the episode has failed. None: the same."""
    spares: int = 0
    """Environments made ahead beside those that play, for those that start slowly."""
    envs_per_process: int = 1
    """worker process: environments that share a process; if one takes it down, the others fail too."""
    memory_limit_mb: int = 0
    """worker process: how much data one process may hold, in MiB; 0 is no limit."""

    def __post_init__(self) -> None:
        if self.tasks is not None and self.tasks < 1:
            raise ConfigError(f"env.tasks must be >= 1 or none, got {self.tasks}.")
        for name in ("start_timeout_s", "reset_timeout_s", "step_timeout_s"):
            limit = getattr(self, name)
            if limit is not None and not limit > 0:
                raise ConfigError(f"env.{name} must be > 0, got {limit}.")
        for name, least in (("spares", 0), ("envs_per_process", 1), ("memory_limit_mb", 0)):
            if getattr(self, name) < least:
                raise ConfigError(f"env.{name} must be >= {least}, got {getattr(self, name)}.")


@asynccontextmanager
async def open_pool(env: EnvSettings, num_envs: int) -> AsyncGenerator[EnvPool]:
    """A pool of the environment while the block runs, tried first so that a mistake shows at once.

    Raises:
        UnknownNameError: There is no such environment.
        ConfigError: The environment can't be made, or not with these arguments, or not be closed; or a
            setting is for another worker.
    """
    pool = _pool(env, num_envs)
    try:
        async with pool:
            if pool.worker == "process":
                await _try_in_process(pool)
            yield pool
    except BaseExceptionGroup as errors:
        if len(errors.exceptions) == 1:
            error = errors.exceptions[0]  # a group of one would only hide which it is
            raise error from error.__cause__
        raise


def _pool(env: EnvSettings, num_envs: int) -> EnvPool:
    check_id(env.id)
    make_env = functools.partial(make, env.id, **env.kwargs)
    worker = execution_of(make_env) if env.worker == "auto" else env.worker
    for name, used in (
        ("memory_limit_mb", env.memory_limit_mb > 0),
        ("envs_per_process", env.envs_per_process > 1),
    ):
        if used and worker != "process":
            raise ConfigError(
                f"env.{name} is for environments in processes, but {env.id} runs {worker}. "
                "Set env.worker to process, or leave it out."
            )
    pool = EnvPool(
        make_env,
        num_envs,
        worker=worker,
        start_timeout_s=env.start_timeout_s,
        reset_timeout_s=env.reset_timeout_s,
        step_timeout_s=env.step_timeout_s,
        spares=env.spares,
        envs_per_process=env.envs_per_process,
        memory_limit_bytes=env.memory_limit_mb * 2**20 or None,
        env_id=env.id,
    )
    if worker != "process":
        _try_here(env.id, make_env)
    return pool


async def task_source(env: EnvSettings, *, run_seed: int, split: str, shuffle: bool) -> TaskSource:
    """The tasks of a run: those that the environment lists by name, else endless ones by seed.

    In a thread: an environment may make its tasks when it is first asked for them, for minutes.

    Args:
        env: `env.tasks` takes so many of them.
        run_seed: The run's seed.
        split: Names a stream of seeds of its own.
        shuffle: Whether listed tasks come in another order in each pass.

    Raises:
        GymLLMError: The environment can't be made, or its tasks can't be had.
        ConfigError: `env.tasks` is more than there are.
    """
    listed = functools.partial(_task_source, env, run_seed=run_seed, split=split, shuffle=shuffle)
    return await anyio.to_thread.run_sync(listed)


def _task_source(env: EnvSettings, *, run_seed: int, split: str, shuffle: bool) -> TaskSource:
    make_env = functools.partial(make, env.id, **env.kwargs)
    if not hasattr(entry_point_of(make_env), "task_ids"):
        return SeededTasks(run_seed=run_seed, split=split, count=env.tasks)
    made = make_env()
    try:
        ids = cast("Env", made.unwrapped).task_ids()
    finally:
        made.close()
    if not ids:
        return SeededTasks(run_seed=run_seed, split=split, count=env.tasks)
    if env.tasks is not None and env.tasks > len(ids):
        raise ConfigError(
            f"env.tasks is {env.tasks}, but {env.id} has {len(ids)} tasks with these arguments."
        )
    return ListedTasks(run_seed=run_seed, split=split, ids=tuple(ids[: env.tasks]), shuffle=shuffle)


def _try_here(env_id: str, make_env: Callable[[], gymnasium.Env[str, str]]) -> None:
    """Makes and closes one environment."""
    try:
        env = make_env()
    except GymLLMError:
        raise
    except Exception as problem:
        raise ConfigError(
            f"{env_id} can't be made: it raised {type(problem).__name__}: {problem}. Check its "
            "arguments and what it needs."
        ) from problem
    try:
        env.close()
    except GymLLMError as problem:
        raise ConfigError(f"{env_id} can't be closed: {problem}") from problem
    except Exception as problem:
        raise ConfigError(
            f"{env_id} can't be closed: it raised {type(problem).__name__}: {problem}. Check its "
            "close method."
        ) from problem


async def _try_in_process(pool: EnvPool) -> None:
    """Resets one environment, which may crash and must not take this process with it; it is kept."""
    try:
        async with pool.lease() as env:
            await env.reset(seed=0)
    except EnvError as problem:
        raise ConfigError(f"{pool.env_id} can't be started in a process: {problem}") from problem


@dataclass(frozen=True, kw_only=True)
class AgentConfig(ToolConfig, FormatConfig, EnvToolConfig):
    """The settings of every kind of agent."""


def build_agents(
    tokenizer: Tokenizer | None,
    config: AgentConfig,
    tools: Sequence[Tool] = (),
    *,
    env_tools: Sequence[ToolSchema] = (),
    kind: AgentKind = "auto",
    form: ToolForm = "auto",
) -> AgentFactory:
    """What makes the agent of each episode.

    Args:
        tokenizer: Has a chat template. None: for chat engines alone (OpenAI), which need none.
        config: The agents' settings.
        tools: What they may call.
        env_tools: What the environment offers: `await pool.tools()`.
        kind: Which agent; "auto" is an `EnvToolAgent` where the environment offers tools, a `ToolAgent`
            with tools of its own, else a `ModelAgent`.
        form: How they write calls; "auto" is as the chat template shows them.

    Raises:
        ConfigError: A tool can't be called in this form, there are none for such an agent, or both the
            agent and the environment have some.
        ModelError: The tokenizer's chat template can't be used.
    """
    if kind == "auto":
        kind = "env-tools" if env_tools else "tool" if tools else "model"
    if kind == "format":
        return FormatAgent.factory(tokenizer, _only(FormatConfig, config))
    if kind == "model":
        return ModelAgent.factory(tokenizer, _only(ConversationConfig, config))
    parser = None if form == "auto" else form
    if kind == "env-tools":
        _check_env_tools(env_tools, tools)
        return EnvToolAgent.factory(
            tokenizer, _only(EnvToolConfig, config), tools=env_tools, parser=parser
        )
    plain = _only(ToolConfig, config)
    if kind == "react":
        return ReActAgent.factory(tokenizer, plain, tools=tools)
    return ToolAgent.factory(tokenizer, plain, tools=tools, parser=parser)


def _check_env_tools(env_tools: Sequence[ToolSchema], tools: Sequence[Tool]) -> None:
    if not env_tools:
        raise ConfigError(
            "agent.kind env-tools is for environments that offer tools (Env.tools), and this one offers "
            "none. Leave agent.kind out, or choose another environment."
        )
    if tools:
        raise ConfigError(
            f"the environment offers tools ({', '.join(map(tool_name, env_tools))}), so the agent can have "
            f"none of its own, but agent.tools has {', '.join(tool.name for tool in tools)}. Leave them "
            "out; or set agent.kind to tool, whose final answers are the actions."
        )


C = TypeVar("C", bound=ConversationConfig)


def _only(kind: type[C], config: ConversationConfig) -> C:
    """The settings of one kind of agent, out of those of all."""
    return kind(**{field.name: getattr(config, field.name) for field in fields(kind)})
