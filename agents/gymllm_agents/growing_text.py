"""A conversation that is rendered again and again is encoded from where it differs.

For chat templates that rewrite earlier turns: each render begins nearly as the one before it did. Before a
special token, text is encoded the same whatever comes after; so ids up to the last one in the common part
are kept.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from typing import final

from gymllm_agents.tokenizer import Tokenizer


@final
class GrowingText:
    """Encodes texts that begin alike. Single owner; holds the last one and its ids."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._text = ""
        self._ids = array("i")
        # Of each place to cut at: where its token starts and ends in the text, and its place in the ids.
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._places: list[int] = []

    def encode_rendered(self, text: str, *, fuse: str) -> list[int]:
        """As `Tokenizer.encode_rendered`."""
        common = bisect_right(self._ends, _common_length(self._text, text))
        kept = max(common - 1, 0)  # the last cut is found again in what is encoded anew
        start, place = (self._starts[kept], self._places[kept]) if common else (0, 0)
        new = self._tokenizer.encode_rendered(text[start:], fuse=fuse)
        ids = [*self._ids[:place], *new]
        self._text, self._ids = text, array("i", ids)
        del self._starts[kept:], self._ends[kept:], self._places[kept:]
        self._add_cuts(text, start, new, place)
        return ids

    def _add_cuts(self, text: str, start: int, new: list[int], place: int) -> None:
        cuts = self._tokenizer.cuts
        found = list(self._tokenizer.every_cut.finditer(text, start))
        known = frozenset(cuts.values())
        places = [k for k, token_id in enumerate(new, place) if token_id in known]
        if [cuts[match[0]] for match in found] != [new[k - place] for k in places]:
            return  # not read as we would; then the next text is encoded from an earlier one
        self._starts += [match.start() for match in found]
        self._ends += [match.end() for match in found]
        self._places += places


def _common_length(first: str, second: str) -> int:
    """How many characters two texts have in common at their start."""
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
