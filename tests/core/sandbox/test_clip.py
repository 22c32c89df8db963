"""Output of commands, made fit to be shown."""

from __future__ import annotations

import random

import pytest

from gymllm.sandbox.clip import clean, clip


@pytest.fixture(autouse=True)
def _needs_bwrap() -> None:
    """Nothing is run here."""


@pytest.mark.parametrize(
    ("data", "shown"),
    [
        (b"plain\ttext\n", "plain\ttext\n"),
        ("é \U0001f469\u200d\U0001f4bb".encode(), "é \U0001f469\u200d\U0001f4bb"),
        (b"\x1b[1;31mred\x1b[0m \x1b[38;5;196mred\x1b[m", "red red"),
        (b"\x1b[?25l\x1b[2J\x1b[H\x1b(B\x1b=\x1bcx\x1b\\", "x"),
        (b"\x1b]0;a title\x07x", "x"),
        (b"\x1b]8;;http://a\x1b\\link\x1b]8;;\x1b\\", "link"),
        (b"\x1bPq#0;2;0;0;0\x1b\\x\x1b_app\x1b\\\x1b^pm\x1b\\\x1bXsos\x1b\\", "x"),
        ("\x9b31mred\x9b0m\x9d0;title\x9cx".encode(), "redx"),
        # What no terminal can have read whole is shown, not swallowed.
        (b"\x1b]0;no end\nnext\x07", "\\x1b]0;no end\nnext\\x07"),
        (b"cut \x1b[3", "cut \\x1b[3"),
        (b"\x1b\x1b[0m[31m", "\\x1b[31m"),
        (b"a\x00b\x07c\x08d\x7f\x0c", "a\\x00b\\x07c\\x08d\\x7f\\x0c"),
        (b"bad \xff\xc3 utf-8", "bad \ufffd\ufffd utf-8"),
        ("a\u202eb\u2066c\u2028d\U000e0041".encode(), "a\\u202eb\\u2066c\\u2028d\\U000e0041"),
        (b"dos\r\nline\r\n", "dos\nline\n"),
        (b" 10%\r 50%\r100%\r\ndone\n", "100%\ndone\n"),
        (b"long text\rshort\n", "shorttext\n"),
        (b"long text\rshort\x1b[K\n", "short\n"),
        (b"long text\x1b[2K\rshort\n", "short\n"),
        (b"long text\r\x1b[0Kshort\r", "short"),
        (b"\x1b[31mlong\x1b[0m text\rLONG\r", "LONG text"),
        (b"\r\r\r", ""),
        (b"", ""),
    ],
)
def test_output_is_shown_as_a_terminal_would(data: bytes, shown: str) -> None:
    assert clean(data) == shown


def test_nothing_that_controls_a_terminal_is_left() -> None:
    rng = random.Random(0)
    parts = [
        b"\x1b",
        b"[",
        b"]",
        b"P",
        b"0;",
        b"m",
        b"K",
        b"\x07",
        b"\\",
        b"\r",
        b"\n",
        b"a",
        b"\xc2\x9b",
    ]
    for _ in range(5000):
        data = b"".join(rng.choices(parts, k=rng.randrange(15)))
        shown = clean(data)
        assert all(char.isprintable() or char in "\n\t" for char in shown), data
        assert shown.count("\n") == data.count(b"\n")


@pytest.mark.parametrize(
    "piece",
    [b"\x1b]", b"\x1b[", b"\x1bP0", b"\r", b"ab\r", b"\x1b[K\r", b"\x1b]0;a\n", b"\xff", b"\x1b "],
)
def test_time_is_in_proportion(piece: bytes) -> None:
    clean(b"x" * 100_000 + piece * (200_000 // len(piece)))


def test_a_long_text_keeps_both_ends() -> None:
    text = "".join(chr(97 + i % 26) for i in range(1000))
    shown = clip(text, 90)
    assert shown == f"{text[:60]}\n[... 910 characters left out ...]\n{text[-30:]}"
    assert clip(text, 1000) is text
