"""What is registered for environments, their actions' names, and which actions are possible."""

import enum
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium import spaces
from gymnasium.envs.registration import EnvSpec

from gymllm.adapters import action_names_for, description_for, register_describer, registry
from gymllm.adapters.masks import possible_actions
from gymllm.adapters.registry import rules_for
from gymllm.errors import ConfigError

MODULE = __name__


class Moves(enum.IntEnum):
    """More actions than an environment's space may have."""

    west = 0
    east = 1
    stay = 2


class Base(gymnasium.Env[Any, Any]):
    """Three actions without names."""

    def __init__(self, count: int = 3) -> None:
        self.action_space = spaces.Discrete(count)
        self.observation_space = spaces.Discrete(2)


class Derived(Base):
    """What is registered for `Base` counts for it too."""


class WithEnum(Base):
    """Names its actions by an enum, as MiniGrid does."""

    actions = Moves


class WithMeanings(Base):
    """Names its actions by a method, as the Arcade Learning Environment does."""

    def get_action_meanings(self) -> list[str]:
        return ["NOOP", "FIRE", "UP"]


class WithMasks(Base):
    """Says by a method what is possible."""

    def action_masks(self) -> Any:
        return np.array([False, True, True])


@pytest.fixture(autouse=True)
def _only_own_describers(monkeypatch: pytest.MonkeyPatch) -> None:  # pyright: ignore[reportUnusedFunction]  # a fixture
    monkeypatch.setattr(registry, "_by_id", {})
    monkeypatch.setattr(registry, "_by_class", {})


def rules(env: gymnasium.Env[Any, Any]) -> object:
    description = description_for(env)
    return description and description.instructions


def with_id(env_id: str) -> gymnasium.Env[Any, Any]:
    env = Derived()
    env.spec = EnvSpec(env_id)
    return env


def test_nearest_class_counts_and_classes_are_found_by_name() -> None:
    assert description_for(Derived()) is None
    register_describer(env_class=f"{MODULE}:Base", instructions="base")
    assert rules(Derived()) == rules(gymnasium.Wrapper(Derived())) == "base"
    register_describer(env_class=Derived, instructions="derived")
    assert (rules(Derived()), rules(Base())) == ("derived", "base")


def test_id_counts_before_pattern_before_class_and_the_last_pattern_first() -> None:
    register_describer(env_id="toy/Lake-v0", instructions="exact")
    register_describer(env_id="toy/*", instructions="toy")
    register_describer(env_id="toy/S*", instructions="toy S")
    register_describer(env_class=Base, instructions="class")
    found = [rules(with_id(name)) for name in ("toy/Lake-v0", "toy/Pond-v0", "toy/Sea-v0", "A-v0")]
    assert found == ["exact", "toy", "toy S", "class"]
    register_describer(env_id="toy/*", instructions="again")
    assert rules(with_id("toy/Sea-v0")) == "again"


def test_what_cant_be_registered_is_refused() -> None:
    with pytest.raises(ConfigError, match="one of them, got None and None"):
        register_describer(instructions="x")
    with pytest.raises(ConfigError, match="one of them"):
        register_describer(env_id="a", env_class=Base)
    with pytest.raises(ConfigError, match="not both"):
        register_describer(env_id="a", describe=lambda _, seen: str(seen), fields=["a"])
    with pytest.raises(ConfigError, match="got 'CartPole-v1'"):
        register_describer(env_class="CartPole-v1")


def test_names_are_registered_or_of_the_envs_enum_or_its_meanings() -> None:
    assert action_names_for(Base()) == ()
    assert action_names_for(WithEnum()) == ("west", "east", "stay")
    assert action_names_for(WithEnum(2)) == ("west", "east")
    assert action_names_for(WithEnum(4)) == ()
    assert action_names_for(WithMeanings()) == ("NOOP", "FIRE", "UP")
    assert action_names_for(WithMeanings(2)) == ()
    register_describer(env_class=Base, action_names=("a", "b", "c"))
    assert action_names_for(WithEnum()) == ("a", "b", "c")


def test_a_wrapper_that_changes_the_actions_leaves_numbers_and_no_rules() -> None:
    register_describer(env_class=Base, action_names=("a", "b", "c"), instructions="Play.")
    assert rules_for(gymnasium.Wrapper(WithEnum())) == "Play."
    env: Any = gymnasium.wrappers.TransformAction(WithEnum(), int, spaces.Discrete(2))
    assert action_names_for(env) == ()
    assert rules_for(env) == ""


def test_rules_of_a_picture_need_the_picture() -> None:
    flat: Any = gymnasium.wrappers.FlattenObservation(Base())
    register_describer(env_class=Base, instructions=lambda env: f"Play {type(env).__name__}.")
    assert rules_for(flat) == "Play Base."
    register_describer(env_class=Base, instructions="x", describe=lambda _, seen: str(seen))
    assert rules_for(flat) == ""
    assert rules_for(Base()) == "x"


def test_masks_are_of_the_info_or_the_envs_method() -> None:
    assert possible_actions(Base(), {}) is None
    masks = [
        possible_actions(Base(), {"action_mask": np.array([1, 0, 1], np.int8)}, ("a", "b", "c")),
        possible_actions(gymnasium.Wrapper(WithMasks()), {}),
    ]
    assert [mask and mask.shown() for mask in masks] == [
        "Valid actions: a, c.",
        "Valid actions: 1, 2.",
    ]
    assert [[bool(mask and mask.allows(i)) for i in range(3)] for mask in masks] == [
        [True, False, True],
        [False, True, True],
    ]


@pytest.mark.parametrize("mask", [np.zeros(3), np.ones(4), np.ones((3, 1))])
def test_masks_that_do_not_fit_or_allow_nothing_are_not_used(mask: Any) -> None:
    assert possible_actions(Base(), {"action_mask": mask}) is None


@pytest.mark.parametrize(
    "mask", [(np.array([1, 0]), np.array([0, 1, 1])), np.array([1, 0, 0, 1, 1])]
)
def test_masks_of_several_numbers(mask: Any) -> None:
    env = Base()
    env.action_space = spaces.MultiDiscrete([2, 3], start=[0, 5])  # type: ignore[assignment]  # what is tested
    possible = possible_actions(env, {"action_mask": mask})
    assert possible is not None
    assert possible.shown() == "Valid numbers by position: 0: 0; 1: 6, 7."
    assert possible.allows(np.array([0, 6]))
    assert not possible.allows(np.array([1, 6]))
    assert possible.name(np.array([1, 6])) == "[1, 6]"
