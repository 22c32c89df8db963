"""Two steps of self-play at TicTacToe, as a person trains and evaluates it: real processes, tiny model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from gymllm.trajectory import Ending
from gymllm.transcripts import read_jsonl

CONFIG = """
name: game
steps: 2
env:
  id: gymllm/PettingZoo-v0
  kwargs: {env_id: tictactoe_v3, answer_rule: last, max_invalid: 2}
players:
  player_1: {}
  player_2: {system_prompt: You are the second player.}
agent: {max_new_tokens: 6}
rollout: {group_size: 2, concurrency: 8}
engine: {slots: 8, context_length: 384}
algorithm: {zero_variance: keep}
learner: {groups_per_step: 4}
warm_start: {enabled: false}
checkpoint: {every: 1}
metrics: {wandb: "off", display: false}
"""


def call(folder: Path, program: str, *arguments: str) -> str:
    environment = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache"), "HOME": str(folder)}
    ended = subprocess.run(
        [str(Path(sys.executable).with_name(program)), *arguments],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("self-play")
    (folder / "config.yaml").write_text(CONFIG)
    call(folder, "gymllm-train", "--config", "config.yaml")
    return folder / "runs" / "game"


def test_each_player_is_trained_on_its_own_groups(run: Path) -> None:
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == [1, 2]
    trained = [t for path in sorted((run / "trajectories").iterdir()) for t in read_jsonl(path)]
    assert {t.agent for t in trained} == {"player_1", "player_2"}
    assert all(t.ending is not Ending.FAILED for t in trained)
    for t in trained:
        opening = [m.content for m in t.messages if m.role == "system"]
        second = t.agent == "player_2" and bool(t.turns)
        assert opening == (["You are the second player."] if second else [])
    # A group's members come together, two of each task and agent, and no group comes twice.
    groups = [(t.task.index, t.agent) for t in trained]
    assert sorted(groups) == sorted([*set(groups), *set(groups)])
    for record in records:
        rewards = [record.get(f"reward/player_{number}") for number in (1, 2)]
        assert any(reward is not None and reward <= 0 for reward in rewards)


def test_a_checkpoint_says_which_groups_are_settled(run: Path) -> None:
    state = json.loads((run / "checkpoints" / "step_00000001" / "state.json").read_text())
    first_step = {
        (t.task.index, t.agent) for t in read_jsonl(min((run / "trajectories").iterdir()))
    }
    halves = {index for index, _ in first_step if sum(i == index for i, _ in first_step) == 1}
    assert {int(index) for index in state["settled"]} == halves
    for index, agents in state["settled"].items():
        assert int(index) in state["again"]
        assert all((int(index), agent) in first_step for agent in agents)


def test_evaluation_against_the_scripted_player_tells_both_sides(run: Path) -> None:
    arguments = ["--model", str(run), "--episodes", "4", "--out", "evaluation"]
    shown = call(
        run.parent.parent, "gymllm-eval", *arguments, "--players.player_2.engine", "scripted"
    )
    for line in ("reward of player_1", "reward of player_2", "wins of player_1"):
        assert line in shown
    summary = json.loads((run.parent.parent / "evaluation" / "summary.json").read_text())
    assert summary["episodes"] == 4
    assert set(summary["agents"]) == {"player_1", "player_2"}
    assert summary["agents"]["player_2"]["wins"]["count"] == 4
