"""Long texts cut where it can be seen."""

from __future__ import annotations

import unicodedata

_JOINER = "\u200d"
_LONGEST_CLUSTER = 32  # no sane emoji is longer; a text of nothing but accents must still be cut
_LONGEST_FLAGS = 10_000


def clip(text: str, max_chars: int) -> str:
    """Keeps `max_chars` characters of a longer text, its head and its tail, and says what was left out.

    No accented letter and no emoji is split. The note between both ends comes on top.
    """
    if len(text) <= max_chars:
        return text
    tail_length = max_chars // 3
    head = text[: _boundary(text, max_chars - tail_length)]
    tail = text[_boundary(text, len(text) - tail_length, forward=True) :]
    left_out = len(text) - len(head) - len(tail)
    mark = f"[... {left_out} characters left out ...]"
    return "\n".join([head, mark, tail] if tail else [head, mark])


def _boundary(text: str, at: int, *, forward: bool = False) -> int:
    """The nearest place before (or after) `at` that splits no accented letter and no emoji."""
    step = 1 if forward else -1
    for place in range(at, at + step * _LONGEST_CLUSTER, step):
        if not 0 < place < len(text) or not _joined(text, place):
            return min(max(place, 0), len(text))
    return at


def _joined(text: str, at: int) -> bool:
    """Whether the characters on both sides of `at` are seen as one."""
    before, after = text[at - 1], text[at]
    if before == _JOINER or after == _JOINER or unicodedata.category(after) in ("Mn", "Me", "Mc"):
        return True
    if "\U0001f3fb" <= after <= "\U0001f3ff" or "\U000e0020" <= after <= "\U000e007f":
        return True  # a skin tone; a flag's tag
    if before == "\r" and after == "\n":
        return True
    if not (_regional(before) and _regional(after)):
        return False
    start = at
    while start > 0 and at - start < _LONGEST_FLAGS and _regional(text[start - 1]):
        start -= 1
    return (at - start) % 2 == 1  # flags are pairs


def _regional(character: str) -> bool:
    return "\U0001f1e6" <= character <= "\U0001f1ff"
