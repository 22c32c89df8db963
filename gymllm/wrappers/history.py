"""`History`: the last turns before each observation, for agents that see one observation only."""

from __future__ import annotations

from collections import deque
from typing import Any, SupportsFloat, TypeVar

import gymnasium
from gymnasium.error import ResetNeeded
from gymnasium.utils import RecordConstructorArgs

from gymllm.errors import ConfigError
from gymllm.spaces import TextOrMessage, text_of
from gymllm.wrappers.prefix import TURN, check_turn, longest, prefixed, widened, write_turns

Obs = TypeVar("Obs", bound=TextOrMessage)
Act = TypeVar("Act", bound=TextOrMessage)


class History(gymnasium.Wrapper[Obs, Act, Obs, Act], RecordConstructorArgs):
    """Puts the episode's last turns before each observation.

    A turn is what the environment showed, without its own history, and the action that followed. Of
    messages only the texts are repeated, not the images.
    """

    def __init__(
        self,
        env: gymnasium.Env[Obs, Act],
        *,
        turns: int,
        before: str = "So far:\n\n",
        turn: str = TURN,
        after: str = "Now: ",
    ) -> None:
        """Wraps `env`.

        Args:
            env: What is played.
            turns: How many, >= 1.
            before: Text above the turns; there is none where there are no turns yet.
            turn: How one is written; `{observation}` and `{action}` stand for its two.
            after: Text between the turns and the observation.

        Raises:
            ConfigError: `turns` < 1; a `turn` that can't be filled in; an environment that isn't played in
                texts or messages.
        """
        RecordConstructorArgs.__init__(self, turns=turns, before=before, turn=turn, after=after)
        super().__init__(env)
        if turns < 1:
            raise ConfigError(f"turns must be >= 1, got {turns}.")
        self._before, self._turn, self._after = before, check_turn(turn), after
        self._turns = deque[tuple[str, str]](maxlen=turns)
        self._shown: str | None = None
        a_turn = longest(env.observation_space, "History") + longest(env.action_space, "History")
        # The template may repeat its fields; no more often than it has braces.
        most = turns * (len(turn) + turn.count("{") * a_turn) + len(before) + len(after)
        self.observation_space = widened(env.observation_space, most, "History")

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Obs, dict[str, Any]]:
        observation, info = self.env.reset(seed=seed, options=options)
        self._turns.clear()
        self._shown = text_of(observation)
        return observation, info

    def step(self, action: Act) -> tuple[Obs, SupportsFloat, bool, bool, dict[str, Any]]:
        if self._shown is None:
            raise ResetNeeded("History has no episode: call reset() first.")
        observation, reward, terminated, truncated, info = self.env.step(action)
        self._turns.append((self._shown, text_of(action)))
        self._shown = text_of(observation)
        written = self._before + write_turns(self._turn, self._turns) + self._after
        return prefixed(written, observation), reward, terminated, truncated, info
