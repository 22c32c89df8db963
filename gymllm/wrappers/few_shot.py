"""`FewShot`: worked examples before an episode's first observation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar, cast

import gymnasium
from gymnasium.utils import RecordConstructorArgs

from gymllm.errors import ConfigError
from gymllm.spaces import TextOrMessage
from gymllm.wrappers.prefix import TURN, check_turn, prefixed, widened, write_turns

Obs = TypeVar("Obs", bound=TextOrMessage)
Act = TypeVar("Act", bound=TextOrMessage)


class FewShot(gymnasium.Wrapper[Obs, Act, Obs, Act], RecordConstructorArgs):
    """Puts worked examples before the first observation of each episode; later ones stay as they are."""

    def __init__(
        self,
        env: gymnasium.Env[Obs, Act],
        examples: Sequence[tuple[str, str]],
        *,
        before: str = "Worked examples:\n\n",
        turn: str = TURN,
        after: str = "Now it is your turn.\n\n",
    ) -> None:
        """Wraps `env`.

        Args:
            env: What is played.
            examples: Observations and the actions that answer them well, in the order they are shown.
            before: Text above the examples.
            turn: How one is written; `{observation}` and `{action}` stand for its two.
            after: Text between the examples and the observation.

        Raises:
            ConfigError: No examples, or ones that aren't pairs of texts; a `turn` that can't be filled in;
                an environment that isn't played in texts or messages.
        """
        RecordConstructorArgs.__init__(
            self, examples=examples, before=before, turn=turn, after=after
        )
        super().__init__(env)
        for example in examples:
            if not _is_pair(example):
                raise ConfigError(
                    f"an example must be an observation and an action, got {example!r}."
                )
        if not examples:
            raise ConfigError("FewShot needs at least one example, got none.")
        self._prefix = before + write_turns(check_turn(turn), examples) + after
        self.observation_space = widened(env.observation_space, len(self._prefix), "FewShot")

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Obs, dict[str, Any]]:
        observation, info = self.env.reset(seed=seed, options=options)
        return prefixed(self._prefix, observation), info


def _is_pair(example: object) -> bool:
    # A list too, for that is what a pair becomes in JSON.
    return isinstance(example, tuple | list) and [
        isinstance(text, str) for text in cast("Sequence[object]", example)
    ] == [True, True]
