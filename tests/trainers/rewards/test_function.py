"""Python functions as reward models, and finding them by name."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import anyio
import pytest

from gymllm.errors import ConfigError, UnknownNameError
from gymllm.task import Task
from gymllm.trajectory import Ending, Trajectory
from gymllm_trainers.cli import train
from gymllm_trainers.rewards import FunctionReward, RewardConfig, open_reward
from gymllm_trainers.rewards.function import load_function

EPISODE = Trajectory(
    task=Task(index=0, id="t", seed=0),
    member=0,
    attempt=0,
    segments=(),
    turns=(),
    messages=(),
    ending=Ending.TERMINATED,
    reward=2.0,
)


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module of a user's own."""
    name = "rewards_of_a_user"
    (tmp_path / f"{name}.py").write_text(
        "LIMIT = 3\n"
        "def doubled(trajectory):\n    return 2 * trajectory.reward\n"
        "async def halved(trajectory):\n    return trajectory.reward / 2\n"
    )
    (tmp_path / "broken_rewards.py").write_text("import nothing_that_there_is\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, name, raising=False)
    return name


@pytest.mark.asyncio
@pytest.mark.parametrize(("name", "expected"), [("doubled", 4.0), ("halved", 1.0)])
async def test_a_function_is_found_by_its_name(module: str, name: str, expected: float) -> None:
    config = RewardConfig(kind="function", function=f"{module}:{name}")
    async with open_reward(config) as model:
        assert model is not None
        assert await model.score(EPISODE) == expected


@pytest.mark.asyncio
async def test_the_environment_alone_needs_no_model() -> None:
    async with open_reward(RewardConfig()) as model:
        assert model is None


def test_what_is_not_there_is_said(module: str) -> None:
    with pytest.raises(UnknownNameError, match="Did you mean doubled"):
        load_function(f"{module}:double")
    with pytest.raises(ConfigError, match="must be a function, got 3"):
        load_function(f"{module}:LIMIT")
    with pytest.raises(ConfigError, match="rewards_of_nobody can't be imported"):
        load_function("rewards_of_nobody:f")
    with pytest.raises(ConfigError, match=r"broken_rewards can't be imported.*nothing_that"):
        load_function("broken_rewards:f")


def test_a_run_says_it_before_a_model_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    flags = ["--reward.kind", "function", "--reward.function", "rewards_of_nobody:f"]
    assert train([*flags, "--runs-dir", str(tmp_path / "runs"), "--metrics.wandb", "off"]) == 2
    assert "rewards_of_nobody can't be imported" in capsys.readouterr().err
    assert not (tmp_path / "runs").exists()


@pytest.mark.asyncio
async def test_a_plain_function_waits_in_a_thread_and_one_call_at_a_time() -> None:
    entered, release = threading.Event(), threading.Event()
    inside: list[int] = []

    def score(trajectory: Trajectory) -> float:
        inside.append(1)
        assert len(inside) == 1
        entered.set()
        assert release.wait(30)
        inside.pop()
        return 1.0

    model = FunctionReward(score)
    scores: list[float] = []

    async def one() -> None:
        scores.append(await model.score(EPISODE))

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(one)
        tasks.start_soon(one)
        # The loop goes on while the function waits.
        assert await anyio.to_thread.run_sync(entered.wait, 30)
        release.set()
    assert scores == [1.0, 1.0]
