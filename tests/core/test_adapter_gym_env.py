"""`gymllm/Gym-v0`: any environment by its id, made, pooled and kept as Gymnasium does."""

import json
import pickle
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.envs.registration import EnvSpec

import gymllm
from gymllm.adapters import TextAdapter
from gymllm.errors import ConfigError, UnknownNameError

GYM_ID = "gymllm/Gym-v0"
LAKE: dict[str, Any] = {
    "env_id": "FrozenLake-v1",
    "env_kwargs": {"is_slippery": False, "map_name": "8x8"},
}


def test_env_kwargs_reach_the_env() -> None:
    env = gymnasium.make(GYM_ID, **LAKE)
    observation, _ = env.reset(seed=0)
    assert isinstance(env.unwrapped, TextAdapter)
    assert "You are at row 0, column 0." in observation
    assert observation.count("F") > 40
    for _ in range(3):
        observation = env.step("<action>right</action>")[0]
    assert "row 0, column 3" in observation


def test_settings_of_the_adapter() -> None:
    env = gymllm.make(
        GYM_ID,
        **LAKE,
        instructions="Walk.",
        action_names=("w", "s", "e", "n"),
        invalid_reward=-1.0,
        max_invalid=1,
    )
    assert env.reset(seed=0)[0].startswith("Walk.\n[S]")
    assert "row 0, column 1" in env.step("e")[0]
    assert env.step("right")[1:4] == (-1.0, False, True)


def test_its_spec_goes_through_json_and_pickle() -> None:
    env = gymnasium.make(GYM_ID, **LAKE)
    assert env.spec is not None
    text = env.spec.to_json()
    assert json.loads(text)["kwargs"] == LAKE
    expected = env.reset(seed=3)[0]
    for spec in (EnvSpec.from_json(text), pickle.loads(pickle.dumps(env.spec))):
        assert gymnasium.make(spec).reset(seed=3)[0] == expected


def test_make_vec_gives_a_pool() -> None:
    pool = gymnasium.make_vec(GYM_ID, num_envs=4, **LAKE)
    try:
        assert isinstance(pool, gymllm.EnvPool)
        observations, _ = pool.reset(seed=0)
        assert len(observations) == 4
        observations, *_ = pool.step(("right", "down", "right", "?"))
        assert ["column 1" in text for text in observations] == [True, False, True, False]
    finally:
        pool.close()


def test_what_it_cant_play_says_why() -> None:
    with pytest.raises(ConfigError, match=r'needs the id of what is played.*env_id="CartPole-v1"'):
        gymllm.make(GYM_ID)
    with pytest.raises(UnknownNameError, match="Did you mean CartPole"):
        gymllm.make(GYM_ID, env_id="CartPool-v1")
    with pytest.raises(ConfigError, match="played in text already"):
        gymllm.make(GYM_ID, env_id="gymllm/FrozenLake-v0")
    with pytest.raises(ConfigError, match=r"gymllm/Gym-v0 can't be made.*'answer_rul'"):
        gymllm.make(GYM_ID, env_id="FrozenLake-v1", answer_rul="last")
    with pytest.raises(ConfigError, match=r"Unknown argument of FrozenLake-v1 'no_such'"):
        gymllm.make(GYM_ID, env_id="FrozenLake-v1", env_kwargs={"no_such": 1})


def test_gymnasium_may_collect_its_frames() -> None:
    env = gymnasium.make("gymllm/Gym-v0", env_id="CartPole-v1", render_mode="rgb_array_list")
    env.reset(seed=0)
    env.step("0")
    frames: Any = env.render()
    assert [frame.dtype for frame in frames] == [np.uint8] * 2
