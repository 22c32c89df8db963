"""`gymllm/FrozenLake-v0`: seeds, text, endings, the scripted player; conformance of every id."""

from collections.abc import Iterator
from contextlib import closing

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
    find_state,
    optimal_actions,
    safe_actions,
    scripted_action,
)


def play(env: FrozenLake, seed: int, skill: float) -> Iterator[tuple[str, str, float, bool]]:
    """Each step: the conversation before, action, reward, terminated."""
    rng = np.random.default_rng(seed)
    said, _ = env.reset(seed=seed)
    ended = False
    while not ended:
        action = scripted_action(said, rng=rng, skill=skill)
        after, reward, terminated, truncated, _ = env.step(action)
        yield said, action, reward, terminated
        said, ended = f"{said}\n{action}\n{after}", terminated or truncated


@pytest.mark.parametrize("env_id", sorted(gymllm_envs.ENVIRONMENTS))
def test_every_id_conforms(env_id: str) -> None:
    check_env_conformance(lambda: gymnasium.make(env_id))
    actions = ("down", "?", "right", "12", "left", "0", "up")
    check_env_conformance(lambda: gymnasium.make(env_id).unwrapped, actions=actions)


@pytest.mark.parametrize("env_id", sorted(gymllm_envs.ENVIRONMENTS))
def test_every_id_passes_gymnasiums_check_env(env_id: str) -> None:
    with closing(gymnasium.make(env_id).unwrapped) as env:
        check_env(env)


def test_text_of_an_episode() -> None:
    env = FrozenLake(frozen_probability=1.0)
    observation, _ = env.reset(seed=6)
    ice = "F F F F"
    lake = ["S F F F", ice, ice, "F F F G"]
    here = "row 0 column 0: ice down, right"
    assert observation == "\n".join([INSTRUCTIONS, *lake, here])
    # The map is told once: later observations say where one is and what is around.
    assert env.step("right")[0] == "row 0 column 1: ice left, down, right"
    assert env.step("down")[0] == "row 1 column 1: ice left, down, right, up"


def test_what_is_around_is_what_the_map_says() -> None:
    for seed in range(20):
        for said, *_ in play(FrozenLake(), seed, skill=0.5):
            state = find_state(said)
            assert state is not None
            grid, row, column = state
            around: dict[str, str] = {}
            for action, (down, right) in MOVES.items():
                if 0 <= row + down < len(grid) and 0 <= column + right < len(grid):
                    around[action] = grid[row + down][column + right].replace("S", "F")
            ice = [action for action, cell in around.items() if cell == "F"]
            expected = ["ice " + ", ".join(ice) if ice else "no ice"]
            expected += [f"goal {action}" for action, cell in around.items() if cell == "G"]
            assert said.split("\n")[-1] == f"row {row} column {column}: {', '.join(expected)}"


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
        env = FrozenLake(size=size, frozen_probability=0.6, max_turns=size**2)
        for seed in range(20):
            *_, (_, _, reward, terminated) = play(env, seed, skill=1.0)
            assert (reward, terminated) == (1.0, True)


def test_endings_are_told() -> None:
    env, endings = FrozenLake(max_turns=8), set[tuple[str, float]]()
    for seed in range(60):
        rng = np.random.default_rng(seed)
        env.reset(seed=seed)
        terminated = truncated = False
        while not (terminated or truncated):
            action = ACTIONS[rng.choice(4, p=[0.1, 0.4, 0.4, 0.1])]
            observation, reward, terminated, truncated, info = env.step(action)
        assert terminated or info["truncated_by"] == "max_turns"
        endings.add((observation.split("\n")[-1] if terminated else "", reward))
    assert endings == {(FELL, 0.0), (REACHED, 1.0), ("", 0.0)}


def test_unreadable_action_is_answered_and_counts_as_a_turn() -> None:
    env = FrozenLake(max_turns=3, invalid_reward=-0.25)
    place = env.reset(seed=0)[0].split("\n")[-1]
    for turn in range(3):
        observation, reward, terminated, truncated, info = env.step("I don't know")
        assert observation.endswith(place)
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


@pytest.mark.parametrize(("slippery", "turns"), [(False, 9), (True, 90)])
def test_default_max_turns_follows_the_size(slippery: bool, turns: int) -> None:
    env = FrozenLake(size=3, is_slippery=slippery)
    env.reset(seed=0)
    assert [env.step("?")[3] for _ in range(turns)] == [False] * (turns - 1) + [True]


def test_find_state_takes_the_last_of_each() -> None:
    here = "row 1 column 0: left wall, down wall, right G, up F"
    text = f"Old:\nS F\nF G\nrow 0 column 0: ...\nNew.\nF S\nF G\nassistant: right S F\n{here}"
    assert find_state(text) == ([["F", "S"], ["F", "G"]], 1, 0)
    # Maps with no text between them are told apart by their width.
    assert find_state(f"S F\nF G\nF F\nS G\n{here}") == ([["F", "F"], ["S", "G"]], 1, 0)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "no map: S or F H, row 0 column 0",
        "S F\nF G",  # no place
        "S F\nF G\nrow 2 column 0: left wall",  # a place outside
        "S F\nF F\nrow 0 column 0: left wall",  # no goal
    ],
)
def test_find_state_refuses_what_is_incomplete(text: str) -> None:
    assert find_state(text) is None


def test_optimal_actions_shorten_the_path() -> None:
    assert optimal_actions([["S", "F"], ["F", "G"]], 0, 0) == ("down", "right")
    assert optimal_actions([["S", "F"], ["H", "G"]], 0, 0) == ("right",)
    assert optimal_actions([["S", "F"], ["H", "G"]], 0, 1) == ("down",)
    assert optimal_actions([["S", "H"], ["H", "G"]], 0, 0) == ()
    assert optimal_actions([["S", "F"], ["F", "G"]], 1, 1) == ()  # standing on the goal


def test_scripted_player_follows_its_generator_and_skill() -> None:
    text = "S F F\nH F F\nF F G\nrow 1 column 1: left H, down F, right F, up F"

    def actions(seed: int, skill: float) -> list[str]:
        rng = np.random.default_rng(seed)
        return [scripted_action(text, rng=rng, skill=skill) for _ in range(400)]

    assert actions(1, 0.5) == actions(1, 0.5)
    perfect = actions(2, 1.0)
    assert set(perfect) == {"down", "right"}
    assert 150 < perfect.count("down") < 250
    assert set(actions(3, 0.0)) == {"down", "right", "up"}, "it wanders, but into no hole"
    assert 35 < actions(4, 0.5).count("up") < 100  # a third of the half that wanders: 67 expected
    assert scripted_action("no map", rng=np.random.default_rng(0), skill=1.0) in ACTIONS
    with pytest.raises(ConfigError, match="skill"):
        scripted_action(text, rng=np.random.default_rng(0), skill=1.5)


def test_scripted_player_stays_inside_and_off_holes() -> None:
    grid = [["S", "F"], ["H", "G"]]
    assert safe_actions(grid, 0, 0) == ("right",)
    assert safe_actions(grid, 0, 1) == ("left", "down")
    assert safe_actions([["S", "H"], ["H", "G"]], 0, 0) == ()


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
