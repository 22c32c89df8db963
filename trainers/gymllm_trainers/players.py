"""Who plays: settings of the agent, of each where there are several, and the team that they make."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from gymllm.engine import Engine
from gymllm.engines.scripted import ScriptedEngine
from gymllm.errors import ConfigError, UnknownNameError
from gymllm.team import ANYONE, Player, Team
from gymllm.tool_calls import ToolSchema
from gymllm_agents import Tokenizer
from gymllm_envs.scripted import SCRIPTED_PLAYERS, ScriptedPlayer
from gymllm_trainers.build import AgentConfig, AgentKind, ToolForm, build_agents
from gymllm_trainers.toolbox import TOOL_NAMES, SandboxSettings, Toolbox, check_tool_name

EngineName = Literal["policy", "frozen", "scripted"]


@dataclass(frozen=True, kw_only=True)
class AgentSettings(AgentConfig):
    """The agent: what the policy is told, how it answers, what it may call."""

    kind: AgentKind = "auto"
    """auto: env-tools where the environment offers tools, a tool agent with tools of its own, else a model
    agent. model: its whole answer is the action; tool: its first answer without a call; react: the same in
    lines of text (Thought, Action, Final Answer); format: what is in a tag, or what a pattern finds;
    env-tools: each call of one of the environment's tools."""
    tools: tuple[str, ...] = ()
    """What it may call inside a turn: calculator; search:FOLDER, passages of the text files there;
    mcp:COMMAND or mcp:URL, the tools of an MCP server; bash, python and edit, or sandbox for all three, in
    a sandbox that lives as long as the episode."""
    sandbox: SandboxSettings = field(default_factory=SandboxSettings)
    """What that sandbox is; one for all players."""
    tool_form: ToolForm = "auto"
    """How it writes a call: as the chat template shows it, or in a family's form; plain is
    calculator(12 * 7) on a line of its own, for tools with one argument."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.tools:
            check_tool_name(name)
        if self.tools and self.kind in ("model", "format", "env-tools"):
            raise ConfigError(
                f"agent.kind {self.kind} calls no tools of its own, but agent.tools is "
                f"{', '.join(self.tools)}. Leave one of them out."
            )
        if not self.tools and self.kind in ("tool", "react"):
            raise ConfigError(
                f"agent.kind {self.kind} needs agent.tools: {', '.join(TOOL_NAMES)}; got none."
            )


@dataclass(frozen=True, kw_only=True)
class PlayerSettings:
    """One agent of an environment with several. What is not given is as `agent` has it."""

    engine: EngineName = "policy"
    """policy: the weights that are trained, as they are now; frozen: those that the run started from;
    scripted: the environment's own scripted player."""
    trainable: bool | None = None
    """Whether its episodes are trained on; by default those of the policy are."""
    system_prompt: str | None = None
    """What it is told first."""
    temperature: float | None = None
    """Softmax temperature of sampling; of one that is trained, the learner needs agent.temperature."""
    max_new_tokens: int | None = None
    """Most tokens of one answer."""
    tools: tuple[str, ...] | None = None
    """What it may call inside a turn."""
    skill: float = 1.0
    """How well a scripted player plays, from 0 to 1."""

    def __post_init__(self) -> None:
        for name in self.tools or ():
            check_tool_name(name)
        if self.trainable and self.engine != "policy":
            raise ConfigError(
                f"a player of engine {self.engine} can't be trainable: its tokens are not the policy's."
            )
        if not 0 <= self.skill <= 1:
            raise ConfigError(f"a player's skill must be from 0 to 1, got {self.skill}.")

    @property
    def trained(self) -> bool:
        """Whether its episodes are trained on."""
        return self.engine == "policy" if self.trainable is None else self.trainable


def check_players(players: Mapping[str, PlayerSettings], *, temperature: float) -> None:
    """That a run can train them.

    Args:
        players: By the environment's name of their agent.
        temperature: That of `agent`, which the learner reckons with.

    Raises:
        ConfigError: Nobody is trained, or everybody who is not named, or one at another temperature.
    """
    for name, settings in players.items():
        if name == ANYONE and settings.trained:
            raise ConfigError(
                f"players.{ANYONE} can't be trained, as groups need names: set players.{ANYONE}.trainable "
                "to false, or name each agent that is trained."
            )
        if settings.trained and settings.temperature not in (None, temperature):
            raise ConfigError(
                f"players.{name}.temperature must be agent.temperature ({temperature:g}) for a player that "
                f"is trained, got {settings.temperature:g}."
            )
    if players and not any(settings.trained for settings in players.values()):
        raise ConfigError(f"players: nobody is trained, got {', '.join(players)}.")


def build_team(
    tokenizer: Tokenizer | None,
    agent: AgentSettings,
    players: Mapping[str, PlayerSettings],
    *,
    toolbox: Toolbox | None = None,
    env_tools: Sequence[ToolSchema] = (),
    engine_of: Callable[[PlayerSettings], Engine | None] = lambda settings: None,
) -> Team:
    """A team of the players; without any, one agent without a name.

    Args:
        tokenizer: Has a chat template. None: for chat engines alone (OpenAI).
        agent: What all have in common.
        players: By the environment's name of their agent.
        toolbox: The tools that they name, if they do.
        env_tools: What the environment offers: `await pool.tools()`.
        engine_of: Gives a player's engine; None is the run's own.

    Raises:
        ConfigError: A setting can't be used.
        ModelError: The tokenizer's chat template can't be used.
    """
    team: dict[str, Player] = {}
    for name, settings in (players or {"": PlayerSettings()}).items():
        changes = {
            field: value
            for field in ("system_prompt", "temperature", "max_new_tokens", "tools")
            if (value := getattr(settings, field)) is not None
        }
        own = dataclasses.replace(agent, **changes)
        tools = [tool for tool_name in own.tools for tool in (toolbox or {})[tool_name]]
        factory = build_agents(
            tokenizer, own, tools, env_tools=env_tools, kind=own.kind, form=own.tool_form
        )
        team[name] = Player(factory, engine=engine_of(settings), trainable=settings.trained)
    return team


def tools_named(agent: AgentSettings, players: Mapping[str, PlayerSettings]) -> list[str]:
    """Every tool that somebody may call."""
    named = [*agent.tools, *(name for one in players.values() for name in one.tools or ())]
    return list(dict.fromkeys(named))


def scripted_player(env_id: str) -> ScriptedPlayer:
    """The scripted player of an environment.

    Raises:
        ConfigError: There is none.
    """
    player = SCRIPTED_PLAYERS.get(env_id)
    if player is None:
        raise UnknownNameError("environment with a scripted player", env_id, SCRIPTED_PLAYERS)
    return player


def scripted_engine(
    player: ScriptedPlayer, tokenizer: Tokenizer, *, skill: float, context_length: int
) -> ScriptedEngine:
    """An engine that answers as a scripted player plays."""

    def reply(prompt: str, rng: np.random.Generator) -> str:
        return player(prompt, rng, skill)

    return ScriptedEngine(reply, tokenizer, context_length=context_length)
