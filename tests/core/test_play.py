"""`gymllm-play`: what a person sees is what a model sees, and every way out has its exit code."""

import io
import subprocess
import sys
from typing import Any

import gymnasium
import pytest

import gymllm
from gymllm import write_calls
from gymllm.message import ToolCall
from gymllm.play import main

LAKE = "gymllm/FrozenLake-v0"


def test_shows_observations_verbatim(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    actions = ["?", "down", "right"] * 10
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(actions)))
    assert main([LAKE, "--seed", "3"]) == 0
    env, seen, ended = gymllm.make(LAKE), list[str](), False
    seen.append(env.reset(seed=3)[0])
    for action in actions:
        if not ended:
            observation, _, terminated, truncated, _ = env.step(action)
            seen.append(observation)
            ended = terminated or truncated
    output = capsys.readouterr()
    assert output.out == "\n".join(seen) + "\n"
    assert "[turn 1: reward -0.1]" in output.err
    assert (
        output.err.rstrip()
        .split("\n")[-1]
        .startswith(("Terminated after", "Truncated (max_turns)"))
    )


def test_end_of_input_leaves_with_0(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("down\n"))
    assert main([LAKE, "--seed", "3"]) == 0
    assert "No more input." in capsys.readouterr().err


def test_ctrl_c_leaves_with_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Interrupted(io.StringIO):
        def readline(self, *_: object) -> str:
            raise KeyboardInterrupt

    monkeypatch.setattr("sys.stdin", Interrupted())
    assert main([LAKE]) == 130
    assert "Interrupted." in capsys.readouterr().err


def test_unknown_env_leaves_with_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["gymllm/FrozenLake"]) == 2
    assert "Did you mean gymllm/FrozenLake-v0" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main([LAKE, "--seed", "-1"])


class Faulty(gymllm.Env):
    """Answers a step with too little, or raises."""

    waits = False

    def __init__(self, *, raises: bool = False) -> None:
        self._raises = raises

    async def areset(self, **_: Any) -> Any:
        return "a question", {}

    async def astep(self, action: str) -> Any:
        raise RuntimeError("the answers are gone")

    def step(self, action: str) -> Any:
        return super().step(action) if self._raises else ("right", 1.0, True)


@pytest.mark.parametrize(
    ("raises", "said"),
    [
        (True, "test/Faulty-v0: step: raised RuntimeError: the answers are gone."),
        (False, "test/Faulty-v0: step: must return a tuple of 5, got 3: ('right', 1.0, True)."),
    ],
)
def test_a_broken_env_leaves_with_1(
    raises: bool, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("an answer\n"))
    gymnasium.register("test/Faulty-v0", Faulty, kwargs={"raises": raises})
    try:
        assert main(["test/Faulty-v0"]) == 1
    finally:
        del gymnasium.registry["test/Faulty-v0"]
    assert said in capsys.readouterr().err


class Tooled(gymllm.Env):
    """Answers with the action."""

    tools = (
        {
            "type": "function",
            "function": {"name": "bash", "parameters": {"properties": {"command": {}}}},
        },
        {"type": "function", "function": {"name": "submit"}},
    )
    waits = False

    async def areset(self, **_: Any) -> Any:
        return "a question", {}

    async def astep(self, action: str) -> Any:
        return repr(action), 0.0, "submit" in action, False, {"reason": "no test passes"}


def test_calls_of_tools_and_blocks_can_be_typed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typed = [
        "```bash",
        "ls",
        "",
        "pwd",
        "```",
        "$ ls -l",
        "/bash {no",
        '/bash {"command": "x"}',
        "/submit",
    ]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(typed) + "\n"))
    gymnasium.register("test/Tooled-v0", lambda **_: Tooled())
    try:
        assert main(["test/Tooled-v0"]) == 0
    finally:
        del gymnasium.registry["test/Tooled-v0"]
    output = capsys.readouterr()
    calls = [
        ToolCall(name="bash", arguments={"command": "ls -l"}),
        ToolCall(name="bash", arguments={"command": "x"}),
        ToolCall(name="submit", arguments={}),
    ]
    listed, called, submitted = (write_calls([call]) for call in calls)
    actions = ["```bash\nls\n\npwd\n```", listed, "/bash {no", called, submitted]
    assert output.out.splitlines() == ["a question", *map(repr, actions)]
    assert "Tools: bash(command), submit()." in output.err
    assert output.err.endswith("Terminated after 5 turns, total reward 0: no test passes.\n")


def test_a_block_without_an_end_ends_with_the_input(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("```bash\nls\n"))
    assert main([LAKE, "--seed", "3"]) == 0
    assert "[turn 1: reward -0.1]" in capsys.readouterr().err


def test_runs_as_a_command() -> None:
    command = [sys.executable, "-W", "error", "-m", "gymllm.play", LAKE, "--seed", "3"]
    done = subprocess.run(command, input="down\n", capture_output=True, text=True, check=True)
    assert "left, down, right or up" in done.stdout
