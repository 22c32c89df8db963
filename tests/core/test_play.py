"""`gymllm-play`: what a person sees is what a model sees, and every way out has its exit code."""

import io
import subprocess
import sys

import pytest

import gymllm
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
    assert "[turn 1: reward 0]" in output.err
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


def test_runs_as_a_command() -> None:
    command = [sys.executable, "-W", "error", "-m", "gymllm.play", LAKE, "--seed", "3"]
    done = subprocess.run(command, input="down\n", capture_output=True, text=True, check=True)
    assert "left, down, right or up" in done.stdout
