"""`gymllm/FrozenLake-v0`: seeds, text, endings, the scripted player; conformance of every id."""

from collections.abc import Iterator

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from gymnasium.vector import AutoresetMode

import gymllm
import gymllm_envs
from gymllm.errors import ConfigError
from gymllm.testing import check_env_conformance
from gymllm_envs.frozen_lake import (
    ACTIONS,
    FELL,
    INSTRUCTIONS,
    MOVES,
    REACHED,
    FrozenLake,
    find_grid,
    optimal_actions,
    scripted_action,
)


def grid_of(text: str) -> list[list[str]]:
    grid = find_grid(text)
    assert grid is not None
    return grid


def play(env: FrozenLake, seed: int, skill: float) -> Iterator[tuple[str, str, float, bool]]:
    """Each step: observation before, action, reward, terminated."""
    rng = np.random.default_rng(seed)
    observation, _ = env.reset(seed=seed)
    ended = False
    while not ended:
        action = scripted_action(observation, rng=rng, skill=skill)
        after, reward, terminated, truncated, _ = env.step(action)
        yield observation, action, reward, terminated
        observation, ended = after, terminated or truncated


@pytest.mark.parametrize("env_id", sorted(gymllm_envs.ENVIRONMENTS))
def test_every_id_conforms(env_id: str) -> None:
    check_env_conformance(lambda: gymnasium.make(env_id))
    actions = ("down", "?", "right", "12", "left", "0", "up")
    check_env_conformance(lambda: gymnasium.make(env_id).unwrapped, actions=actions)


@pytest.mark.parametrize("env_id", sorted(gymllm_envs.ENVIRONMENTS))
def test_every_id_passes_gymnasiums_check_env(env_id: str) -> None:
    check_env(gymnasium.make(env_id).unwrapped)


def test_text_of_an_episode() -> None:
    env = FrozenLake()
    observation, _ = env.reset(seed=6)
    instructions, first_row = observation.rsplit("\n", 4)[0], observation.split("\n")[2]
    assert instructions == INSTRUCTIONS
    assert first_row.startswith("P ")
    grid = observation.split("\n", 2)[2]
    assert [len(row) for row in grid.split("\n")] == [7] * 4
    assert set(grid) <= set("PFHG \n")
    later = env.step("right")[0]
    assert later.split("\n")[0].split(" ")[1] == "P"
    assert len(later) == len(grid)


def test_same_seed_same_map_whatever_came_before() -> None:
    env, twin = FrozenLake(), FrozenLake()
    twin.reset(seed=1)
    twin.step("down")
    maps = [env.reset(seed=seed)[0] for seed in range(30)]
    assert maps == [twin.reset(seed=seed)[0] for seed in range(30)]
    assert len(set(maps)) > 20
    unseeded = [env.reset()[0] for _ in range(5)]
    assert unseeded == [twin.reset()[0] for _ in range(5)]
    assert len(set(unseeded)) > 1


def test_every_map_can_be_solved_by_the_perfect_player() -> None:
    for size in (2, 4, 6):
        env = FrozenLake(size=size, frozen_probability=0.6)
        for seed in range(20):
            *_, (_, _, reward, terminated) = play(env, seed, skill=1.0)
            assert (reward, terminated) == (1.0, True)


def test_endings_are_told() -> None:
    env, endings = FrozenLake(max_turns=8), set[tuple[str, float]]()
    for seed in range(60):
        rng = np.random.default_rng(seed)
        observation, _ = env.reset(seed=seed)
        terminated = truncated = False
        while not (terminated or truncated):
            action = scripted_action(observation, rng=rng, skill=0.5)
            observation, reward, terminated, truncated, info = env.step(action)
        assert terminated or info["truncated_by"] == "max_turns"
        endings.add((observation.split("\n")[-1] if terminated else "", reward))
    assert endings == {(FELL, 0.0), (REACHED, 1.0), ("", 0.0)}


def test_unreadable_action_is_answered_and_counts_as_a_turn() -> None:
    env = FrozenLake(max_turns=3, invalid_reward=-0.25)
    grid = env.reset(seed=0)[0].split("\n", 2)[2]
    for turn in range(3):
        observation, reward, terminated, truncated, info = env.step("I don't know")
        assert observation.endswith(grid)
        assert "left, down, right, up" in observation
        assert (reward, terminated, truncated) == (-0.25, False, turn == 2)
        assert info["invalid_action"] is True
    assert info["truncated_by"] == "max_turns"


def test_slippery_moves_follow_the_seed_and_slip() -> None:
    def positions(seed: int) -> list[str]:
        env = FrozenLake(is_slippery=True, frozen_probability=1.0)
        env.reset(seed=seed)
        return [env.step("right")[0] for _ in range(6)]

    assert positions(1) == positions(1)
    assert len({tuple(positions(seed)) for seed in range(10)}) > 3


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"size": 1}, "size must be from 2 to 32, got 1"),
        ({"size": 33}, "size must be from 2 to 32, got 33"),
        ({"frozen_probability": 0.4}, "from 0.5 to 1 for size 4, got 0.4"),
        ({"frozen_probability": 1.1}, "got 1.1"),
        ({"size": 9, "frozen_probability": 0.5}, "from 0.6 to 1 for size 9"),
        ({"max_turns": 0}, "max_turns must be >= 1"),
    ],
)
def test_settings_out_of_range_are_refused(setting: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        FrozenLake(**setting)  # type: ignore[arg-type]  # what is tested


def test_default_max_turns_is_four_times_the_size() -> None:
    env = FrozenLake(size=3)
    env.reset(seed=0)
    assert [env.step("?")[3] for _ in range(12)] == [False] * 11 + [True]


def test_find_grid_takes_the_last_one() -> None:
    text = "Old:\nP F\nF G\nYou moved. P is you.\nF P\nF G\nassistant: right P F"
    assert find_grid(text) == [["F", "P"], ["F", "G"]]
    assert find_grid("P F\nF G\nF F\nP G") == [["F", "F"], ["P", "G"]]  # no text between them
    assert find_grid("no grid: P or F H") is None
    assert find_grid("") is None


def test_optimal_actions_shorten_the_path() -> None:
    assert optimal_actions([["P", "F"], ["F", "G"]]) == ("down", "right")
    assert optimal_actions([["P", "F"], ["H", "G"]]) == ("right",)
    assert optimal_actions([["P", "H"], ["H", "G"]]) == ()
    assert optimal_actions([["F", "F"], ["F", "P"]]) == ()  # standing on the goal


def test_scripted_player_follows_its_generator_and_skill() -> None:
    text = "P F F\nF F F\nF F G"

    def actions(seed: int, skill: float) -> list[str]:
        rng = np.random.default_rng(seed)
        return [scripted_action(text, rng=rng, skill=skill) for _ in range(400)]

    assert actions(1, 0.5) == actions(1, 0.5)
    perfect = actions(2, 1.0)
    assert set(perfect) == {"down", "right"}
    assert 150 < perfect.count("down") < 250
    assert set(actions(3, 0.0)) == set(MOVES)
    wrong = sum(action in ("left", "up") for action in actions(4, 0.5))
    assert 60 < wrong < 140  # half of the half that is random: 100 of 400 expected
    assert scripted_action("no grid", rng=np.random.default_rng(0), skill=1.0) in ACTIONS
    with pytest.raises(ConfigError, match="skill"):
        scripted_action(text, rng=np.random.default_rng(0), skill=1.5)


def test_more_skill_wins_more() -> None:
    env = FrozenLake()
    wins = [
        sum(reward for seed in range(60) for _, _, reward, _ in play(env, seed, skill)) / 60
        for skill in (0.0, 0.7, 1.0)
    ]
    assert wins[0] < 0.2 < wins[1] < wins[2] == 1.0


def test_render_is_what_the_model_sees() -> None:
    env = gymllm.make("gymllm/FrozenLake-v0", render_mode="ansi")
    observation, _ = env.reset(seed=0)
    assert env.render() == observation


def test_make_vec_gives_the_pool() -> None:
    envs = gymnasium.make_vec("gymllm/FrozenLake-v0", num_envs=8, size=3)
    assert isinstance(envs, gymllm.EnvPool)
    assert envs.autoreset_mode is AutoresetMode.DISABLED
    observations, _ = envs.reset(seed=5)
    alone = gymnasium.make("gymllm/FrozenLake-v0", size=3)
    assert observations == tuple(alone.reset(seed=5 + i)[0] for i in range(8))
    envs.close()
