"""`Rubric`: weighted reward functions over an episode.

A reward function is given the episode so far and answers with a number; it may be `async`, as a `Judge`
is. `RubricReward` applies a rubric to an environment.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import cast

import numpy as np

from gymllm.errors import ConfigError, EnvTypeError
from gymllm.spaces import TextOrMessage

ENVIRONMENT = "environment"
"""The environment's own reward, among a rubric's."""


@dataclass(frozen=True, kw_only=True)
class Move:
    """One step: what was shown, what was done, and what came of it."""

    observation: TextOrMessage
    action: TextOrMessage
    next_observation: TextOrMessage
    reward: float
    """The environment's own."""
    info: Mapping[str, object]


@dataclass(frozen=True, kw_only=True)
class Episode:
    """An episode up to its last move."""

    moves: Sequence[Move]
    """At least one. Not to be changed or kept: it grows with the episode."""
    terminated: bool
    truncated: bool

    @property
    def last(self) -> Move:
        """The move that is being rewarded."""
        return self.moves[-1]

    @property
    def ended(self) -> bool:
        """Whether no move follows."""
        return self.terminated or self.truncated


RewardFunction = Callable[[Episode], float | Awaitable[float]]


class Reward:
    """One line of a rubric: a function, its weight and its name."""

    def __init__(
        self,
        function: RewardFunction,
        *,
        weight: float = 1.0,
        name: str = "",
        every_step: bool = False,
    ) -> None:
        """Checks and keeps them.

        Args:
            function: Episode to reward, a finite number; an async function may wait. It is called at the
                episode's end. What it raises leaves the environment's step.
            weight: What its value is multiplied by.
            name: What it is called in `info["rewards"]`; by default what the function, or its class, is.
            every_step: Call it after each step instead, the last one included.

        Raises:
            ConfigError: The function is none or has no name of its own, or the weight is not finite.
        """
        if not callable(function):
            raise ConfigError(f"a reward function must be a function, got {function!r}.")
        if not isfinite(weight):
            raise ConfigError(f"weight must be a finite number, got {weight}.")
        self.name = name or getattr(function, "__name__", type(function).__name__)
        if self.name in ("<lambda>", ENVIRONMENT):
            raise ConfigError(
                f"a reward function needs a name other than {self.name!r}; give it name=..."
            )
        self.function, self.weight, self.every_step = function, float(weight), every_step
        call = getattr(type(function), "__call__", None)  # noqa: B004  # the method, not whether it is there
        self.waits = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)

    async def score(self, episode: Episode) -> float:
        """The function's value, not weighted.

        Raises:
            ConfigError: It answered with an awaitable although it is no async function.
            EnvTypeError: It answered with no finite number.
        """
        value = self.function(episode)
        if inspect.isawaitable(value):
            if not self.waits:
                if inspect.iscoroutine(value):
                    value.close()
                raise ConfigError(
                    f"reward {self.name!r} answered with an awaitable; write it as an `async def`."
                )
            value = await value
        if not _is_number(value):
            raise EnvTypeError(f"reward {self.name!r} must be a finite number, got {value!r}.")
        return float(value)


def _is_number(value: object) -> bool:
    if not isinstance(value, int | float | np.integer | np.floating | np.bool):
        return False
    try:
        return isfinite(cast("float", value))
    except OverflowError:  # an int that no float holds
        return False


class Rubric:
    """Reward functions that are added up by their weights."""

    def __init__(self, rewards: Sequence[Reward]) -> None:
        """Keeps the rewards.

        Raises:
            ConfigError: There are none, or two have the same name.
        """
        names = [reward.name for reward in rewards]
        if not names or len(set(names)) < len(names):
            raise ConfigError(f"a rubric needs rewards with names of their own, got {names}.")
        self.rewards = tuple(rewards)

    @property
    def waits(self) -> bool:
        """Whether a reward function is async."""
        return any(reward.waits for reward in self.rewards)

    async def score(self, episode: Episode) -> dict[str, float]:
        """Each reward that is due now, by name and not weighted; one function after the other."""
        return {
            reward.name: await reward.score(episode)
            for reward in self.rewards
            if reward.every_step or episode.ended
        }

    def total(self, scores: Mapping[str, float]) -> float:
        """The weighted sum of what `score` gave."""
        return sum(r.weight * scores[r.name] for r in self.rewards if r.name in scores)
