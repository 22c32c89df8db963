"""What a terminal shows: the sequences programs use, and any others."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gymllm_envs.terminal.emulator import Emulator
from gymllm_envs.terminal.grid import Grid
from gymllm_envs.terminal.keys import KEY_NAMES, key_bytes


def shown(data: str | bytes, columns: int = 10, rows: int = 4) -> Grid:
    emulator = Emulator(columns, rows, scrollback=5)
    emulator.feed(data.encode() if isinstance(data, str) else data)
    return emulator.grid


@pytest.mark.parametrize(
    ("data", "lines"),
    [
        ("one\r\ntwo", ["one", "two", "", ""]),
        ("a" * 12, ["a" * 10, "aa", "", ""]),
        (
            "a" * 10 + "\r\nb",
            ["a" * 10, "b", "", ""],
        ),  # a full line is not wrapped before more comes
        ("a" * 10 + "\x1b[K\r\nb", ["a" * 10, "b", "", ""]),
        ("1\r\n2\r\n3\r\n4\r\n5", ["2", "3", "4", "5"]),
        ("abc\rX", ["Xbc", "", "", ""]),
        ("abc\b\bX", ["aXc", "", "", ""]),
        ("abc\x1b[ZX", ["Xbc", "", "", ""]),
        ("\x1b[9Ia", ["         a", "", "", ""]),
        ("\x1bH\t\x1b[3g\t\x1b[9Za", ["a", "", "", ""]),
        ("a\tb", ["a       b", "", "", ""]),
        ("\x1b[2;3Hx\x1b[Hy", ["y", "  x", "", ""]),
        ("\x1b[31;1mred\x1b[0m", ["red", "", "", ""]),
        ("\x1b]0;title\x07a\x1bPq#1\x1b\\b", ["ab", "", "", ""]),
        ("\x1b]0;never ended", ["", "", "", ""]),
        ("abcdef\x1b[3D\x1b[K", ["abc", "", "", ""]),
        ("abcdef\x1b[3D\x1b[1K", ["    ef", "", "", ""]),
        ("abcdef\x1b[4D\x1b[2P", ["abef", "", "", ""]),
        ("abcdef\x1b[4D\x1b[2@", ["ab  cdef", "", "", ""]),
        ("abcdef\x1b[4D\x1b[2X", ["ab  ef", "", "", ""]),
        ("a\r\nb\r\nc\x1b[2;1H\x1b[L", ["a", "", "b", "c"]),
        ("a\r\nb\r\nc\x1b[1;1H\x1b[M", ["b", "c", "", ""]),
        ("a\r\nb\r\nc\r\nd\x1b[2;3r\x1b[3;1H\nX", ["a", "c", "X", "d"]),
        ("a\r\nb\x1b[H\x1bM", ["", "a", "b", ""]),
        ("old\x1b[?1049h\x1b[Hnew", ["new", "", "", ""]),
        ("old\x1b[?1049h\x1b[Hnew\x1b[?1049l", ["old", "", "", ""]),
        ("\x1b(0lqk\x1b(B q", ["┌─┐ q", "", "", ""]),
        ("ab\x1b[3b", ["abbbb", "", "", ""]),
        ("漢字x\x1b[1;2Hy", [" y字x", "", "", ""]),  # half a wide character is none
        ("123456789漢", ["123456789", "漢", "", ""]),
        ("e\u0301\u0301x", ["e\u0301\u0301x", "", "", ""]),
        ("a\x1b[12\rb", ["b", "", "", ""]),  # a sequence that is broken off
        ("\x1b[?7labcdefghijKLM\x1b[?7h", ["abcdefghiM", "", "", ""]),
        ("x\x1bcy", ["y", "", "", ""]),
        ("\x9b31mx\x00\x7f", ["\ufffd31mx", "", "", ""]),
    ],
)
def test_what_is_shown(data: str, lines: list[str]) -> None:
    raw = data.encode("latin-1") if data.startswith("\x9b") else data
    assert shown(raw).lines == lines


def test_what_has_scrolled_off_is_kept_to_a_bound_and_not_of_the_alternate_screen() -> None:
    numbers = "".join(f"{n}\r\n" for n in range(12))
    assert list(shown(numbers).scrollback) == ["4", "5", "6", "7", "8"]
    assert list(shown("\x1b[?1049h" + numbers).scrollback) == []


def test_questions_are_answered_but_not_by_the_thousand() -> None:
    assert shown("ab\x1b[6n\x1b[5n\x1b[c").take_replies() == b"\x1b[1;3R\x1b[0n\x1b[?6c"
    assert len(shown("\x1b[6n" * 5000).take_replies()) < 300


def test_a_cell_holds_only_so_many_accents() -> None:
    assert len(shown("e" + "\u0301" * 10_000).lines[0]) <= 8


@given(st.lists(st.binary(max_size=40), max_size=8), st.integers(1, 12), st.integers(1, 5))
def test_any_bytes_are_taken_and_where_they_are_cut_makes_no_difference(
    parts: list[bytes], columns: int, rows: int
) -> None:
    whole, cut = Emulator(columns, rows), Emulator(columns, rows)
    whole.feed(b"".join(parts))
    for part in parts:
        cut.feed(part)
    assert whole.grid.lines == cut.grid.lines
    assert len(whole.grid.lines) == rows


SEQUENCES = "ABCDEFGHIJKLMPSTXZ`abcdefghlnrsu@"


@given(
    st.lists(
        st.one_of(
            st.text(alphabet="ab漢e\u0301\n\r\t\b\x0e\x0f", max_size=6),
            st.builds(
                "\x1b[{}{}{}".format,
                st.sampled_from(["", "?", ">"]),
                st.sampled_from(["", "0", "1", "2;3", "4", "6", "7", "99999", "1049", ";;", "²"]),
                st.sampled_from(SEQUENCES),
            ),
            st.sampled_from(
                ["\x1bM", "\x1bD", "\x1bE", "\x1bc", "\x1b7", "\x1b8", "\x1b(0", "\x1b#8"]
            ),
        ),
        max_size=30,
    ),
    st.integers(1, 7),
    st.integers(1, 4),
)
def test_the_screen_keeps_its_size_and_the_cursor_stays_on_it(
    parts: list[str], columns: int, rows: int
) -> None:
    emulator = Emulator(columns, rows)
    emulator.feed("".join(parts).encode())
    grid = emulator.grid
    assert len(grid.lines) == rows
    assert all(len(line.replace("\u0301", "")) <= columns for line in grid.lines)
    assert 0 <= grid.row < rows
    assert 0 <= grid.column < columns


@pytest.mark.parametrize(
    "unit",
    ["\x1b[2J", "\x1b[9999L", "\x1b[99I\x1b[99Z", "x\x1b[9999b", "\x1b", "\x1b]", "\x1b#8", "1;"],
)
def test_no_flood_takes_long(unit: str) -> None:
    emulator = Emulator(80, 24)
    began = time.process_time()
    emulator.feed((unit * (8192 // len(unit))).encode())
    assert time.process_time() - began < 1.0


@pytest.mark.parametrize(
    ("key", "sent"),
    [
        ("Enter", b"\r"),
        ("C-c", b"\x03"),
        ("^d", b"\x04"),
        ("C-[", b"\x1b"),
        ("C-Space", b"\0"),
        ("M-x", b"\x1bx"),
        ("C-M-a", b"\x1b\x01"),
        ("Up", b"\x1b[A"),
        ("S-Up", b"\x1b[1;2A"),
        ("C-Left", b"\x1b[1;5D"),
        ("PageDown", b"\x1b[6~"),
        ("F1", b"\x1bOP"),
        ("S-F5", b"\x1b[15;2~"),
        ("S-Tab", b"\x1b[Z"),
        ("BSpace", b"\x7f"),
        ("ls -l", b"ls -l"),
        ("C-", b"C-"),
        ("C-ü", "C-ü".encode()),
        ("echo C-c", b"echo C-c"),
        ("a\nb", b"a\rb"),
        ("süß", "süß".encode()),
        ("\ud800", b"?"),
    ],
)
def test_what_a_key_sends(key: str, sent: bytes) -> None:
    assert key_bytes(key) == sent


def test_arrows_have_another_form_where_the_program_asks_for_it() -> None:
    assert key_bytes("Up", application_keys=shown("\x1b[?1h").application_keys) == b"\x1bOA"
    assert all(key_bytes(name) != name.encode() for name in KEY_NAMES)
