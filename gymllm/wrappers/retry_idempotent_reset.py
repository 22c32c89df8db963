"""`RetryIdempotentReset`: tries a reset that raised again."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, TypeVar

import gymnasium
from gymnasium.utils import RecordConstructorArgs

from gymllm.errors import ConfigError

Obs = TypeVar("Obs")
Act = TypeVar("Act")


class RetryIdempotentReset(gymnasium.Wrapper[Obs, Act, Obs, Act], RecordConstructorArgs):
    """Resets again, with the same seed and options, where a reset raised one of some exceptions.

    Wrapping is your statement that the reset is *idempotent*: that one that was broken off leaves nothing
    behind which makes the next one differ, cost twice or fail (half a container, a used-up licence). Steps
    are never tried again, because nobody knows what a broken one has done. It does not pause between
    tries; `info["reset_tries"]` says how many it took.
    """

    def __init__(
        self,
        env: gymnasium.Env[Obs, Act],
        *,
        retry_on: type[Exception] | Iterable[type[Exception]],
        tries: int = 3,
    ) -> None:
        """Wraps `env`.

        Args:
            env: What is reset.
            retry_on: Exceptions, with their subclasses, after which a new try makes sense
                (`ConnectionError`). Every other leaves at once; so does cancellation, always.
            tries: Resets in all, >= 1; the last one's exception is raised.

        Raises:
            ConfigError: `retry_on` lists no exceptions, or `tries` < 1.
        """
        listed = (retry_on,) if isinstance(retry_on, type) else tuple(retry_on)
        RecordConstructorArgs.__init__(self, retry_on=listed, tries=tries)
        super().__init__(env)
        if tries < 1:
            raise ConfigError(f"tries must be >= 1, got {tries}.")
        if not listed or not all(_is_exception(item) for item in listed):
            raise ConfigError(
                f"retry_on must list subclasses of Exception such as ConnectionError, got {retry_on!r}."
            )
        self._retry_on, self._tries = listed, tries

    def reset(
        self, *, seed: int | None = None, options: dict[str, Any] | None = None
    ) -> tuple[Obs, dict[str, Any]]:
        for number in range(1, self._tries):
            try:
                return self._reset(seed, options, number)
            except self._retry_on:
                continue
        try:
            return self._reset(seed, options, self._tries)
        except self._retry_on as error:
            error.add_note(f"reset raised at the last of {self._tries} tries.")
            raise

    def _reset(
        self, seed: int | None, options: dict[str, Any] | None, number: int
    ) -> tuple[Obs, dict[str, Any]]:
        # A copy for each try: an environment may take its options apart.
        given = None if options is None else dict(options)
        observation, info = self.env.reset(seed=seed, options=given)
        return observation, {**info, "reset_tries": number}


def _is_exception(item: object) -> bool:
    return isinstance(item, type) and issubclass(item, Exception)
