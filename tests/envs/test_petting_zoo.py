"""`gymllm/PettingZoo-v0`: real games, played by whoever's turn it is."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator

import anyio
import gymnasium
import numpy as np
import pytest

from gymllm.errors import ConfigError, MissingExtraError, UnknownNameError
from gymllm.pool import EnvPool
from gymllm.testing import check_env_conformance
from gymllm_envs.petting_zoo import ENV_ID, PettingZoo, scripted_action
from gymllm_envs.scripted import scripted_player

HOW = "Answer with <action>N</action>, where N is a whole number from 0 to 8."


@pytest.fixture
def game() -> Iterator[PettingZoo]:
    game = PettingZoo()
    yield game
    game.close()


def play(env: gymnasium.Env[str, str], seed: int) -> list[tuple[str, str, dict[str, float]]]:
    """A random game: who acted, what, and what it was worth to whom."""
    rng = np.random.default_rng(seed)
    observation, info = env.reset(seed=seed)
    played, ended = [], False
    while not ended:
        agent, action = info["agent"], scripted_action(observation, rng=rng)
        observation, reward, terminated, truncated, info = env.step(action)
        assert reward == info["agent_rewards"][agent]
        played.append((agent, action, info["agent_rewards"]))
        ended = terminated or truncated
    assert "agent" not in info
    return played


def test_text_of_a_game(game: PettingZoo) -> None:
    observation, info = game.reset(seed=0)
    assert info == {"agent": "player_1"}
    assert observation == (
        "You play X against O in tic-tac-toe: three of your marks in a row, column or diagonal win. "
        f"A free cell is shown by its number.\n{HOW}\n"
        "0 1 2\n3 4 5\n6 7 8\nValid actions: 0, 1, 2, 3, 4, 5, 6, 7, 8."
    )
    observation, reward, terminated, truncated, info = game.step("I take <action>4</action>")
    assert observation.startswith("You play O against X")
    assert observation.endswith("0 1 2\n3 X 5\n6 7 8\nValid actions: 0, 1, 2, 3, 5, 6, 7, 8.")
    assert (reward, terminated, truncated, info["agent"]) == (0, False, False, "player_2")
    # The rules are told once to each.
    assert game.step("0")[0] == "O 1 2\n3 X 5\n6 7 8\nValid actions: 1, 2, 3, 5, 6, 7, 8."


def test_who_wins_and_who_loses_are_rewarded(game: PettingZoo) -> None:
    game.reset(seed=0)
    for action in "03142":
        observation, reward, terminated, truncated, info = game.step(action)
    assert (reward, terminated, truncated) == (1, True, False)
    assert info["agent_rewards"] == {"player_1": 1, "player_2": -1}
    assert observation == "The game is over: player_1 1, player_2 -1."


def test_wrong_actions_are_told_and_asked_again(game: PettingZoo) -> None:
    game.reset(seed=0)
    board = game.step("4")[0].split("\n", 2)[2]
    for action, problem in (
        ("no idea", "No number was found in the answer."),
        ("<action>4</action>", "4 is not possible now."),
    ):
        observation, reward, terminated, _, info = game.step(action)
        assert observation == f"{problem}\n{HOW}\n{board}"
        assert (reward, terminated) == (0, False)
        assert info == {
            "agent": "player_2",
            "agent_rewards": {"player_2": 0},
            "invalid_action": True,
        }
    assert game.step("0")[4]["invalid_action"] is False


def test_wrong_actions_in_a_row_lose_the_game() -> None:
    game = PettingZoo(max_invalid=2, invalid_reward=-0.25, forfeit_reward=-2)
    game.reset(seed=0)
    game.step("?")
    game.step("1")
    assert game.step("?")[1] == -0.25, "the other's were not this one's"
    _, reward, terminated, _, info = game.step("?")
    assert (reward, terminated, info["forfeited_by"]) == (-2, True, "player_2")
    assert info["agent_rewards"] == {"player_2": -2}


@pytest.mark.parametrize("env_id", ["tictactoe_v3", "classic/connect_four-v3"])
def test_random_games_end_and_add_up_to_0(env_id: str) -> None:
    env = gymnasium.make(ENV_ID, env_id=env_id)
    outcomes = set()
    for seed in range(12):
        played = play(env, seed)
        agents = [agent for agent, *_ in played]
        assert all(one != other for one, other in itertools.pairwise(agents))
        totals = [sum(rewards[agent] for *_, rewards in played) for agent in sorted(set(agents))]
        assert sum(totals) == 0
        outcomes.add(tuple(totals))
    assert {(1, -1), (-1, 1)} <= outcomes
    env.close()


def test_a_game_of_the_aec_interface_that_truncates_and_has_names() -> None:
    env = PettingZoo(env_id="rps_v2", env_kwargs={"max_cycles": 2})
    observation, info = env.reset(seed=3)
    assert "NAME is one of: rock, paper, scissors." in observation
    total = dict.fromkeys(env.possible_agents, 0.0)
    for action in ("paper", "rock", "Scissors", "rock"):
        observation, _, terminated, truncated, info = env.step(action)
        for agent, reward in info["agent_rewards"].items():
            total[agent] += reward
    assert (terminated, truncated) == (False, True)
    assert total == {"player_0": 0, "player_1": 0}, "one each"
    env.close()


@pytest.mark.parametrize("worker", ["inline", "thread", "process"])
def test_the_pool_plays_it(worker: str) -> None:
    async def run() -> list[object]:
        pool = EnvPool(ENV_ID, 1, worker=worker)
        try:
            async with pool.lease() as env:
                await env.reset(seed=5)
                answers = [await env.step(action) for action in "03142"]
                return [answers[0].observation, answers[0].info, answers[-1].info]
        finally:
            await pool.aclose()

    game = PettingZoo()
    game.reset(seed=5)
    expected = [game.step(action) for action in "03142"]
    assert anyio.run(run) == [expected[0][0], expected[0][4], expected[-1][4]]


@pytest.mark.parametrize("env_id", ["tictactoe_v3", "rps_v2"])
def test_it_conforms_when_it_is_played_well_and_badly(env_id: str) -> None:
    check_env_conformance(
        lambda: gymnasium.make(ENV_ID, env_id=env_id, max_invalid=9),
        actions=("rock", "?", "0", "4", "paper", "1", "3", "<action>2</action>", "7"),
    )


@pytest.mark.parametrize(
    ("setting", "kind", "message"),
    [
        ({"env_id": "tictacto_v3"}, UnknownNameError, "Did you mean classic/tictactoe-v3"),
        ({"env_id": "go_v5"}, ConfigError, r"shape \(19, 19, 17\) is too large"),
        ({"max_invalid": 0}, ConfigError, "max_invalid must be >= 1, got 0"),
        ({"forfeit_reward": float("inf")}, ConfigError, "forfeit_reward must be a finite number"),
        ({"action_names": ["a", "b"]}, ConfigError, "must be 9 different names"),
    ],
)
def test_what_can_not_be_is_refused(
    setting: dict[str, object], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        PettingZoo(**setting)  # type: ignore[arg-type]  # what is tested


def test_a_missing_package_names_its_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pettingzoo", None)
    with pytest.raises(MissingExtraError, match=r'pip install "gymllm-envs\[pettingzoo\]"'):
        PettingZoo()


def test_the_scripted_player_takes_any_of_the_last_possible_actions() -> None:
    text = "Valid actions: 7, 8.\nassistant: 7\nValid actions: 1, 3."
    player = scripted_player(ENV_ID)
    taken = {player(text, np.random.default_rng(seed), 0.3) for seed in range(20)}
    assert taken == {"1", "3"}
