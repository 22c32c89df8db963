"""Environments that offer tools, from the settings of a run and on the command line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import gymnasium
import numpy as np
import pytest

import gymllm
from gymllm.agent import EpisodeContext
from gymllm.engines import ScriptedEngine
from gymllm.errors import ConfigError
from gymllm.timeline import Timeline
from gymllm.tool_calls import check_call, read_calls, write_calls
from gymllm.transcripts import read_jsonl
from gymllm_agents import Tokenizer, calculator, train_tokenizer
from gymllm_envs.scripted import SCRIPTED_PLAYERS
from gymllm_trainers import cli
from gymllm_trainers.players import AgentSettings, build_team

ID = "tests/Opening-v0"


class Opening(gymllm.Env):
    """Ends when its one tool is called with the right word."""

    waits = False
    tools = (
        {
            "type": "function",
            "function": {
                "name": "open",
                "description": "Opens a door.",
                "parameters": {
                    "type": "object",
                    "properties": {"door": {"type": "string"}},
                    "required": ["door"],
                },
            },
        },
    )

    async def areset(self, *, seed=None, options=None):
        self.door = str(self.np_random.choice(["red", "blue"]))
        return f"Open the {self.door} door.", {}

    async def astep(self, action):
        calls = read_calls(action).calls
        if len(calls) != 1 or check_call(self.tools, calls[0]):
            return "One call of open, please.", 0.0, False, False, {"invalid_action": True}
        opened = calls[0].arguments["door"] == self.door
        return "Opened.", float(opened), True, False, {}


def player(text: str, rng: np.random.Generator, skill: float) -> str:
    door = "red" if "the red door" in text else "blue"
    return write_calls([gymllm.ToolCall(name="open", arguments={"door": door})])


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(SCRIPTED_PLAYERS, ID, player)
    gymnasium.register(ID, entry_point=Opening)
    yield
    del gymnasium.registry[ID]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer([], vocab_size=259)


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", ["auto", "env-tools"])
async def test_the_environments_tools_are_played(kind, tokenizer) -> None:
    agent = AgentSettings(kind=kind, max_new_tokens=400)
    team = build_team(tokenizer, agent, {}, env_tools=Opening.tools)
    engine = ScriptedEngine(lambda prompt, rng: player(prompt, rng, 1), tokenizer)
    context = EpisodeContext(engine=engine, seed=0, name="e", timeline=Timeline())
    action = await team[""].make_agent(context).act("Open the red door.")
    assert read_calls(action.text).calls[0].arguments == {"door": "red"}
    assert action.tool_calls == 1


def test_tools_of_both_and_of_neither_are_refused(tokenizer) -> None:
    with pytest.raises(ConfigError, match=r"agent\.kind env-tools is for environments that offer"):
        build_team(tokenizer, AgentSettings(kind="env-tools"), {})
    agent = AgentSettings(tools=("calculator",))
    with pytest.raises(ConfigError, match=r"offers tools \(open\), .* agent\.tools has calculator"):
        build_team(
            tokenizer,
            agent,
            {},
            env_tools=Opening.tools,
            toolbox={"calculator": (calculator(),)},
        )


@pytest.mark.parametrize("worker", ["inline", "process"])
def test_evaluation_asks_the_environment_for_its_tools(worker) -> None:
    Path("config.yaml").write_text("agent: {max_new_tokens: 400}\nengine: {context_length: 2048}\n")
    arguments = ["--model", "scripted", "--env", ID, "--config", "config.yaml", "--episodes", "4"]
    assert cli.evaluate([*arguments, "--env.worker", worker, "--out", "out"]) == 0
    assert json.loads(Path("out/summary.json").read_text())["reward"]["mean"] == 1
    for trajectory in read_jsonl(Path("out/transcripts.jsonl")):
        assert [turn.tool_calls for turn in trajectory.turns] == [1]
        assert '"name": "open"' in trajectory.messages[-1].said
