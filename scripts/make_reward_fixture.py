"""Writes the reward models that tests/trainers/rewards read, and what transformers scores with them.

Run it in the environment of make_transformers_fixture.py, and only when a fixture has to change:

    .venv-transformers/bin/python scripts/make_reward_fixture.py

It writes tests/trainers/fixtures/tiny_*_reward/: random checkpoints of `...ForSequenceClassification` with
one label in the hub's layout, and scores.json beside them: conversations, the ids that transformers makes
of them, and the score of each, computed together in one padded batch.
"""

from __future__ import annotations

import json
import shutil

import torch
import transformers
from make_transformers_fixture import CHAT_TEMPLATE, FIXTURES, SHAPE, SMALL, tiny_tokenizer

CONVERSATIONS = [
    [("user", "What is 12 times 34?"), ("assistant", "It is 408.")],
    [
        ("system", "You stand on a frozen lake."),
        ("user", "Go left, right, up or down."),
        ("assistant", "down"),
        ("user", "You fell into a hole, and the dog does not mind."),
        ("assistant", "right"),
    ],
    [("user", "?"), ("assistant", "!")],
]


def models() -> dict[str, transformers.PreTrainedModel]:
    """One of each of two families."""
    t = transformers
    return {
        "tiny_qwen3_reward": t.Qwen3ForSequenceClassification(
            t.Qwen3Config(
                **SHAPE | {"num_hidden_layers": 2},
                rms_norm_eps=1e-6,
                rope_theta=1_000_000.0,
                num_labels=1,
            )
        ),
        "tiny_llama_reward": t.LlamaForSequenceClassification(
            t.LlamaConfig(
                **SMALL,
                rms_norm_eps=1e-5,
                rope_theta=10_000.0,
                tie_word_embeddings=False,
                num_labels=1,
            )
        ),
    }


def main() -> None:
    """Writes both."""
    for name, model in models().items():
        folder = FIXTURES / name
        shutil.rmtree(folder, ignore_errors=True)
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for key, weight in model.named_parameters():
                spread = torch.randn(weight.shape, generator=generator) * 0.2
                weight.copy_(1 + spread if "norm" in key else spread)
        model.eval().save_pretrained(folder)
        tokenizer = transformers.PreTrainedTokenizerFast(
            tokenizer_object=tiny_tokenizer(),
            eos_token="<|im_end|>",
            pad_token="<|endoftext|>",
            chat_template=CHAT_TEMPLATE,
        )
        tokenizer.save_pretrained(folder)
        chats = [
            [{"role": role, "content": content} for role, content in turns]
            for turns in CONVERSATIONS
        ]
        ids = [tokenizer.apply_chat_template(chat, return_dict=False) for chat in chats]
        padded = tokenizer.pad({"input_ids": ids}, return_tensors="pt")
        with torch.no_grad():
            scores = model(**padded).logits[:, 0]
        written = {"conversations": CONVERSATIONS, "ids": ids, "scores": scores.tolist()}
        (folder / "scores.json").write_text(json.dumps(written) + "\n")
        print("wrote", name, scores.tolist())


if __name__ == "__main__":
    main()
