"""Who plays: settings from files and flags, and the team that they make."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import yaml

from gymllm.errors import ConfigError, UnknownNameError
from gymllm.task import SeededTasks
from gymllm.team import Player
from gymllm.trajectory import Ending, Group, Trajectory
from gymllm_agents import Tokenizer, calculator, train_tokenizer
from gymllm_trainers.config import TrainConfig, config_yaml, load_config
from gymllm_trainers.config_files import merge
from gymllm_trainers.players import (
    AgentSettings,
    PlayerSettings,
    build_team,
    scripted_engine,
    scripted_player,
)
from gymllm_trainers.starting_model import warm_start_folder
from gymllm_trainers.statistics import StepStatistics
from gymllm_trainers.train import run

SELF_PLAY = """
env:
  id: gymllm/PettingZoo-v0
  kwargs: {env_id: connect_four_v3}
players:
  player_0: {}
  player_1: {}
"""


def load(folder: Path, text: str, *flags: str) -> TrainConfig:
    path = folder / "config.yaml"
    path.write_text(text)
    return load_config(["--config", str(path), *flags])


def test_a_file_with_flags_over_it(tmp_path: Path) -> None:
    config = load(
        tmp_path,
        SELF_PLAY,
        "--players.player_1.engine",
        "frozen",
        "--players.player_1.system-prompt=You defend.",
        "--players.judge.trainable",
        "false",
        "--steps",
        "3",
    )
    assert config.steps == 3
    assert config.players == {
        "player_0": PlayerSettings(),
        "player_1": PlayerSettings(engine="frozen", system_prompt="You defend."),
        "judge": PlayerSettings(trainable=False),
    }
    assert [settings.trained for settings in config.players.values()] == [True, False, False]
    assert merge(TrainConfig(), yaml.safe_load(config_yaml(config))) == config


@pytest.mark.parametrize(
    ("flags", "kind", "message"),
    [
        (["a.engin", "frozen"], UnknownNameError, "key of players.a 'engin'. Did you mean engine"),
        (["a.engine", "frozn"], ConfigError, "players.a.engine must be one of policy, frozen, scr"),
        (["a.tools", "7"], ConfigError, r"players.a.tools must be a list.* or null, got 7"),
        (["a", "frozen"], ConfigError, "needs a player, a setting and a value, as in --players"),
        (["a.engine"], ConfigError, "needs a player, a setting and a value"),
        (["a.skill", "2"], ConfigError, "skill must be from 0 to 1, got 2"),
    ],
)
def test_mistakes_are_named(flags: list[str], kind: type[Exception], message: str) -> None:
    with pytest.raises(kind, match=message):
        load_config([f"--players.{flags[0]}", *flags[1:]])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["a.engine", "frozen"], "players: nobody is trained, got a"),
        (["*.skill", "1"], r"players\.\* can't be trained, as groups need names"),
        (["a.temperature", "0.5"], r"players\.a\.temperature must be agent.temperature \(1\)"),
    ],
)
def test_a_run_that_can_not_train_them_does_not_start(
    tmp_path: Path, flags: list[str], message: str
) -> None:
    runs = tmp_path / "runs"
    config = load_config([f"--players.{flags[0]}", *flags[1:], "--runs-dir", str(runs)])
    with pytest.raises(ConfigError, match=message):
        run(config)
    assert not runs.exists()


def test_tokens_that_are_not_the_policys_are_not_trained() -> None:
    with pytest.raises(ConfigError, match="engine scripted can't be trainable"):
        PlayerSettings(engine="scripted", trainable=True)


def test_players_decide_the_warm_start_and_are_fixed_on_resume(tmp_path: Path) -> None:
    config = load(tmp_path, SELF_PLAY)
    other = load(tmp_path, SELF_PLAY, "--players.player_1.system-prompt", "Win.")
    assert warm_start_folder(config) != warm_start_folder(other)
    folder = tmp_path / "runs" / "old"
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(config_yaml(config))
    with pytest.raises(ConfigError, match=r"players\.player_1\.engine can't change"):
        load_config(["--resume", str(folder), "--players.player_1.engine", "scripted"])


# ---------------------------------------------------------------------- the team


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return train_tokenizer([], vocab_size=259)


def test_without_players_there_is_one_agent_without_a_name(tokenizer: Tokenizer) -> None:
    team = build_team(tokenizer, AgentSettings(), {})
    ((name, player),) = team.items()
    assert (name, player.engine, player.trainable) == ("", None, True)


def test_players_have_their_engines_and_prompts(tokenizer: Tokenizer) -> None:
    scripted = scripted_engine(
        scripted_player("gymllm/PettingZoo-v0"), tokenizer, skill=1.0, context_length=64
    )
    players = {
        "a": PlayerSettings(),
        "b": PlayerSettings(engine="scripted", system_prompt="You are b."),
        "c": PlayerSettings(trainable=False, tools=("calculator",)),
    }
    team: Mapping[str, Player] = build_team(
        tokenizer,
        AgentSettings(system_prompt="Play."),
        players,
        toolbox={"calculator": (calculator(),)},
        engine_of=lambda settings: scripted if settings.engine == "scripted" else None,
    )
    assert {name: player.engine for name, player in team.items()} == {
        "a": None,
        "b": scripted,
        "c": None,
    }
    assert [player.trainable for player in team.values()] == [True, False, False]


def test_an_environment_without_a_scripted_player_is_named() -> None:
    with pytest.raises(
        UnknownNameError, match=r"scripted player 'gymllm/PetingZoo-v0'\. Did you mean"
    ):
        scripted_player("gymllm/PetingZoo-v0")


# ---------------------------------------------------------------------- numbers


def group(agent: str, *rewards: float) -> Group:
    task = SeededTasks(run_seed=0).task(0)
    members = tuple(
        Trajectory(
            task=task,
            member=member,
            attempt=0,
            agent=agent,
            segments=(),
            turns=(),
            messages=(),
            ending=Ending.TERMINATED,
            reward=reward,
        )
        for member, reward in enumerate(rewards)
    )
    return Group(task=task, agent=agent, trajectories=members)


def test_the_log_has_each_agents_reward() -> None:
    statistics = StepStatistics()
    for one in (group("a", 1, 0), group("b", -1, 0), group("a", 1, 1)):
        statistics.add(one)
    numbers = statistics.metrics()
    assert {name: numbers[name] for name in ("reward/a", "reward/b")} == {
        "reward/a": 0.75,
        "reward/b": -0.5,
    }
    assert numbers["reward/mean"] == pytest.approx(1 / 3)
    statistics.add(group("", 1, 0))
    assert not [name for name in statistics.metrics() if name.startswith("reward/a")]
