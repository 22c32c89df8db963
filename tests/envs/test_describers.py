"""The describers that ship: what a reader is told of each environment, and that it is right."""

import functools
import subprocess
import sys
from typing import Any

import gymnasium
import pytest
from gymnasium.utils.env_checker import check_env

import gymllm
from gymllm.adapters import action_names_for
from gymllm.testing import check_env_conformance

CLIFF = next(i for i in ("CliffWalking-v1", "CliffWalking-v0") if i in gymnasium.registry)
TAXI = next(i for i in ("Taxi-v4", "Taxi-v3") if i in gymnasium.registry)
PLAYED = {
    "FrozenLake-v1": ("right", "down"),
    TAXI: ("north", "south", "west"),
    CLIFF: ("up", "right"),
    "Blackjack-v1": ("hit",),
    "CartPole-v1": ("left", "<action>right</action>"),
    "MountainCar-v0": ("left", "coast"),
    "MountainCarContinuous-v0": ("[0.5]", "<action>-1</action>"),
    "Acrobot-v1": ("minus", "plus"),
    "Pendulum-v1": ("[0.5]",),
    "MiniGrid-Empty-5x5-v0": ("forward", "right"),
    "MiniGrid-DoorKey-5x5-v0": ("forward", "left", "pickup", "toggle"),
    "BabyAI-GoToRedBallGrey-v0": ("forward", "left"),
    "ALE/Pong-v5": ("FIRE", "RIGHT"),
}
"""Ids, and actions that can be read."""


@pytest.mark.parametrize(
    "env_id",
    [
        pytest.param(env_id, marks=pytest.mark.slow if env_id.startswith("ALE/") else ())
        for env_id in PLAYED
    ],
)
def test_works_out_of_the_box(env_id: str) -> None:
    make_env = functools.partial(gymnasium.make, "gymllm/Gym-v0", env_id=env_id)
    check_env_conformance(make_env, actions=("?", *PLAYED[env_id]), longest_episode=15)
    env = make_env()
    check_env(env.unwrapped, skip_render_check=True)
    env.close()


@pytest.mark.parametrize("env_id", PLAYED)
def test_first_observation_says_what_is_played_how_to_answer_and_what_is_read(env_id: str) -> None:
    env = gymllm.make(env_id)
    observation: Any = env.reset(seed=0)[0]
    text = observation if isinstance(observation, str) else observation["content"][0]["text"]
    title, rules, *_ = text.split("\n")
    assert title == f"You are playing {env_id}."
    assert len(rules) > 60
    assert "\nAnswer with <action>" in text
    for action in PLAYED[env_id]:
        env.reset(seed=0)
        info = env.step(action)[4]
        assert not info["invalid_action"] or "action_mask" in env.reset(seed=0)[1]
    env.close()


def played(env_id: str, *actions: str, seed: int = 0, **kwargs: Any) -> str:
    """The observation after some actions, or the first without instructions."""
    env = gymllm.make("gymllm/Gym-v0", env_id=env_id, env_kwargs=kwargs, instructions="")
    observation = env.reset(seed=seed)[0]
    for action in actions:
        observation = env.step(action)[0]
    env.close()
    return observation


def rules_of(env_id: str, **kwargs: Any) -> str:
    env = gymllm.make("gymllm/Gym-v0", env_id=env_id, env_kwargs=kwargs)
    text = env.reset(seed=0)[0]
    env.close()
    return text


def test_lake_marks_the_player_and_says_where() -> None:
    lake = functools.partial(played, "FrozenLake-v1", is_slippery=False)
    assert lake("right", "right") == (
        " S  F [F] F\n F  H  F  H\n F  F  F  H\n H  F  F  G\nYou are at row 0, column 2."
    )
    assert lake("right", "down") == "You fell into the hole at row 1, column 1."
    way = ("down", "down", "right", "right", "down", "right")
    assert lake(*way) == "You reached the goal at row 3, column 3."


def test_rules_say_whether_the_ground_is_slippery() -> None:
    for env_id in ("FrozenLake-v1", CLIFF):
        assert "slippery" in rules_of(env_id, is_slippery=True)
        assert "slippery" not in rules_of(env_id, is_slippery=False)


def test_taxi_shows_the_map_and_says_who_is_where() -> None:
    shown = played(TAXI, seed=1)
    assert shown == (
        "+---------+\n|R: | : :G|\n| : | : : |\n| : :T: : |\n| | : | : |\n|Y| : |B: |\n+---------+\n"
        "The taxi is at row 2, column 2.\n"
        "The passenger waits at B (row 4, column 3). The destination is R (row 0, column 0).\n"
        "Valid actions: south, north, east, west."
    )


def test_taxi_delivers() -> None:
    drive = ("east", "south", "south")
    assert played(TAXI, *drive, seed=1).endswith("Valid actions: north, east, pickup.")
    aboard = played(TAXI, *drive, "pickup", seed=1)
    assert "The passenger is in the taxi. The destination is R" in aboard
    home = ("north", "north", "west", "west", "west", "north", "north")
    assert played(TAXI, *drive, "pickup", *home, "dropoff", seed=1) == (
        "The passenger is at the destination, R (row 0, column 0)."
    )


def test_rain_is_told() -> None:
    if TAXI != "Taxi-v4":
        pytest.skip("this Gymnasium's Taxi has no weather")
    assert "It rains" in rules_of(TAXI, is_rainy=True)
    assert "change the destination" in rules_of(TAXI, fickle_passenger=True)
    assert "It rains" not in rules_of(TAXI)


def test_cliff_marks_the_player_and_says_where_the_goal_is() -> None:
    shown = played(CLIFF, "up", "right")
    assert shown.split("\n") == [
        " ." + "  ." * 11,
        " ." + "  ." * 11,
        " . [.]" + " . " * 9 + " .",
        " S" + "  C" * 10 + "  G",
        "You are at row 2, column 1. The goal is at row 3, column 11.",
    ]
    assert played(CLIFF, "up", *["right"] * 11, "down").startswith("You reached the goal at row 3")
    assert "[S]" in played(CLIFF, "right"), "the cliff leads back to the start"


def test_blackjack_tells_the_hands() -> None:
    assert played("Blackjack-v1", seed=1) == "Your hand counts 20. The dealer shows 7."
    assert played("Blackjack-v1", "hit", seed=1) == "Your hand counts 22: over 21, you lose."
    hands = [played("Blackjack-v1", seed=seed) for seed in range(40)]
    assert any("with an ace counted as 11" in hand for hand in hands)
    assert any(hand.endswith("The dealer shows an ace.") for hand in hands)


def test_numbers_are_named_and_rounded() -> None:
    assert played("CartPole-v1").split("\n") == [
        "cart position: 0.0137",
        "cart velocity: -0.02302",
        "pole angle (radians, positive: leans right): -0.0459",
        "pole angular velocity: -0.04835",
    ]
    assert played("MountainCar-v0") == "position: -0.4726\nvelocity: 0.0"


def test_minigrid_tells_the_mission_the_view_and_what_is_carried() -> None:
    key_in_front = played("MiniGrid-DoorKey-5x5-v0", seed=1)
    assert key_in_front == (
        "Mission: use the key to open the door and then get to the goal\n"
        "You face south and carry nothing.\n"
        "The cell ahead of you: a yellow key.\n"
        "You see:\n"
        "- a locked yellow door: 1 left, beside you\n"
        "- a yellow key: 1 ahead\n"
        "# # #\n# K #\nD ^ #"
    )
    unlocked = played("MiniGrid-DoorKey-5x5-v0", "pickup", "left", "toggle", seed=1)
    assert "You face east and carry a yellow key." in unlocked
    assert "The cell ahead of you: an open yellow door." in unlocked


def test_minigrid_places_are_where_the_env_has_them() -> None:
    env: Any = gymnasium.make("MiniGrid-Empty-5x5-v0")
    env.reset(seed=0)
    inner = env.unwrapped
    text = played("MiniGrid-Empty-5x5-v0")
    (goal,) = (line for line in text.split("\n") if line.startswith("- "))
    ahead, right = inner.width - 2 - inner.agent_pos[0], inner.height - 2 - inner.agent_pos[1]
    assert inner.agent_dir == 0, "east"
    assert goal == f"- the goal: {ahead} ahead, {right} right"
    assert "the goal" not in played("MiniGrid-Empty-5x5-v0", "left", "left"), "it is behind now"


def test_minigrid_is_won_by_what_the_text_says() -> None:
    env: Any = gymllm.make("MiniGrid-Empty-5x5-v0")
    assert "the goal: 2 ahead, 2 right" in env.reset(seed=0)[0]
    for action in ("forward", "forward", "right", "forward", "forward"):
        _, reward, terminated, *_ = env.step(action)
    assert terminated
    assert reward > 0.9


def test_babyai_has_its_own_rules() -> None:
    first = rules_of("BabyAI-GoToRedBallGrey-v0")
    assert "stand next to it and face it" in first
    assert "Mission: go to the red ball" in first
    assert "stand next to it" not in rules_of("MiniGrid-Empty-5x5-v0")


def test_minigrids_whole_grid_is_shown_where_a_wrapper_shows_it() -> None:
    from minigrid.wrappers import FullyObsWrapper  # registered by the import of minigrid

    env = gymllm.textify(FullyObsWrapper(gymnasium.make("MiniGrid-Empty-5x5-v0")))
    observation = env.reset(seed=0)[0]
    assert "mission: get to the green goal square\nWGWGWGWGWG\nWG>>    WG" in observation
    assert "left, right, forward, pickup" in observation
    assert "you are ^" not in observation, "rules of another picture"


def test_atari_shows_the_screen_and_names_the_game() -> None:
    env: Any = gymllm.make("ALE/Pong-v5")
    text, image = env.reset(seed=0)[0]["content"]
    assert "You play the Atari game Pong" in text["text"]
    assert image["image"].shape == (210, 160, 3)
    assert action_names_for(env.env)[:2] == ("NOOP", "FIRE")
    (image,) = env.step("FIRE")[0]["content"]
    assert image["type"] == "image"
    env.close()


def test_describers_are_loaded_without_the_envs_they_describe() -> None:
    code = (
        "import gymllm, sys;"
        "print([m for m in ('minigrid', 'ale_py', 'pygame') if m in sys.modules]);"
        "print(gymllm.make('MiniGrid-Empty-5x5-v0').reset(seed=0)[0])"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True
    )
    first, rest = done.stdout.split("\n", 1)
    assert first == "[]"
    assert "- the goal: 2 ahead, 2 right" in rest
