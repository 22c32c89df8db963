"""A text file as an editor works on it: lines with one kind of end, changes that leave all others alone."""

from __future__ import annotations

import bisect
import difflib
import heapq
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import final

MOST_PLACES = 50
"""Found of a text."""
_LINE_NUMBERS = re.compile(r"^[ \t]*[0-9]+\t", re.MULTILINE)
_SEARCHED_LINES = 3000
_SEARCHED_CHARS = 200
_LIKE = 0.6


@final
@dataclass(frozen=True)
class TextFile:
    r"""A file's text. All places are those in `text`, where every line ends in `\n`.

    A file is of `\r\n` lines if most of its lines are; what is put in gets the same ends. Lines that aren't
    touched keep theirs, whatever they are.
    """

    raw: str
    """As the file has it."""
    text: str = field(init=False)
    _crlf_at: list[int] = field(init=False, repr=False)
    """Where in `text` each line feed is that has a carriage return before it in `raw`."""

    def __post_init__(self) -> None:
        ends = [match.start() for match in re.finditer("\r\n", self.raw)]
        object.__setattr__(self, "_crlf_at", [at - k for k, at in enumerate(ends)])
        object.__setattr__(self, "text", self.raw.replace("\r\n", "\n"))

    @property
    def lines(self) -> list[str]:
        """Without their ends; an end after the last makes no further line."""
        lines = self.text.split("\n")
        return lines[:-1] if not lines[-1] else lines

    def line_of(self, place: int) -> int:
        """The number of the line, from 1, that a place is in."""
        return self.text.count("\n", 0, place) + 1

    def replaced(self, start: int, end: int, new: str) -> TextFile:
        """The file with something else between two places."""
        if 2 * len(self._crlf_at) > self.text.count("\n"):
            new = new.replace("\r\n", "\n").replace("\n", "\r\n")
        raw = self.raw
        return TextFile(f"{raw[: self._in_raw(start)]}{new}{raw[self._in_raw(end) :]}")

    def places(self, wanted: str) -> list[int]:
        """Where a text begins, overlaps included; the first `MOST_PLACES` of them."""
        found: list[int] = []
        at = self.text.find(wanted)
        while at >= 0 and len(found) < MOST_PLACES:
            found.append(at)
            at = self.text.find(wanted, at + 1)
        return found

    def why_not_there(self, wanted: str) -> str:
        """Of a text that isn't in the file: what it may have been meant to be, in sentences."""
        bare = _LINE_NUMBERS.sub("", wanted)
        if bare != wanted and bare in self.text:
            return "It is there without the line numbers: leave them and their tabs out."
        lines, asked = self.lines, wanted.strip("\n").split("\n")
        stripped = [line.split() for line in asked]
        words = [line.split() for line in lines[:_SEARCHED_LINES]]
        alike: list[str] = []
        for first in range(len(words) - len(stripped) + 1):
            if words[first] == stripped[0] and words[first : first + len(stripped)] == stripped:
                last = first + len(stripped)
                alike.append(str(first + 1) if last == first + 1 else f"{first + 1} to {last}")
        if alike:
            line = "line" if len(stripped) == 1 else "lines"
            return f"But for blanks it is at {line} {_listed(alike)}: copy the blanks exactly."
        return self._nearest(max(asked, key=lambda line: len(line.strip())))

    def _nearest(self, wanted: str) -> str:
        """Lines like one that isn't there."""
        shorter: dict[str, int] = {}
        for number, line in enumerate(self.lines[:_SEARCHED_LINES], 1):
            shorter.setdefault(line.strip()[:_SEARCHED_CHARS], number)
        shorter.pop("", None)
        near = _closest(wanted.strip()[:_SEARCHED_CHARS], list(shorter))
        if not near:
            return "No line is like it; view the file."
        shown = "\n".join(f"{shorter[line]:6}\t{line}" for line in near)
        return f"The most similar lines, without the blanks around them:\n{shown}"

    def _in_raw(self, place: int) -> int:
        return place + bisect.bisect_left(self._crlf_at, place)


def _closest(wanted: str, lines: list[str]) -> list[str]:
    """The likeliest by their letters, compared; `get_close_matches` takes seconds for a large file."""
    matcher = difflib.SequenceMatcher(a="", b=wanted, autojunk=False)

    def likeness(line: str, measure: Callable[[], float]) -> float:
        matcher.set_seq1(line)
        return measure() if matcher.real_quick_ratio() >= _LIKE else 0.0

    likely = heapq.nlargest(20, lines, key=lambda line: likeness(line, matcher.quick_ratio))
    ranked = [(likeness(line, matcher.ratio), line) for line in likely]
    return [line for ratio, line in heapq.nlargest(3, ranked) if ratio >= _LIKE]


def _listed(items: list[str]) -> str:
    return ", ".join(items[:8]) + (", ..." if len(items) > 8 else "")
