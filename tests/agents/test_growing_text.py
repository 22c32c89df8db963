"""What is encoded from where a text differs is what all of it would be."""

from __future__ import annotations

import random

import pytest
from families import FAMILIES, load_family

from gymllm.message import Message
from gymllm_agents import ChatFormat
from gymllm_agents.growing_text import GrowingText

TEXTS = ("", "go left", " \n\n ", "a\n", "éß中文🎉", "<think>", "<|im_end|>", "<|eot_id|>x", "</s>")


def said(role: str, text: str) -> Message:
    return Message(role=role, content=text)


@pytest.mark.parametrize("name", FAMILIES)
def test_each_render_is_encoded_as_a_whole(name) -> None:
    """Conversations that grow, are cut off, and start anew, with thoughts that later renders drop."""
    tokenizer = load_family(name)
    chat = ChatFormat(tokenizer, report=False)
    draw = random.Random(0)
    encoder = GrowingText(tokenizer)
    messages = [said("user", "hello")]
    for _ in range(25):
        assert chat.whole_ids(messages, encoder=encoder) == chat.whole_ids(messages)
        texts = ["".join(draw.choices(TEXTS, k=3)) for _ in range(2)]
        thought = draw.choice(["", "<think>\nhm\n</think>\n\n"])
        messages += [said("assistant", thought + texts[0]), said("user", texts[1])]
        if draw.random() < 0.2:
            del messages[draw.randrange(0, len(messages) // 2) * 2 + 1 :]


@pytest.mark.parametrize("name", ["qwen3", "llama3.2", "mistral-nemo", "gemma3", "gpt-oss"])
def test_only_what_differs_is_encoded(name, monkeypatch) -> None:
    tokenizer = load_family(name)
    encoder = GrowingText(tokenizer)
    stop = "".join(sorted(tokenizer.cuts)[:1])
    assert stop
    encoder.encode_rendered(f"{stop}{'word ' * 1000}{stop}one", fuse="\ufdd0")
    encoded: list[str] = []
    encode = type(tokenizer).encode_rendered

    def counted(self, text: str, *, fuse: str) -> list[int]:
        encoded.append(text)
        return encode(self, text, fuse=fuse)

    monkeypatch.setattr(type(tokenizer), "encode_rendered", counted)
    text = f"{stop}{'word ' * 1000}{stop}two"
    ids = encoder.encode_rendered(text, fuse="\ufdd0")
    assert encoded == [f"{stop}two"]
    assert ids == encode(tokenizer, text, fuse="\ufdd0")
