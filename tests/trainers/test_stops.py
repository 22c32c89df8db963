"""Text and stop strings of tokens that come one after another, against what the whole decodes to."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models

from gymllm_agents import Tokenizer, train_tokenizer
from gymllm_trainers.engine.stops import StopStrings, TextStream

TEXTS = ["Grüße an die Welt 🌍!", "日本語のテキスト 👩‍👩‍👧", "go left, go right", "a € b £ c ¥"]


@functools.cache
def byte_level() -> Tokenizer:
    return train_tokenizer(TEXTS, vocab_size=400)


@functools.cache
def byte_fallback(*, strips: bool) -> Tokenizer:
    """As Gemma's (a token for each byte, ▁ for a blank); as Llama 2's, if the first blank is stripped."""
    pieces = ["<eos>", "<unk>", *(f"<0x{byte:02X}>" for byte in range(256))]
    pieces += ["▁", "a", "b", "▁go", "▁left", "▁€", "\ufffd", ",", "▁▁"]
    model = models.BPE(
        {piece: i for i, piece in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True
    )
    backend = tokenizers.Tokenizer(model)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strips else steps)
    backend.add_special_tokens(["<eos>"])
    return Tokenizer(backend, chat_template=None, eos_token="<eos>")


def tokenizers_of_all_kinds() -> list[Tokenizer]:
    return [byte_level(), byte_fallback(strips=False), byte_fallback(strips=True)]


@pytest.mark.parametrize("kind", range(3))
@pytest.mark.parametrize("skip_special", [False, True])
def test_pieces_together_are_the_text_of_all_ids(kind: int, skip_special: bool) -> None:
    tokenizer = tokenizers_of_all_kinds()[kind]
    rng = np.random.default_rng(kind)
    real = [i for text in TEXTS for i in tokenizer.encode(text, allow_special=False)]
    for round in range(60):
        ids = rng.integers(0, tokenizer.vocab_size, 40).tolist()
        if round % 2:
            ids = [*real, *ids, *real]
        stream = TextStream(tokenizer, skip_special=skip_special)
        pieces = [stream.push(i) for i in ids]
        whole = tokenizer.decode(ids, skip_special=skip_special)
        assert "".join(pieces) + stream.pending_text == whole
        assert "".join(pieces) + stream.finish() == whole
        assert stream.finish() == ""


@pytest.mark.parametrize("kind", range(3))
def test_every_piece_is_of_whole_characters(kind: int) -> None:
    tokenizer = tokenizers_of_all_kinds()[kind]
    for text in TEXTS:
        stream = TextStream(tokenizer)
        pieces = [stream.push(i) for i in tokenizer.encode(text, allow_special=False)]
        assert "\ufffd" not in "".join(pieces)
        assert "".join(pieces) + stream.finish() == text.removeprefix("▁")


def test_pieces_come_as_soon_as_they_are_certain() -> None:
    tokenizer = byte_level()
    stream = TextStream(tokenizer)
    ids = tokenizer.encode("go ", allow_special=False)
    assert "".join(stream.push(i) for i in ids) == "go "
    parts = tokenizer.encode("🚀", allow_special=False)
    assert len(parts) > 2
    assert [stream.push(i) for i in parts] == [""] * (len(parts) - 1) + ["🚀"]


def test_bytes_that_are_no_text_do_not_pile_up() -> None:
    tokenizer = byte_level()
    stray = tokenizer.encode("🚀", allow_special=False)[0]
    stream = TextStream(tokenizer)
    pieces = [stream.push(stray) for _ in range(100)]
    assert sum(map(len, pieces)) > 85
    assert "".join(pieces) + stream.finish() == "\ufffd" * 100


def find(tokenizer: Tokenizer, ids: Sequence[int], stops: Sequence[str]) -> tuple[int, str] | None:
    search = StopStrings(tokenizer, stops)
    for place, token_id in enumerate(ids):
        if found := search.push(token_id):
            return place, found
    return None


@pytest.mark.parametrize("kind", range(3))
def test_stop_strings_are_found_with_the_token_that_completes_them(kind: int) -> None:
    tokenizer = tokenizers_of_all_kinds()[kind]
    rng = np.random.default_rng(kind)
    found = 0
    for text in TEXTS * 20:
        ids = tokenizer.encode(text + text, allow_special=False)
        whole = tokenizer.decode(ids, skip_special=False)
        stops = []
        for _ in range(3):
            start = int(rng.integers(len(whole)))
            stops.append(whole[start : start + int(rng.integers(1, 12))])
        texts = [tokenizer.decode(ids[: n + 1], skip_special=False) for n in range(len(ids))]
        expected = next((n for n, t in enumerate(texts) if any(s in t for s in stops)), None)
        place, stop = find(tokenizer, ids, stops) or (None, None)
        assert place == expected
        assert stop in stops
        found += 1
    assert found == 80


def test_a_stop_string_that_is_not_there_is_not_found() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("go left, go right" * 5, allow_special=False)
    assert find(tokenizer, ids, ["right go", "gogo", "\ufffd"]) is None
    assert find(tokenizer, ids, []) is None


def test_of_several_the_first_to_end_is_told_and_then_the_longest() -> None:
    tokenizer = byte_level()
    ids = tokenizer.encode("go left, go right", allow_special=False)
    text = tokenizer.decode(ids, skip_special=False)
    assert find(tokenizer, ids, ["right", "left, go", "left,", "t,"])[1] == "left,"
    assert text.startswith("go left,")


def test_control_tokens_are_text() -> None:
    tokenizer = byte_level()
    control = tokenizer.token_to_id("<|im_end|>")
    plain = tokenizer.encode("<|im_end|>", allow_special=False)
    assert control is not None
    assert control not in plain
    assert find(tokenizer, [*plain[:-1], control], ["<|im_end|>"]) == (len(plain) - 1, "<|im_end|>")
    assert find(tokenizer, plain, ["<|im_end|>"]) == (len(plain) - 1, "<|im_end|>")
    go = tokenizer.encode("go", allow_special=False)
    assert find(tokenizer, [*go, control, *go], ["o<|im_end|>g"]) is not None


def test_a_match_does_not_wait_for_a_character_begun_by_the_same_token() -> None:
    vocabulary = {
        "x": 0,
        "aâ": 1,
        "Ĥ": 2,
        "¬": 3,
        "<eos>": 4,
    }  # in GPT-2's letters for bytes: a E2, 82, AC
    backend = tokenizers.Tokenizer(models.BPE(vocabulary, []))
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<eos>"])
    tokenizer = Tokenizer(backend, chat_template=None, eos_token="<eos>")
    assert tokenizer.decode([0, 1, 2, 3], skip_special=False) == "xa€"
    assert find(tokenizer, [0, 1, 2, 3], ["xa"]) == (1, "xa")
    assert find(tokenizer, [0, 1, 2, 3], ["a€"]) == (3, "a€")


def test_a_long_text_costs_no_more_a_token(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = byte_level()
    lengths: list[int] = []
    decode = Tokenizer.decode

    def counted(self: Tokenizer, ids: Sequence[int], *, skip_special: bool) -> str:
        lengths.append(len(ids))
        return decode(self, ids, skip_special=skip_special)

    monkeypatch.setattr(Tokenizer, "decode", counted)
    ids = tokenizer.encode(" ".join(TEXTS * 60), allow_special=False)
    assert find(tokenizer, ids, ["nowhere"]) is None
    assert len(ids) > 1000
    assert max(lengths) < 20
