"""`gymllm/TextArena-v0`: real games, played by whoever's turn it is."""

from __future__ import annotations

import random
import sys

import anyio
import gymnasium
import numpy as np
import pytest

from gymllm.errors import ConfigError, MissingExtraError, UnknownNameError
from gymllm.pool import EnvPool
from gymllm.testing import check_env_conformance
from gymllm_envs.text_arena import ENV_ID, TextArena

DICE = "LiarsDice-v0"


def test_text_of_a_game() -> None:
    game = TextArena()
    observation, info = game.reset(seed=0)
    assert info == {"agent": "player_0"}
    assert observation.startswith("You are Player 0 in Tic Tac Toe.")
    assert observation.count("Current Board:") == 1
    observation, reward, terminated, _, info = game.step("[4]")
    assert (reward, terminated) == (0, False)
    assert info == {"agent": "player_1", "agent_rewards": {}, "invalid_action": False}
    assert observation.startswith("You are Player 1 in Tic Tac Toe.")
    assert "Player 0: [4]\n" in observation
    assert observation.count("Current Board:") == 1, "the one before its turn is not news"
    observation = game.step("[0]")[0]
    assert "You are Player" not in observation, "the rules are told once"
    assert "Player 1: [0]\n" in observation
    assert "Player 0: [4]" not in observation, "it knows what it said itself"


def test_who_wins_and_who_loses_are_rewarded() -> None:
    game = TextArena()
    game.reset(seed=0)
    for action in ("[0]", "[3]", "[1]", "[4]", "[2]"):
        observation, reward, terminated, truncated, info = game.step(action)
    assert (reward, terminated, truncated) == (1, True, False)
    assert info["agent_rewards"] == {"player_0": 1, "player_1": -1}
    assert observation == "Player 0 has won!"
    assert "agent" not in info


@pytest.mark.parametrize(("max_invalid", "lost_at"), [(None, 2), (1, 1), (3, 3)])
def test_refused_actions_are_told_and_too_many_lose(max_invalid: int | None, lost_at: int) -> None:
    game = TextArena(max_invalid=max_invalid)
    game.reset(seed=0)
    for attempt in range(1, lost_at + 1):
        observation, _, terminated, _, info = game.step("in the middle")
        assert info["invalid_action"] is True
        assert terminated == (attempt == lost_at)
        if not terminated:
            assert "does not follow the correct format" in observation
            assert info["agent"] == "player_0"
    assert info["agent_rewards"] == {"player_0": -1, "player_1": 1}


def test_a_good_action_starts_the_count_of_refused_ones_again() -> None:
    game = TextArena()
    game.reset(seed=0)
    said = [game.step(action)[4] for action in ("?", "[4]", "?", "[0]", "?")]
    assert [info["invalid_action"] for info in said] == [True, False, True, False, True]


def test_dice_are_a_function_of_the_seed_and_leave_the_processs_generators_alone() -> None:
    def dice(game: TextArena, seed: int | None) -> str:
        return game.reset(seed=seed)[0].rpartition("Dice are: ")[2]

    random.seed(7)
    np.random.seed(7)
    before = random.getstate(), np.random.get_state()[1].tolist()
    one, other = TextArena(env_id=DICE), TextArena(env_id=DICE)
    rolled = [dice(one, seed) for seed in range(8)]
    assert len(set(rolled)) > 4
    for seed in range(8):  # the other is played between
        dice(other, None)
        assert dice(one, seed) == rolled[seed]
    assert (random.getstate(), np.random.get_state()[1].tolist()) == before


@pytest.mark.parametrize("worker", ["inline", "thread", "process"])
def test_the_pool_plays_it(worker: str) -> None:
    async def run() -> list[object]:
        pool = EnvPool(ENV_ID, 1, worker=worker)
        try:
            async with pool.lease() as env:
                await env.reset(seed=5)
                step = await env.step("[4]")
                return [step.observation, step.info]
        finally:
            await pool.aclose()

    game = TextArena()
    game.reset(seed=5)
    observation, *_, info = game.step("[4]")
    assert anyio.run(run) == [observation, info]


@pytest.mark.parametrize("env_id", ["TicTacToe-v0", DICE])
def test_it_conforms_when_it_is_played_well_and_badly(env_id: str) -> None:
    check_env_conformance(
        lambda: gymnasium.make(ENV_ID, env_id=env_id, max_invalid=9),
        actions=("[4]", "?", "[0]", "[1]", "[Bid: 1, 3]", "[8]", "[Call]", "[2]"),
    )


@pytest.mark.parametrize(
    ("setting", "kind", "message"),
    [
        ({"env_id": "TicTacTo-v0"}, UnknownNameError, "Did you mean TicTacToe-v0"),
        ({"num_players": 0}, ConfigError, "num_players must be >= 1, got 0"),
        ({"max_invalid": 0}, ConfigError, "max_invalid must be >= 1 or None, got 0"),
    ],
)
def test_what_can_not_be_is_refused(
    setting: dict[str, object], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        TextArena(**setting)  # type: ignore[arg-type]  # what is tested


def test_a_wrong_number_of_players_and_options_are_refused_at_the_reset() -> None:
    with pytest.raises(ConfigError, match=r"can't be played by num_players = 3: .* has to be 2"):
        TextArena(num_players=3).reset(seed=0)
    with pytest.raises(ConfigError, match="takes no reset options"):
        TextArena().reset(options={"board": 3})


def test_a_missing_package_names_its_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "textarena", None)
    with pytest.raises(MissingExtraError, match=r'pip install "gymllm-envs\[textarena\]"'):
        TextArena()
