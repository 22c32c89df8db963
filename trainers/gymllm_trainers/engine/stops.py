"""The text of a growing list of tokens: pieces for a stream, and stop strings as they come up.

A token is not a piece of text: characters span tokens, and what one token means may depend on its
neighbours (byte tokens, a blank that only the first loses). So the text is that of a short window of tokens
with the piece before as its context, and is told when nothing that follows can change it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import final

from gymllm_agents.tokenizer import Tokenizer

_UNKNOWN = "\ufffd"  # what stands for bytes that are no character, or not yet one
_LONG = 8  # tokens kept back before a place to cut among them is looked for


@final
class TextStream:
    """Decodes tokens as they come. Single owner; the cost of a token doesn't grow with the text."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special: bool = False) -> None:
        """Starts with no text.

        Args:
            tokenizer: Decodes.
            skip_special: As for `Tokenizer.decode`.
        """
        self._tokenizer, self._skip_special = tokenizer, skip_special
        ids = [tokenizer.token_to_id(f"<0x{byte:02X}>") for byte in range(256)]
        # Of vocabularies with a token for each byte: a run of those is read as a whole, and all other tokens
        # are whole characters. Others spell bytes in all tokens.
        self._byte_ids = frozenset(ids if None not in ids else ())
        self._in_run = False
        self._context: list[int] = []
        self._context_text = ""
        self._pending: list[int] = []
        self.pending_text = ""
        """Text of the tokens that are kept back, as it would be if no more came."""

    def push(self, token_id: int) -> str:
        """Adds a token.

        Returns:
            The text that is certain now; empty while a character or a run of byte tokens is not complete. All
            pieces and `finish()`'s together are `Tokenizer.decode` of all ids.
        """
        self._pending.append(token_id)
        self.pending_text = self._text_of(self._pending)
        if self._byte_ids:
            self._in_run = token_id in self._byte_ids or (
                self._in_run and not self._decode([token_id])
            )
            return "" if self._in_run else self._tell(len(self._pending))
        if not self.pending_text.endswith(_UNKNOWN):
            return self._tell(len(self._pending))
        if len(self._pending) < _LONG:
            return ""
        # Bytes that never make a character must not pile up. Where the two sides of a cut read as the whole
        # does, no character spans it.
        for cut in range(len(self._pending) - 1, 0, -1):
            left, right = self._pending[:cut], self._pending[cut:]
            if self._text_of(left) + self._decode(right) == self.pending_text:
                return self._tell(cut)
        return ""

    def finish(self) -> str:
        """The rest of the text; U+FFFD for a character that was never completed."""
        return self._tell(len(self._pending))

    def _tell(self, count: int) -> str:
        """Ends the first `count` of the pending tokens; they are the context of those that follow."""
        if not count:
            return ""
        told, self._pending = self._pending[:count], self._pending[count:]
        text = self._text_of(told)
        if text:  # what has none, such as a token that is left out, is no context
            self._context, self._context_text = told, self._decode(told)
        self.pending_text = self._text_of(self._pending) if self._pending else ""
        return text

    def _text_of(self, ids: list[int]) -> str:
        text = self._decode(self._context + ids)
        return text[len(self._context_text) :]

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special=self._skip_special)


@final
class StopStrings:
    """Finds the first stop string in the text of a generation. Single owner.

    Control tokens are text here, as in SGLang: `<|im_end|>` is found whether it came as its token or spelt
    out. The prompt is not searched.
    """

    def __init__(self, tokenizer: Tokenizer, stops: Sequence[str]) -> None:
        """Starts with no text.

        Args:
            tokenizer: Decodes.
            stops: None of them empty.
        """
        self._stream = TextStream(tokenizer)
        self._stops = tuple(stops)
        self._reach = max(map(len, self._stops), default=1) - 1
        self._tail = ""

    def push(self, token_id: int) -> str | None:
        """Adds a token; the search is over once one was found.

        Returns:
            The stop string that the text now contains; of several, the one that ends first, and of those the
            longest. It is found with the token that completes it, even if that begins another character.
        """
        text = self._tail + self._stream.push(token_id)
        seen = text + self._stream.pending_text.rstrip(_UNKNOWN)
        ends = [
            (seen.find(stop) + len(stop), -len(stop), stop) for stop in self._stops if stop in seen
        ]
        self._tail = text[-self._reach :] if self._reach else ""
        return min(ends)[2] if ends else None
