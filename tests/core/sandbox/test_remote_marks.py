"""Marks: found however the stream is cut, and nothing else is taken for one."""

from __future__ import annotations

import random

import pytest

from gymllm.sandbox.output import Kept
from gymllm.sandbox.remote_marks import Marks


@pytest.mark.parametrize("seed", range(20))
def test_marks_are_found_however_the_stream_is_cut(seed: int) -> None:
    rng = random.Random(seed)
    marks = Marks()
    words = [marks.new_word() for _ in range(3)]
    other = Marks().new_word()
    prefix = words[0][:-16]
    noise = [b"", b"x\n", prefix, prefix + b"0" * 16 + b" 3\n", words[0][:-1], b"gymllm", other]
    stream, expected = b"", b""
    for number, word in enumerate(words):
        said = b"".join(rng.choices(noise, k=4)) + b"|"
        expected += said
        stream += said + b"%s %d 7 8\n" % (word, number)
    stream += b"end" + prefix
    kept = Kept(1 << 16)
    found: list[tuple[bytes, bytes]] = []
    while stream:
        size = rng.randrange(1, 12)
        found += marks.take(stream[:size], kept)
        stream = stream[size:]
    marks.flush(kept)
    assert found == [(word, b"%d 7 8" % number) for number, word in enumerate(words)]
    assert bytes(kept.output()) == expected + b"end" + prefix


def test_what_may_become_a_mark_is_held_back_and_no_more() -> None:
    marks, kept = Marks(), Kept(1 << 20)
    word = marks.new_word()
    assert marks.take(b"output" + word[:5], kept) == []
    assert bytes(kept.output()) == b"output"
    assert marks.take(word[5:] + b" 0", kept) == []
    assert marks.take(b"\nmore", kept) == [(word, b"0")]
    assert bytes(kept.output()) == b"outputmore"
    marks.take(word[:-16] + b"y" * 100_000, kept)
    assert len(bytes(kept.output())) > 100_000


def test_words_are_never_the_same_and_the_latest_are_known() -> None:
    marks, kept = Marks(), Kept(1 << 16)
    words = [marks.new_word() for _ in range(200)]
    assert len(set(words)) == 200
    assert marks.take(words[-1] + b" 1\n", kept) == [(words[-1], b"1")]
    assert marks.take(words[-1] + b" 1\n", kept) == [(words[-1], b"1")]  # a late one is no output
    assert marks.take(words[0] + b" 1\n", kept) == []
