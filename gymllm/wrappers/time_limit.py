"""`TimeLimit`: truncates an episode by turns, tokens or wall clock, and says by which."""

from __future__ import annotations

import time
from collections.abc import Callable
from numbers import Integral, Real
from typing import Any, SupportsFloat, TypeVar

import gymnasium
from gymnasium.error import ResetNeeded
from gymnasium.utils import RecordConstructorArgs

from gymllm.errors import ConfigError, ConfigTypeError
from gymllm.spaces import TextOrMessage, text_of

Obs = TypeVar("Obs", bound=TextOrMessage)
Act = TypeVar("Act", bound=TextOrMessage)


class TimeLimit(gymnasium.Wrapper[Obs, Act, Obs, Act], RecordConstructorArgs):
    """Truncates the episode at the first step that reaches a limit.

    `info["truncated_by"]` is then "turns", "tokens" or "wall_clock"; where one step reaches several, the
    first in this order. An episode that ends by itself at that step keeps its own ending. Limits are looked
    at after each step: one that is under way is never interrupted (the pool's `step_timeout_s` does that),
    and a first observation that alone is over `max_tokens` ends the episode after its first step. A step
    after the limit raises `gymnasium.error.ResetNeeded`.
    """

    def __init__(
        self,
        env: gymnasium.Env[Obs, Act],
        *,
        max_turns: int | None = None,
        max_tokens: int | None = None,
        wall_clock_s: float | None = None,
        count_tokens: Callable[[str], int] | None = None,
        clock: Callable[[], float] | None = None,
    ) -> None:
        """Wraps `env`.

        Args:
            env: What is limited.
            max_turns: Steps of an episode.
            max_tokens: Tokens of an episode's texts together, observations and actions; those that a chat
                template adds around them are not among them.
            wall_clock_s: Seconds since the reset returned, the agent's time included.
            count_tokens: How many tokens a text has, for instance
                `lambda text: len(tokenizer.encode(text))`. Needed with `max_tokens`, for there is no
                estimate that holds for every tokenizer.
            clock: Seconds that only grow; `time.monotonic` by default.

        Raises:
            ConfigError: No limit, one that is no positive number, or tokens without a way to count them.
        """
        RecordConstructorArgs.__init__(
            self,
            max_turns=max_turns,
            max_tokens=max_tokens,
            wall_clock_s=wall_clock_s,
            count_tokens=count_tokens,
            clock=clock,
        )
        super().__init__(env)
        limits = {"max_turns": max_turns, "max_tokens": max_tokens, "wall_clock_s": wall_clock_s}
        if all(limit is None for limit in limits.values()):
            raise ConfigError(f"TimeLimit needs at least one of {', '.join(limits)}.")
        for name, limit in limits.items():
            known = Real if name == "wall_clock_s" else Integral
            if limit is not None and (isinstance(limit, bool) or not isinstance(limit, known)):  # pyright: ignore[reportUnnecessaryIsInstance]  users' code
                what = "seconds" if name == "wall_clock_s" else "a whole number"
                raise ConfigTypeError(f"{name} must be {what} > 0 or None, got {limit!r}.")
            if limit is not None and not limit > 0:
                raise ConfigError(f"{name} must be > 0 or None, got {limit}.")
        if (max_tokens is None) != (count_tokens is None):
            raise ConfigError(
                "max_tokens and count_tokens go together: give both, for instance "
                "count_tokens=lambda text: len(tokenizer.encode(text)), or neither."
            )
        self._max_turns, self._max_tokens, self._wall_clock_s = max_turns, max_tokens, wall_clock_s
        self._count_tokens = count_tokens
        self._clock = clock or time.monotonic
        self._turns, self._tokens, self._started_s = 0, 0, 0.0
        self._over = ""

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Obs, dict[str, Any]]:
        observation, info = self.env.reset(seed=seed, options=options)
        self._turns, self._tokens, self._over = 0, self._count(observation), ""
        self._started_s = self._clock()
        return observation, info

    def step(self, action: Act) -> tuple[Obs, SupportsFloat, bool, bool, dict[str, Any]]:
        if self._over:
            raise ResetNeeded(f"The episode was truncated by {self._over}; call reset() first.")
        observation, reward, terminated, truncated, info = self.env.step(action)
        self._turns += 1
        self._tokens += self._count(action) + self._count(observation)
        reached = self._reached()
        if reached and not (terminated or truncated):
            truncated, self._over = True, reached
            info = {**info, "truncated_by": reached}
        return observation, reward, terminated, truncated, info

    def _count(self, text: TextOrMessage) -> int:
        return self._count_tokens(text_of(text)) if self._count_tokens is not None else 0

    def _reached(self) -> str:
        if self._max_turns is not None and self._turns >= self._max_turns:
            return "turns"
        if self._max_tokens is not None and self._tokens >= self._max_tokens:
            return "tokens"
        if self._wall_clock_s is not None:
            return "wall_clock" if self._clock() - self._started_s >= self._wall_clock_s else ""
        return ""
