"""docs/rewards.md: its examples run, and its settings are taken; and what the package exports."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import yaml

import gymllm_trainers.rewards
from gymllm.task import Task
from gymllm.trajectory import Ending, Trajectory
from gymllm_trainers.rewards import RewardConfig

PAGE = (Path(__file__).parents[3] / "docs" / "rewards.md").read_text("utf-8")
PYTHON = re.findall(r"^```python\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)
YAML = re.findall(r"^```yaml\n(.*?)^```", PAGE, re.DOTALL | re.MULTILINE)


@pytest.mark.asyncio
async def test_the_examples_score_an_episode(monkeypatch: pytest.MonkeyPatch) -> None:
    function, program = PYTHON
    module = types.ModuleType("my_rewards")
    exec(compile(function, "docs/rewards.md, example 1", "exec"), module.__dict__)
    monkeypatch.setitem(sys.modules, "my_rewards", module)
    names: dict[str, Any] = {"__name__": "example"}
    exec(compile(program, "docs/rewards.md, example 2", "exec"), names)
    played = Trajectory(
        task=Task(index=0, id="t", seed=0),
        member=0,
        attempt=0,
        segments=(),
        turns=(),
        messages=(),
        ending=Ending.TERMINATED,
        reward=1.0,
    )
    (scored,) = await names["scored"]([played])
    assert scored.reward == 1.1


@pytest.mark.parametrize("text", YAML)
def test_the_settings_are_taken(text: str) -> None:
    RewardConfig(**yaml.safe_load(text)["reward"])


def test_the_public_names_are_sorted_and_complete() -> None:
    names = gymllm_trainers.rewards.__all__
    assert names == sorted(names)
    assert all(hasattr(gymllm_trainers.rewards, name) for name in names)
