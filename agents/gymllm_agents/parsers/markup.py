"""Finds a family's markup in a reply, and walks through the reply from mark to mark.

Everything here moves forward only, so that a reply takes time linear in its length.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeVar, final

from gymllm.message import ToolCall
from gymllm_agents.parsers.said import ParsedReply, Said, UnreadableCall

T = TypeVar("T")

THINK: Mapping[str, str] = {"<think>": "</think>"}
"""The marks of a thought in most families: what opens it, what closes it."""


class Mark(NamedTuple):
    """Markup in a reply: what, and where."""

    text: str
    start: int
    end: int


@final
class Marks:
    """What counts as markup in a family."""

    def __init__(
        self, *marks: str, thoughts: Mapping[str, str] = THINK, label: str = "", core: str = ""
    ) -> None:
        """Takes literal texts.

        Args:
            marks: Those of calls.
            thoughts: Those of thoughts: closing ones by opening ones.
            label: What is written at the start of each thought and is not part of it.
            core: The control token in those marks that hold one and are not themselves one.
        """
        every = {*marks, *thoughts, *thoughts.values()}
        longest_first = sorted(every, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(re.escape, longest_first)))
        self.thoughts, self.label, self._core = thoughts, label, core

    def found_in(self, said: Said) -> list[Mark]:
        """The marks of a reply; those that are spelt out, though there is a token for them, are none."""
        controls, found = frozenset(said.controls), list[Mark]()
        for match in self._pattern.finditer(said.text):
            text, start = match.group(), match.start()
            token = self._core if self._core and self._core in text else text
            if token not in said.vocabulary or start + text.index(token) in controls:
                found.append(Mark(text, start, match.end()))
        return found


@final
class Reader:
    """A place in a reply, and what has been read up to it."""

    def __init__(self, said: Said, marks: Marks) -> None:
        """Starts at the beginning, behind the thought that the prompt opened, if it did."""
        self.text = said.text
        self.position = 0
        self.calls: list[ToolCall | UnreadableCall] = []
        self._kept: list[str] = []
        self._thought: list[str] = []
        self._marks = marks.found_in(said)
        self._next = 0  # the first mark that starts at `position` or behind it
        self._thoughts, self._label = marks.thoughts, marks.label
        if said.in_thought and self._thoughts:
            if self.at(*self._thoughts):  # some models open it once more
                self.until(*self._thoughts)
            self._think(*self._thoughts.values())

    def advance(self, *opens: str) -> str:
        """Goes behind the next of these marks and returns it; "" where there is none up to the end.

        What is before it is kept: as thoughts, or as text.
        """
        while True:
            text, mark = self.until(*opens, *self._thoughts)
            self._kept.append(text)
            if mark not in self._thoughts:
                return mark
            self._think(self._thoughts[mark])

    def until(self, *ends: str, before: tuple[str, ...] = ()) -> tuple[str, str]:
        """Goes behind the next mark of `ends`, or in front of one of `before`, or to the end.

        Returns:
            The text up to there, and the mark of `ends`, else "".
        """
        start = self.position
        while self._next < len(self._marks):
            mark = self._marks[self._next]
            if mark.text in before:
                self.position = mark.start
                return self.text[start : mark.start], ""
            self._next += 1
            if mark.text in ends:
                self.move(mark.end)
                return self.text[start : mark.start], mark.text
        self.position = len(self.text)
        return self.text[start:], ""

    def move(self, position: int) -> None:
        """Goes on to an offset in the text; marks before it are passed over."""
        self.position = position
        while self._next < len(self._marks) and self._marks[self._next].start < position:
            self._next += 1

    def at(self, *marks: str) -> bool:
        """Whether nothing but blanks is in front of one of these marks, the next one."""
        if self._next == len(self._marks):
            return False
        mark = self._marks[self._next]
        return mark.text in marks and not self.text[self.position : mark.start].strip()

    def at_end(self) -> bool:
        """Whether nothing but blanks is left; costs little where a mark is left."""
        return self._next == len(self._marks) and not self.text[self.position :].strip()

    def ahead(self, *stops: str) -> str:
        """The text up to the next of these marks, without going there.

        To stay linear, go as far as that before asking again.
        """
        for index in range(self._next, len(self._marks)):
            if self._marks[index].text in stops:
                return self.text[self.position : self._marks[index].start]
        return self.text[self.position :]

    def enclosed(
        self, read: Callable[[str], tuple[T, int]], close: str, *, before: tuple[str, ...]
    ) -> T:
        """Reads what ends with a closing mark, and goes behind that.

        A closing mark inside of what is read, as in a JSON text, does not end it. One that is missing at the
        end is not missed, for the whole of it has been said.

        Args:
            read: Gets the text up to a mark of `before`; returns what it read, and how far.
            close: The closing mark.
            before: Marks that no such text goes beyond.

        Raises:
            ValueError: It can't be read. The closing mark has been passed, if there is one.
        """
        start = self.position
        try:
            value, length = read(self.ahead(*before))
            self.move(start + length)
        except ValueError as error:
            missing = "" if self.until(close, before=before)[1] else f", and {close} is missing"
            raise ValueError(f"{error}{missing}") from None
        rest, closed = self.until(close, before=before)
        if rest.strip():
            raise ValueError("more follows its end" + ("" if closed else f", {close} is missing"))
        return value

    def field(self, close: str, *, followed_by: tuple[str, ...], before: tuple[str, ...]) -> str:
        """Reads a value as it stands, up to a closing mark, and goes behind that.

        A closing mark that none of `followed_by` follows is part of the value.

        Raises:
            ValueError: It is not closed.
        """
        start = self.position
        while self.until(close, before=before)[1]:
            if self.at(*followed_by) or self.at_end():
                return self.text[start : self.position - len(close)]
        raise ValueError(f"lacks a {close}")

    def keep(self, text: str) -> None:
        """Adds to the reply's text."""
        self._kept.append(text)

    def think(self, text: str) -> None:
        """Adds to the reasoning."""
        self._thought.append(f"{text.strip()}\n".removeprefix(self._label).strip())

    def take_text(self) -> str:
        """What was kept as text so far; it no longer is."""
        text = "".join(self._kept)
        self._kept = []
        return text

    def reply(self) -> ParsedReply:
        """What has been read."""
        reasoning = "\n".join(filter(None, self._thought))
        text = "".join(self._kept).strip()
        return ParsedReply(text=text, reasoning=reasoning, calls=tuple(self.calls))

    def _think(self, *closes: str) -> None:
        self.think(self.until(*closes)[0])
