"""Ids, plug-ins, and making any environment a text environment."""

import json
import pickle
import subprocess
import sys
import warnings
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import gymnasium
import gymnasium.envs.registration
import pytest

import gymllm
import gymllm_envs
from gymllm.errors import ConfigError, ConfigTypeError, MissingExtraError, UnknownNameError
from gymllm.registration import PROVIDERS, check_id, load_plugins, make
from gymllm.spaces import Unicode

ENV_ID = "gymllm/FrozenLake-v0"


def test_register_is_idempotent() -> None:
    before = dict(gymnasium.registry)
    gymllm_envs.register()
    load_plugins()
    assert dict(gymnasium.registry) == before


def test_a_broken_plugin_is_named_and_left_out() -> None:
    broken = [
        EntryPoint("missing", "no_such_module:register", "gymllm.envs"),
        EntryPoint("raising", "json:loads", "gymllm.envs"),  # needs an argument
        EntryPoint("fine", "gymllm_envs:register", "gymllm.envs"),
    ]
    with pytest.warns(RuntimeWarning) as caught:
        load_plugins(broken)
    messages = [str(warning.message) for warning in caught]
    assert len(messages) == 2
    assert "'missing' (no_such_module:register)" in messages[0]
    assert "ModuleNotFoundError" in messages[0]
    assert "'raising'" in messages[1]


def test_make_with_a_module_prefix_needs_no_import() -> None:
    code = (
        "import gymnasium; env = gymnasium.make('gymllm:gymllm/FrozenLake-v0');"
        "print(env.reset(seed=0)[0])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "left, down, right or up" in done.stdout


def test_spec_round_trips_through_json_and_make() -> None:
    env = gymnasium.make(ENV_ID, size=5)
    assert env.spec is not None
    spec = gymnasium.envs.registration.EnvSpec.from_json(env.spec.to_json())
    assert json.loads(env.spec.to_json())["kwargs"] == {"size": 5}
    assert gymnasium.make(spec).reset(seed=3)[0] == env.reset(seed=3)[0]


def test_unknown_id_says_what_is_close() -> None:
    with pytest.raises(UnknownNameError, match="Did you mean gymllm/FrozenLake-v0"):
        make("gymllm/FrozenLak-v0")
    with pytest.raises(UnknownNameError, match="gymllm/FrozenLake-v0"):
        make("gymllm/FrozenLake-v7")
    with pytest.raises(UnknownNameError, match="CartPole-v1"):
        check_id("CartPool-v1")
    with pytest.raises(UnknownNameError, match="no_such_namespace"):
        make("no_such_namespace/Env-v0")
    check_id("CartPole-v1")


@pytest.mark.parametrize("env_id", [None, gymnasium.spec("CartPole-v1")])
def test_an_id_that_is_no_text_is_named(env_id: Any) -> None:
    with pytest.raises(ConfigTypeError, match=r"id must be a str such as .*FrozenLake-v0.*, got"):
        gymllm.make(env_id)


def test_a_misspelt_argument_is_answered_with_the_right_one() -> None:
    with pytest.raises(UnknownNameError, match=r"FrozenLake-v0 'siz'\. Did you mean size\?"):
        make(ENV_ID, siz=4)


def test_wrong_arguments_say_which() -> None:
    with pytest.raises(ConfigError, match="no_such_option"):
        make(ENV_ID, no_such_option=1)
    with pytest.raises(ConfigError, match="size must be from 2"):
        make(ENV_ID, size=1)


def test_a_module_that_cant_be_imported_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "envs_lacking_a_package.py").write_text("import no_such_package")
    (tmp_path / "envs_with_a_typo.py").write_text("def (")
    with pytest.raises(ConfigError, match=r"there is no module 'no_such_module'.*PYTHONPATH"):
        make("no_such_module:Env-v0")
    with pytest.raises(ConfigError, match="ModuleNotFoundError: No module named 'no_such_package'"):
        make("envs_lacking_a_package:Env-v0")
    with pytest.raises(ConfigError, match="'envs_with_a_typo' can't be imported: SyntaxError"):
        make("envs_with_a_typo:Env-v0")


def test_an_env_that_raises_while_it_is_made_is_named() -> None:
    def broken() -> gymnasium.Env[str, str]:
        raise FileNotFoundError("no puzzles.json")

    gymnasium.register("test/Broken-v0", broken)
    try:
        with pytest.raises(ConfigError, match=r"test/Broken-v0 .*FileNotFoundError: no puzzles"):
            make("test/Broken-v0")
    finally:
        del gymnasium.registry["test/Broken-v0"]


@pytest.mark.parametrize(
    ("env_id", "action"),
    [
        ("CartPole-v1", "left"),
        ("FrozenLake-v1", "down"),
        ("Taxi-v4", "south"),
        ("CliffWalking-v1", "up"),
        ("Blackjack-v1", "stick"),
        ("MountainCar-v0", "coast"),
    ],
)
def test_any_stock_id_is_played_in_text(env_id: str, action: str) -> None:
    if env_id not in gymnasium.registry:
        pytest.skip(f"this Gymnasium has no {env_id}")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        env = gymllm.make(env_id)
    observation, _ = env.reset(seed=0)
    assert observation in env.observation_space
    assert env.action_space == Unicode()
    assert observation.startswith(f"You are playing {env_id}.\n")
    assert env.step("nothing to read")[4]["invalid_action"] is True
    assert env.step(f"I choose {action}.")[4]["invalid_action"] is False
    env.close()


def test_packages_of_known_ids_are_imported_or_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PROVIDERS, "Nowhere-", ("no_such_package", "nowhere"))
    with pytest.raises(MissingExtraError, match=r'pip install "gymllm-envs\[nowhere\]"'):
        make("Nowhere-v0")
    with pytest.raises(UnknownNameError, match="Did you mean MiniGrid-Empty-5x5-v0"):
        check_id("MiniGrid-Empy-5x5-v0")
    check_id("MiniGrid-Empty-5x5-v0")


def test_text_envs_are_not_wrapped_again() -> None:
    assert type(make(ENV_ID).unwrapped).__name__ == "FrozenLake"


@pytest.mark.parametrize(
    ("env_id", "kwargs"),
    [
        ("gymllm/FrozenLake-v0", {"size": 3}),
        ("gymllm/Arithmetic-v0", {"questions": 9}),
        ("gymllm/Gym-v0", {"env_id": "CartPole-v1"}),
    ],
)
def test_an_environment_goes_through_pickle_in_mid_episode(env_id: str, kwargs: Any) -> None:
    env = gymnasium.make(env_id, **kwargs)
    env.reset(seed=3)
    env.step("1")
    copy = pickle.loads(pickle.dumps(env))
    assert copy.spec == env.spec
    for action in ("right", "0", "nonsense", "<action>1</action>"):
        assert copy.step(action) == env.step(action)
    assert copy.reset(seed=9)[0] == env.reset(seed=9)[0]


def test_gymnasium_says_what_is_close() -> None:
    with pytest.raises(gymnasium.error.NameNotFound, match="Did you mean: `FrozenLake`"):
        gymnasium.make("gymllm/FrozenLak-v0")


def test_make_vec_gives_the_pool() -> None:
    pool = gymnasium.make_vec("gymllm/FrozenLake-v0", num_envs=64)
    assert isinstance(pool, gymllm.EnvPool)
    observations, _ = pool.reset(seed=1)
    assert len(set(observations)) > 32
    assert len(pool.step(["right"] * 64)[1]) == 64
    pool.close()


def test_make_vec_takes_what_a_pool_takes() -> None:
    pool = gymnasium.make_vec(
        "gymllm/FrozenLake-v0", num_envs=2, size=3, worker="thread", autoreset_mode="NextStep"
    )
    assert isinstance(pool, gymllm.EnvPool)
    assert (pool.worker, pool.metadata["autoreset_mode"].value) == ("thread", "NextStep")
    assert pool.reset(seed=1)[0][0].count("\n") == gymllm.make(
        "gymllm/FrozenLake-v0", size=3
    ).reset(seed=1)[0].count("\n")
    pool.close()
