"""The cells of a terminal, the cursor in them, and all that a program can do to both.

Time and memory are bounded: nothing here costs more than one pass over the screen.
"""

from __future__ import annotations

import unicodedata
from collections import deque

MOST_COLUMNS, MOST_ROWS = 300, 100
_MOST_COMBINED = 8  # code points in one cell
_MOST_REPLIES_BYTES = 256
# The characters of DEC's line drawing set, from "`" to "~".
_LINES = "◆▒␉␌␍␊°±␤␋┘┐┌└┼⎺⎻─⎼⎽├┤┴┬│≤≥π≠£·"
_DRAWING = {code: ord(_LINES[code - 0x60]) for code in range(0x60, 0x60 + len(_LINES))}


def width_of(char: str) -> int:
    """Cells that a character takes: 0, 1 or 2."""
    if unicodedata.east_asian_width(char) in "WF":
        return 2
    return 0 if unicodedata.category(char) in ("Mn", "Me", "Cf") else 1


class Grid:
    """`rows` x `columns` cells, and the lines that have scrolled off them."""

    def __init__(self, columns: int, rows: int, scrollback: int) -> None:
        """All blank.

        Args:
            columns: 1 to `MOST_COLUMNS`.
            rows: 1 to `MOST_ROWS`.
            scrollback: Lines kept of what scrolls off, >= 0.
        """
        self.columns = min(max(columns, 1), MOST_COLUMNS)
        self.rows = min(max(rows, 1), MOST_ROWS)
        self.scrollback: deque[str] = deque(maxlen=scrollback)
        self._replies = b""
        self.reset()

    def reset(self) -> None:
        """As it was at first, but for what has scrolled off."""
        self._cells = [self._blank() for _ in range(self.rows)]
        self._main: list[list[str]] | None = None  # while the alternate screen is shown
        self.row = self.column = 0
        self.cursor_hidden = False
        self.application_keys = False
        """Arrow keys are to be sent in their other form."""
        self.bracketed_paste = False
        self._wraps, self._wrapped = True, False
        self._inserts = self._origin = False
        self.top, self.bottom = 0, self.rows - 1
        self._drawing = [False, False]
        self._charset = 0
        self._saved = (0, 0)
        self.last = ""  # what a sequence just behind it may repeat
        self._tabs = set(range(0, self.columns, 8))

    def _blank(self) -> list[str]:
        return [" "] * self.columns

    @property
    def lines(self) -> list[str]:
        """The screen, top to bottom, without blanks at the ends of lines."""
        return ["".join(row).rstrip() for row in self._cells]

    def take_replies(self) -> bytes:
        """What the terminal itself answers to the program's questions; to be sent to it."""
        replies, self._replies = self._replies, b""
        return replies

    # Text

    def draw(self, text: str) -> None:
        """Writes text without controls, from the cursor on."""
        if self._drawing[self._charset]:
            text = text.translate(_DRAWING)
        if not text.isascii() or self._inserts:
            for char in text:
                self._draw_one(char)
            return
        while text:
            self._wrap_if_due()
            room = self.columns - self.column
            part, text = text[:room], text[room:]
            row = self._cells[self.row]
            self._split_wide(row, self.column)
            self._split_wide(row, self.column + len(part))
            row[self.column : self.column + len(part)] = part
            self._advance(len(part))
            if text and not self._wraps:
                row[-1], text = text[-1], ""

    def _draw_one(self, char: str) -> None:
        width = width_of(char)
        if width == 0:
            at = self.column if self._wrapped else self.column - 1
            row = self._cells[self.row]
            if at > 0 and row[at] == "":
                at -= 1
            if at >= 0 and len(row[at]) < _MOST_COMBINED:
                row[at] += char
            return
        self._wrap_if_due()
        if width == 2 and self.column + 2 > self.columns:
            if self.columns < 2 or not self._wraps:
                char, width = "?", 1
            else:
                self._wrapped = True
                self._wrap_if_due()
        row = self._cells[self.row]
        self._split_wide(row, self.column)
        if self._inserts:
            row[self.column : self.column] = [" "] * width
            del row[self.columns :]
            self._split_wide(row, self.columns - 1, last=True)
        self._split_wide(row, self.column + width)
        row[self.column] = char
        if width == 2:
            row[self.column + 1] = ""
        self._advance(width)

    def _wrap_if_due(self) -> None:
        if self._wrapped:
            self._wrapped = False
            if self._wraps:
                self.column = 0
                self.line_feed()

    def _advance(self, width: int) -> None:
        self.column += width
        if self.column >= self.columns:
            self.column, self._wrapped = self.columns - 1, True

    def _split_wide(self, row: list[str], at: int, *, last: bool = False) -> None:
        """Half of a wide character is none: both become blanks, when one is written over at `at`."""
        if last:  # the right half was pushed out
            if at >= 0 and row[at] and width_of(row[at][0]) == 2:
                row[at] = " "
        elif 0 < at < self.columns and row[at] == "":
            row[at - 1] = row[at] = " "

    # Movements

    def go(self, row: int, column: int) -> None:
        """Puts the cursor somewhere, as near as there is."""
        low, high = (self.top, self.bottom) if self._origin else (0, self.rows - 1)
        self.row = min(max(row, low), high)
        self.column = min(max(column, 0), self.columns - 1)
        self._wrapped = False

    def vertically(self, by: int) -> None:
        """Stops at the region's edge when it starts within."""
        low = self.top if self.row >= self.top else 0
        high = self.bottom if self.row <= self.bottom else self.rows - 1
        self.row, self._wrapped = min(max(self.row + by, low), high), False

    def line_feed(self) -> None:
        """A line down; at the region's end everything moves up."""
        self._wrapped = False
        if self.row == self.bottom:
            self.scroll(self.top, 1, keeps=True)
        elif self.row < self.rows - 1:
            self.row += 1

    def reverse_line_feed(self) -> None:
        """A line up; at the region's beginning everything moves down."""
        self._wrapped = False
        if self.row == self.top:
            self.scroll(self.top, -1)
        elif self.row > 0:
            self.row -= 1

    def scroll(self, top: int, by: int, *, keeps: bool = False) -> None:
        """Moves the lines from `top` to the region's bottom up, or down where `by` is negative."""
        height = self.bottom - top + 1
        if height <= 0:
            return
        count = min(abs(by), height)
        blank = [self._blank() for _ in range(count)]
        if by > 0:
            gone = self._cells[top : top + count]
            if keeps and top == 0 and self._main is None:
                self.scrollback.extend("".join(row).rstrip() for row in gone)
            self._cells[top : self.bottom + 1] = self._cells[top + count : self.bottom + 1] + blank
        else:
            self._cells[top : self.bottom + 1] = blank + self._cells[top : self.bottom + 1 - count]

    def tab(self, count: int = 1) -> None:
        """To the next tab stop, several times."""
        stops = sorted(at for at in self._tabs if at > self.column)
        self.column = stops[count - 1] if count <= len(stops) else self.columns - 1
        self._wrapped = False

    def back_tab(self, count: int) -> None:
        """To the tab stop before, several times."""
        stops = sorted((at for at in self._tabs if at < self.column), reverse=True)
        self.column = stops[count - 1] if count <= len(stops) else 0
        self._wrapped = False

    def carriage_return(self) -> None:
        """To the line's beginning."""
        self.column, self._wrapped = 0, False

    def backspace(self) -> None:
        """A cell back."""
        self.column, self._wrapped = max(self.column - 1, 0), False

    def next_line(self) -> None:
        """To the beginning of the next line."""
        self.carriage_return()
        self.line_feed()

    def to_line(self, by: int) -> None:
        """Some lines down, or up, to the beginning."""
        self.vertically(by)
        self.carriage_return()

    def save(self) -> None:
        """Keeps the cursor's place."""
        self._saved = (self.row, self.column)

    def restore(self) -> None:
        """Goes back to the place kept."""
        self.row, self.column = self._saved
        self._wrapped = False

    def set_tab(self) -> None:
        """A tab stop here."""
        self._tabs.add(self.column)

    def set_mode(self, number: int, on: bool) -> None:
        """Turns a private mode on or off."""
        if number == 1:
            self.application_keys = on
        elif number == 6:
            self._origin = on
            self.go(self.top if on else 0, 0)
        elif number == 7:
            self._wraps = on
        elif number == 25:
            self.cursor_hidden = not on
        elif number in (47, 1047, 1049):
            self._alternate(on, saves=number == 1049)
        elif number == 1048:
            (self.save if on else self.restore)()
        elif number == 2004:
            self.bracketed_paste = on

    def _alternate(self, on: bool, *, saves: bool) -> None:
        if on == (self._main is not None):
            return
        if on:
            if saves:
                self.save()
            self._main, self._cells = self._cells, [self._blank() for _ in range(self.rows)]
        else:
            assert self._main is not None
            self._cells, self._main = self._main, None
            if saves:
                self.restore()

    def soft_reset(self) -> None:
        """Modes and region as at first; what is shown stays."""
        self.cursor_hidden = self.application_keys = self._inserts = self._origin = False
        self.top, self.bottom, self._wraps = 0, self.rows - 1, True
        self._drawing, self._charset = [False, False], 0

    def erase_in_line(self, how: int) -> None:
        """0: from the cursor on; 1: up to it; 2: all."""
        start = 0 if how in (1, 2) else self.column + self._wrapped
        end = self.columns if how in (0, 2) else self.column + 1
        self.erase(start, end)

    def erase(self, start: int, end: int) -> None:
        """Blanks from one column up to another."""
        row, end = self._cells[self.row], min(end, self.columns)
        self._split_wide(row, start)
        self._split_wide(row, end)
        row[start:end] = [" "] * (end - start)

    def erase_in_display(self, how: int) -> None:
        """0: from the cursor on; 1: up to it; 2: all; 3: what has scrolled off."""
        if how == 3:
            self.scrollback.clear()
            return
        if how in (0, 1):
            self.erase_in_line(how)
        rows = {0: range(self.row + 1, self.rows), 1: range(self.row)}.get(how, range(self.rows))
        for row in rows:
            self._cells[row] = self._blank()

    def insert_lines(self, count: int) -> None:
        """Blank lines here; those below move down."""
        if self.top <= self.row <= self.bottom:
            self.scroll(self.row, -count)
            self.carriage_return()

    def delete_lines(self, count: int) -> None:
        """Lines go from here; those below move up."""
        if self.top <= self.row <= self.bottom:
            self.scroll(self.row, count)
            self.carriage_return()

    def insert_blanks(self, count: int) -> None:
        """Blank cells here; those behind move on."""
        row, count = self._cells[self.row], min(count, self.columns - self.column)
        self._split_wide(row, self.column)
        row[self.column : self.column] = [" "] * count
        del row[self.columns :]
        self._split_wide(row, self.columns - 1, last=True)

    def delete_chars(self, count: int) -> None:
        """Cells go from here; those behind move up."""
        row, count = self._cells[self.row], min(count, self.columns - self.column)
        self._split_wide(row, self.column)
        self._split_wide(row, self.column + count)
        del row[self.column : self.column + count]
        row.extend([" "] * count)

    def set_region(self, numbers: list[int]) -> None:
        """Which lines scroll: the first and the last, from 1."""
        top = max(numbers[0], 1) - 1
        bottom = (numbers[1] if len(numbers) > 1 and numbers[1] else self.rows) - 1
        bottom = min(bottom, self.rows - 1)
        if top < bottom:
            self.top, self.bottom = top, bottom
            self.go(self.top if self._origin else 0, 0)

    def go_to(self, numbers: list[int]) -> None:
        """To a row and a column, from 1."""
        row = max(numbers[0], 1) - 1 + (self.top if self._origin else 0)
        self.go(row, (numbers[1] if len(numbers) > 1 else 1) - 1)

    def report(self, what: int) -> None:
        """Answers a question for the state (5) or the cursor (6)."""
        if what == 5:
            self.reply("\x1b[0n")
        elif what == 6:
            row = self.row - (self.top if self._origin else 0)
            self.reply(f"\x1b[{row + 1};{self.column + 1}R")

    def reply(self, text: str) -> None:
        """Questions by the thousand get no more answers than would be read at once."""
        if len(self._replies) < _MOST_REPLIES_BYTES:
            self._replies += text.encode()

    def repeat(self, count: int) -> None:
        """Writes the character before again."""
        if self.last:
            self.draw(self.last * min(count, self.columns))

    def clear_tabs(self, how: int) -> None:
        """0: the tab stop here; 3: all."""
        if how == 3:
            self._tabs.clear()
        elif how == 0:
            self._tabs.discard(self.column)

    def modes(self, numbers: list[int], on: bool) -> None:
        """Turns modes on or off; only insertion (4) is known."""
        if 4 in numbers:
            self._inserts = on

    def shift(self, charset: int) -> None:
        """Which of the two character sets is written."""
        self._charset = charset

    def charset_or_test(self, kind: str, which: str) -> None:
        """Chooses a character set, or fills the screen with E."""
        if kind in "()":
            self._drawing["()".index(kind)] = which == "0"
        elif kind == "#" and which == "8":
            self._cells = [["E"] * self.columns for _ in range(self.rows)]
