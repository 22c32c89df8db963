"""Text as it may be shown: whole characters, nothing of a stop string; and how a reply is read."""

from __future__ import annotations

import numpy as np
import pytest

from gymllm_agents import Tokenizer
from gymllm_trainers.serve.chat_form import MarkedText
from gymllm_trainers.serve.visible_text import VisibleText

TEXT = "the answer is 12 — naïve 日本語 👩‍👩‍👧 ok"


@pytest.mark.parametrize("seed", range(5))
def test_random_bytes_add_up_to_what_decode_says(tokenizer: Tokenizer, seed: int) -> None:
    ids = np.random.default_rng(seed).integers(tokenizer.vocab_size, size=300).tolist()
    for skip in (True, False):
        visible = VisibleText(tokenizer, stops=(), skip_special=skip)
        text = "".join(visible.push([token]) for token in ids) + visible.end(None)
        assert text == tokenizer.decode(ids, skip_special=skip)
    marked = MarkedText(tokenizer)
    for token in ids:
        marked.push([token])
    marked.end()
    assert (marked.text, tuple(marked.controls)) == tokenizer.decode_marked(ids)


@pytest.mark.parametrize("stop", ["12", "wer is 1", "naïve 日", "never there"])
def test_nothing_of_a_stop_string_is_shown(tokenizer: Tokenizer, stop: str) -> None:
    visible = VisibleText(tokenizer, stops=("zzz", stop), skip_special=True)
    expected, found, _ = TEXT.partition(stop)
    shown = ""
    for token in tokenizer.encode(TEXT, allow_special=False):
        shown += visible.push([token])
        assert expected.startswith(shown)
    assert shown + visible.end(stop if found else None) == expected


def test_what_only_begins_like_a_stop_string_is_shown_at_the_end(tokenizer: Tokenizer) -> None:
    visible = VisibleText(tokenizer, stops=("answer!",), skip_special=True)
    ids = tokenizer.encode("the answer", allow_special=False)
    assert visible.push(ids) == "the "
    assert visible.end(None) == "answer"
