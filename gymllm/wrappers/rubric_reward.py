"""`RubricReward`: rewards an environment's episodes by a rubric."""

from __future__ import annotations

from math import isfinite
from typing import Any, SupportsFloat, TypeVar

import gymnasium
from gymnasium.error import ResetNeeded
from gymnasium.utils import RecordConstructorArgs

from gymllm.bridge import HomeLoop, finish
from gymllm.errors import ConfigError
from gymllm.spaces import TextOrMessage
from gymllm.wrappers.rubric import ENVIRONMENT, Episode, Move, Rubric

Obs = TypeVar("Obs", bound=TextOrMessage)
Act = TypeVar("Act", bound=TextOrMessage)


class RubricReward(gymnasium.Wrapper[Obs, Act, Obs, Act], RecordConstructorArgs):
    """Adds a rubric's rewards to the environment's own.

    A step's reward is `env_weight` times the environment's plus each of the rubric's that is due, by its
    weight; `info["rewards"]` holds them apart and not weighted, the environment's as "environment". Async
    reward functions are awaited on the loop that the environment runs on, so in the pool they block
    nothing. What a reward function raises leaves the step: a reward that can't be told is never 0.
    """

    def __init__(
        self, env: gymnasium.Env[Obs, Act], rubric: Rubric, *, env_weight: float = 1.0
    ) -> None:
        """Wraps `env`.

        Args:
            env: What is rewarded.
            rubric: By what.
            env_weight: Weight of the environment's own reward; 0 leaves it out.

        Raises:
            ConfigError: `rubric` is a list of rewards, not a `Rubric`; or the weight is not finite.
        """
        # Not copied: a judge's engine can't be.
        RecordConstructorArgs.__init__(
            self, _disable_deepcopy=True, rubric=rubric, env_weight=env_weight
        )
        super().__init__(env)
        if not isinstance(rubric, Rubric):  # pyright: ignore[reportUnnecessaryIsInstance]  # users may not check types
            raise ConfigError(f"rubric must be Rubric([Reward(...), ...]), got {rubric!r}.")
        if not isfinite(env_weight):
            raise ConfigError(f"env_weight must be a finite number, got {env_weight}.")
        self._rubric, self._env_weight = rubric, float(env_weight)
        self._home = HomeLoop()
        self._moves: list[Move] = []
        self._shown: TextOrMessage | None = None

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Obs, dict[str, Any]]:
        observation, info = self.env.reset(seed=seed, options=options)
        self._moves, self._shown = [], observation
        return observation, info

    def step(self, action: Act) -> tuple[Obs, SupportsFloat, bool, bool, dict[str, Any]]:
        if self._shown is None:
            raise ResetNeeded("RubricReward has no episode: call reset() first.")
        observation, env_reward, terminated, truncated, info = self.env.step(action)
        own = float(env_reward)
        self._moves.append(
            Move(
                observation=self._shown,
                action=action,
                next_observation=observation,
                reward=own,
                info=info,
            )
        )
        self._shown = observation
        episode = Episode(moves=self._moves, terminated=terminated, truncated=truncated)
        scoring = self._rubric.score(episode)
        scores = self._home.run(scoring) if self._rubric.waits else finish(scoring)
        reward = self._env_weight * own + self._rubric.total(scores)
        info = {**info, "rewards": {ENVIRONMENT: own, **scores}}
        return observation, reward, terminated, truncated, info
