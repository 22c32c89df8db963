"""What is known of some environments beyond their spaces: how they look, what their actions are called.

A `Description` is registered for ids, by a pattern, or for a class and its subclasses, by name: nothing is
imported to look one up. Those that ship are in `gymllm_envs.describers`.
"""

# pyright: reportUnknownMemberType=false, reportUnknownArgumentType=false, reportUnknownVariableType=false
# Gymnasium's spaces are generic over types that its own annotations leave partly unknown.

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from fnmatch import fnmatchcase
from typing import Any, cast

import gymnasium
from gymnasium import spaces

from gymllm.errors import ConfigError

AnyEnv = gymnasium.Env[Any, Any]
AnySpace = spaces.Space[Any]


@dataclass(frozen=True, kw_only=True)
class Description:
    """What an environment looks like to a reader, what its actions are called and what it is about.

    Each function gets the innermost environment (`env.unwrapped`).
    """

    describe: Callable[[AnyEnv, Any], str] | None = None
    """Environment and observation to text. Used where no wrapper has changed the observation's space."""
    fields: tuple[str, ...] = ()
    """Names of the numbers of a `Box` observation, instead of `describe`."""
    action_names: tuple[str, ...] = ()
    """What a `Discrete` action space's actions are called, in order. Used where no wrapper has changed
    the action space."""
    instructions: str | Callable[[AnyEnv], str] = ""
    """The rules and the goal, without how to answer. A function is called after each reset. Used where
    what they speak of is shown: the actions are the environment's own, and so is the observation unless
    nothing is registered for it."""

    @property
    def shows(self) -> bool:
        """Whether it says how an observation looks."""
        return self.describe is not None or bool(self.fields)


_by_id: dict[str, Description] = {}
_by_class: dict[str, Description] = {}


def register_describer(
    *,
    env_id: str | None = None,
    env_class: str | type | None = None,
    describe: Callable[[AnyEnv, Any], str] | None = None,
    fields: Sequence[str] = (),
    action_names: Sequence[str] = (),
    instructions: str | Callable[[AnyEnv], str] = "",
) -> None:
    """Says how some environments are played in text; what is left out is as by default.

    An id counts before a class, and the class nearest to the environment's own first. Of patterns that
    fit, the last registered counts. Registering the same id or class again replaces what was there. Call it
    where the environments are registered, so that worker processes do too.

    Args:
        env_id: Which: an id, or a pattern with `*` and `?` ("MiniGrid-*").
        env_class: Which: the innermost environment's class or one it inherits from, itself or as
            "module:Class", which need not be imported.
        describe: As `Description.describe`.
        fields: As `Description.fields`.
        action_names: As `Description.action_names`.
        instructions: As `Description.instructions`.

    Raises:
        ConfigError: Not exactly one of `env_id` and `env_class` was given, or both `describe` and
            `fields` were.
    """
    if (env_id is None) == (env_class is None):
        raise ConfigError(
            f"give env_id= or env_class=, one of them, got {env_id!r} and {env_class!r}."
        )
    if describe is not None and fields:
        raise ConfigError(f"give describe= or fields=, not both; fields is {list(fields)}.")
    description = Description(
        describe=describe,
        fields=tuple(fields),
        action_names=tuple(action_names),
        instructions=instructions,
    )
    if env_id is not None:
        _by_id.pop(env_id, None)  # so that it is the last
        _by_id[env_id] = description
        return
    name = env_class if isinstance(env_class, str) else _class_name(cast("type", env_class))
    if name.count(":") != 1:
        raise ConfigError(
            f'env_class must be a class or "module:Class", got {name!r}; ids go to env_id=.'
        )
    _by_class[name] = description


def description_for(env: AnyEnv) -> Description | None:
    """What was registered for an environment, or None."""
    env_id = env.spec.id if env.spec is not None else ""
    if env_id in _by_id:
        return _by_id[env_id]
    for pattern in reversed(_by_id):
        if env_id and fnmatchcase(env_id, pattern):
            return _by_id[pattern]
    for one in type(env.unwrapped).__mro__:
        if (name := _class_name(one)) in _by_class:
            return _by_class[name]
    return None


def action_names_for(env: AnyEnv) -> tuple[str, ...]:
    """What a `Discrete` action space's actions are called; empty where they have numbers alone.

    Registered names, else those of the enum that the environment keeps as `actions`, `Actions` or
    `Action`, else its `get_action_meanings()`. A wrapper that changed the action space leaves numbers.
    """
    space, inner = env.action_space, env.unwrapped
    if not isinstance(space, spaces.Discrete) or not same_space(space, inner.action_space):
        return ()
    description = description_for(env)
    if description is not None and description.action_names:
        return description.action_names
    numbers = range(int(space.start), int(space.start + space.n))
    for attribute in ("actions", "Actions", "Action"):
        members = getattr(inner, attribute, None)
        if isinstance(members, type) and issubclass(members, Enum):
            names = {member.value: member.name for member in members}
            if all(number in names for number in numbers):
                return tuple(names[number] for number in numbers)
    if not hasattr(inner, "get_action_meanings"):
        return ()
    meanings = tuple(map(str, cast("Any", inner).get_action_meanings()))
    return meanings if len(meanings) == len(numbers) else ()


def rules_for(env: AnyEnv) -> str:
    """The registered rules and goal of an environment, as it is now; empty if there are none."""
    description, inner = description_for(env), env.unwrapped
    if (
        description is None
        or not same_space(env.action_space, inner.action_space)
        or (description.shows and not same_space(env.observation_space, inner.observation_space))
    ):
        return ""
    rules = description.instructions
    return rules if isinstance(rules, str) else rules(inner)


def same_space(a: AnySpace, b: AnySpace) -> bool:
    """Whether wrappers left a space as it was."""
    return a is b or a == b


def _class_name(one: type) -> str:
    return f"{one.__module__}:{one.__qualname__}"
