"""Text of tokens as they come, as far as it may be shown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import final

from gymllm_agents import Tokenizer

_UNFINISHED = "\ufffd"
_LONGEST_CHARACTER = 4
"""Bytes of UTF-8, and so tokens that one may take."""


@final
class Characters:
    """Whole characters of a stream of ids; all that it gives is `decode` of all ids."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special
        self._before: list[int] = []
        """Ids that have been given last; how the next ones read may depend on them."""
        self._held: list[int] = []

    def push(self, ids: Iterable[int]) -> str:
        """What these add to the text."""
        given = ""
        for token in ids:
            self._held.append(token)
            given += self._take(len(self._held) >= 2 * _LONGEST_CHARACTER)
        return given

    def end(self) -> str:
        """What was held back, for no character comes of it any more."""
        return self._take(True) if self._held else ""

    def _take(self, unfinished: bool) -> str:
        before = self._decode(self._before)
        text = self._decode(self._before + self._held)[len(before) :]
        if text.endswith(_UNFINISHED) and not unfinished:
            return ""
        if text:
            self._before = self._held
        else:
            self._before += self._held
        self._held = []
        return text

    def _decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, skip_special=self._skip) if ids else ""


@final
class VisibleText:
    """Text without its stop string, nor anything that may turn out to be the start of one."""

    def __init__(self, tokenizer: Tokenizer, *, stops: Sequence[str], skip_special: bool) -> None:
        """Takes what may end the text.

        Args:
            tokenizer: Decodes.
            stops: Strings that end it; none are cut off where they are to be kept.
            skip_special: Leave out special tokens.
        """
        self._characters = Characters(tokenizer, skip_special=skip_special)
        self._stops = tuple(stops)
        self._held = ""

    def push(self, ids: Iterable[int]) -> str:
        """What may be shown more."""
        text = self._held + self._characters.push(ids)
        keep = max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def end(self, matched: int | str | None) -> str:
        """The rest, given what the engine says has ended it."""
        text = self._held + self._characters.end()
        self._held = ""
        if isinstance(matched, str) and matched in self._stops:
            return text.partition(matched)[0]
        return text


def _overlap(text: str, stop: str) -> int:
    """Characters at the end of `text` that belong to a stop string, or may be its beginning."""
    whole = text.rfind(stop)
    if whole >= 0:  # the engine is about to say so
        return len(text) - whole
    most = min(len(text), len(stop) - 1)
    return next((n for n in range(most, 0, -1) if text.endswith(stop[:n])), 0)
