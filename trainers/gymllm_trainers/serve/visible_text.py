"""Text of tokens as they come, as far as it may be shown."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import final

from gymllm_agents import Tokenizer
from gymllm_trainers.engine.stops import TextStream


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
        self._characters = TextStream(tokenizer, skip_special=skip_special)
        self._stops = tuple(stops)
        self._held = ""

    def push(self, ids: Iterable[int]) -> str:
        """What may be shown more."""
        text = self._held + "".join(map(self._characters.push, ids))
        keep = max((overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def end(self, matched: int | str | None) -> str:
        """The rest, given what the engine says has ended it."""
        text = self._held + self._characters.finish()
        self._held = ""
        if isinstance(matched, str) and matched in self._stops:
            return text.partition(matched)[0]
        return text


def whole_text(
    tokenizer: Tokenizer,
    ids: Sequence[int],
    *,
    matched: int | str | None,
    stops: Sequence[str],
    skip_special: bool,
) -> str:
    """What `VisibleText` comes to, of all ids at once."""
    text = tokenizer.decode(ids, skip_special=skip_special)
    return text.partition(matched)[0] if isinstance(matched, str) and matched in stops else text


def overlap(text: str, stop: str) -> int:
    """Characters at the end of `text` that belong to a stop string, or may be its beginning."""
    whole = text.find(stop)
    if whole >= 0:  # the engine is about to say so
        return len(text) - whole
    most = min(len(text), len(stop) - 1)
    return next((n for n in range(most, 0, -1) if text.endswith(stop[:n])), 0)
