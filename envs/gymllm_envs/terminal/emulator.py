"""What a terminal shows of a program's output: text cells, a cursor, lines that have scrolled off.

An xterm without colours, for a reader of text. Our own rather than PyPI's `pyte` (0.8.2, LGPL, last released
in 2023): that one raises on many malformed sequences, takes twelve seconds for 60 KB of combining accents and
knows no alternate screen, and tmux would have to be in every image. Here all input is taken, and time and
memory are bounded by its length: no sequence costs more than one pass over the screen.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable

from gymllm_envs.terminal.grid import Grid

_LONGEST_SEQUENCE = 128
_LARGEST_NUMBER = 9999

_TOKEN = re.compile(
    r"([^\x00-\x1f\x7f-\x9f]+)"  # 1 text
    r"|\x1b\[([0-?]*)([ -/]*)([@-~])"  # 2-4 a control sequence
    r"|\x1b([\]PX^_])"  # 5 a string begins
    r"|\x1b([()*+#%])(.)"  # 6-7 character sets and such
    r"|\x1b([0-OQ-WYZ\\`-~=>])"  # 8 other escapes
    # 9 a control; a sequence that one breaks off; an escape that is none
    r"|(\x1b\[[0-?]*[ -/]*(?=[\x00-\x1f\x7f-\x9f])|[\x00-\x1f\x7f-\x9f])",
    re.DOTALL,
)
_UNFINISHED = re.compile(r"\x1b(?:\[[0-?]*[ -/]*|[()*+#%])?\Z")
_STRING_END = re.compile(r"\x07|\x1b\\?|[\x18\x1a]")


class Emulator:
    """Takes a program's output and keeps the screen that it makes."""

    def __init__(self, columns: int = 80, rows: int = 24, *, scrollback: int = 1000) -> None:
        """A blank screen.

        Args:
            columns: 1 to `MOST_COLUMNS`.
            rows: 1 to `MOST_ROWS`.
            scrollback: Lines kept of what scrolls off, >= 0.
        """
        self.grid = Grid(columns, rows, scrollback)
        """What is shown; see there for what can be asked."""
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._pending = ""
        self._in_string = False

    def feed(self, data: bytes) -> None:
        """Takes what the program writes, cut anywhere."""
        text = self._pending + self._decoder.decode(data)
        self._pending = ""
        position = 0
        while position < len(text):
            if self._in_string:
                end = _STRING_END.search(text, position)
                if end is None:
                    return
                if end[0] == "\x1b" and end.end() == len(text):
                    self._pending = "\x1b"
                    return
                # An escape that ends no string begins what comes next.
                position = end.start() if end[0] == "\x1b" else end.end()
                self._in_string = False
                continue
            if text[position] == "\x1b":
                unfinished = _UNFINISHED.match(text, position)
                if unfinished is not None:
                    self._pending = text[position:][:_LONGEST_SEQUENCE]
                    return
            match = _TOKEN.match(text, position)
            assert match is not None  # the last alternative takes any character
            position = match.end()
            self._take(match)

    def _take(self, match: re.Match[str]) -> None:
        kind = match.lastindex
        if kind == 1:
            self.grid.draw(match[1])
            self.grid.last = match[1][-1]
            return
        if kind == 4:
            self._sequence(match[2], match[3], match[4])
        elif kind == 5:
            self._in_string = True
        elif kind == 7:
            self.grid.charset_or_test(match[6], match[7])
        elif kind == 8:
            if act := _ESCAPES.get(match[8]):
                act(self.grid)
        elif act := _CONTROLS.get(match[9]):
            act(self.grid)
        self.grid.last = ""

    def _sequence(self, parameters: str, between: str, final: str) -> None:
        mark = parameters[:1] if parameters[:1] in "<=>?" else ""
        numbers = [
            min(int(part), _LARGEST_NUMBER) if part.isascii() and part.isdigit() else 0
            for part in parameters[len(mark) :][:_LONGEST_SEQUENCE].split(";")
        ]
        if between == "!" and final == "p":
            self.grid.soft_reset()
        elif between:
            return
        elif mark == "?" and final in "hl":
            for number in numbers:
                self.grid.set_mode(number, final == "h")
        elif (not mark or (mark == "?" and final in "JK")) and (act := _SEQUENCES.get(final)):
            act(self.grid, numbers)


def _count(numbers: list[int]) -> int:
    return max(numbers[0], 1)


_CONTROLS: dict[str, Callable[[Grid], None]] = {
    "\b": Grid.backspace,
    "\t": Grid.tab,
    "\n": Grid.line_feed,
    "\v": Grid.line_feed,
    "\f": Grid.line_feed,
    "\r": Grid.carriage_return,
    "\x0e": lambda grid: grid.shift(1),
    "\x0f": lambda grid: grid.shift(0),
}
_ESCAPES: dict[str, Callable[[Grid], None]] = {
    "7": Grid.save,
    "8": Grid.restore,
    "D": Grid.line_feed,
    "E": Grid.next_line,
    "H": Grid.set_tab,
    "M": Grid.reverse_line_feed,
    "c": Grid.reset,
}
_SEQUENCES: dict[str, Callable[[Grid, list[int]], None]] = {
    "@": lambda grid, numbers: grid.insert_blanks(_count(numbers)),
    "A": lambda grid, numbers: grid.vertically(-_count(numbers)),
    "B": lambda grid, numbers: grid.vertically(_count(numbers)),
    "C": lambda grid, numbers: grid.go(grid.row, grid.column + _count(numbers)),
    "D": lambda grid, numbers: grid.go(grid.row, grid.column - _count(numbers)),
    "E": lambda grid, numbers: grid.to_line(_count(numbers)),
    "F": lambda grid, numbers: grid.to_line(-_count(numbers)),
    "G": lambda grid, numbers: grid.go(grid.row, _count(numbers) - 1),
    "H": Grid.go_to,
    "I": lambda grid, numbers: grid.tab(_count(numbers)),
    "J": lambda grid, numbers: grid.erase_in_display(numbers[0]),
    "K": lambda grid, numbers: grid.erase_in_line(numbers[0]),
    "L": lambda grid, numbers: grid.insert_lines(_count(numbers)),
    "M": lambda grid, numbers: grid.delete_lines(_count(numbers)),
    "P": lambda grid, numbers: grid.delete_chars(_count(numbers)),
    "S": lambda grid, numbers: grid.scroll(grid.top, _count(numbers)),
    "T": lambda grid, numbers: grid.scroll(grid.top, -_count(numbers)),
    "X": lambda grid, numbers: grid.erase(grid.column, grid.column + _count(numbers)),
    "Z": lambda grid, numbers: grid.back_tab(_count(numbers)),
    "`": lambda grid, numbers: grid.go(grid.row, _count(numbers) - 1),
    "a": lambda grid, numbers: grid.go(grid.row, grid.column + _count(numbers)),
    "b": lambda grid, numbers: grid.repeat(_count(numbers)),
    "c": lambda grid, numbers: grid.reply("\x1b[?6c"),
    "d": lambda grid, numbers: grid.go_to([_count(numbers), grid.column + 1]),
    "e": lambda grid, numbers: grid.vertically(_count(numbers)),
    "f": Grid.go_to,
    "g": lambda grid, numbers: grid.clear_tabs(numbers[0]),
    "h": lambda grid, numbers: grid.modes(numbers, True),
    "l": lambda grid, numbers: grid.modes(numbers, False),
    "n": lambda grid, numbers: grid.report(numbers[0]),
    "r": Grid.set_region,
    "s": lambda grid, numbers: grid.save(),
    "u": lambda grid, numbers: grid.restore(),
}
