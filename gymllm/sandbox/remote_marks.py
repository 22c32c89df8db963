"""Marks: how the end of a command is told apart from all that it, or a job in its background, may print.

A mark is a line that begins with a random word, in the stream of the output itself, so that it comes after
the output that was written before it. Each word is used once: who has seen one can't know the next.
"""

from __future__ import annotations

import secrets
from typing import Protocol

_RANDOM_BYTES = 16
_LONGEST = 1 << 16
_WORDS_KEPT = 64


def number(text: bytes) -> int | None:
    """What came with a mark, if it is a number: commands that have spied out a word may write anything."""
    return int(text) if text.isdigit() and len(text) < 10 else None


class Sink(Protocol):
    """Where output goes: a `Kept`, or a file."""

    def add(self, data: bytes) -> None: ...


class Marks:
    """Takes the marks out of a stream that comes in pieces."""

    def __init__(self) -> None:
        self._prefix = b"gymllm-" + secrets.token_hex(4).encode()
        """Of all words of this stream, so that one search finds each."""
        self._words: dict[bytes, None] = {}
        self._held = b""

    def new_word(self) -> bytes:
        word = self._prefix + secrets.token_hex(_RANDOM_BYTES // 2).encode()
        self.expect(word)
        return word

    def expect(self, word: bytes) -> None:
        """A word of another stream's `Marks`, also looked for here."""
        self._prefix = word[:-_RANDOM_BYTES]
        self._words[word] = None
        if len(self._words) > _WORDS_KEPT:
            del self._words[next(iter(self._words))]

    def take(self, data: bytes, sink: Sink) -> list[tuple[bytes, bytes]]:
        """Gives the sink what is no mark, but for an end that may become one; words and what came with them.

        A word stays expected, so that one that comes late is no output either.
        """
        data = self._held + data if self._held else data
        found: list[tuple[bytes, bytes]] = []
        done = 0  # up to here it is dealt with
        start = data.find(self._prefix)
        while start >= 0:
            end = data.find(b"\n", start)
            if end < 0 and len(data) - start < _LONGEST:
                break
            word, _, text = data[start : max(end, start)].partition(b" ")
            if word in self._words:
                sink.add(data[done:start])
                found.append((word, text))
                done = end + 1
                start = data.find(self._prefix, done)
            else:
                start = data.find(self._prefix, start + 1)
        if start < 0:
            start = len(data) - self._may_begin(data[done:])
        sink.add(data[done:start])
        self._held = data[start:]
        return found

    def flush(self, sink: Sink) -> None:
        """No more comes: what was held back was output."""
        sink.add(self._held)
        self._held = b""

    def _may_begin(self, data: bytes) -> int:
        """How many bytes at the end could be the beginning of a word."""
        for length in range(len(self._prefix) - 1, 0, -1):
            if data.endswith(self._prefix[:length]):
                return length
        return 0
