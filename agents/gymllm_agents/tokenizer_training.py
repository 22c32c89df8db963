"""A small byte-level BPE tokenizer, trained on the spot for gymllm's own tiny models."""

from __future__ import annotations

from collections.abc import Iterable

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from gymllm.errors import ConfigError
from gymllm_agents.chatml import CHATML_TEMPLATE, END_OF_TEXT, IM_END, IM_START
from gymllm_agents.tokenizer import Tokenizer

SPECIAL_TOKENS = (END_OF_TEXT, IM_START, IM_END)
SMALLEST_VOCAB = 256 + len(SPECIAL_TOKENS)


def train_tokenizer(texts: Iterable[str], *, vocab_size: int = 512) -> Tokenizer:
    """Trains a byte-level BPE with ChatML's control tokens and chat template.

    Any text can be encoded and decodes to itself. Digits stand alone, so numbers of equal length
    have equally many tokens. Deterministic: the same texts give the same tokenizer.

    Args:
        texts: What to learn merges from, such as rendered episodes.
        vocab_size: Most entries, >= 259 (256 bytes, 3 control tokens); fewer come out if the texts
            have no more pairs to merge.

    Returns:
        A tokenizer whose ids 0, 1 and 2 are `<|endoftext|>`, `<|im_start|>` and `<|im_end|>`.

    Raises:
        ConfigError: vocab_size < 259.
    """
    if vocab_size < SMALLEST_VOCAB:
        raise ConfigError(
            f"vocab_size must be >= {SMALLEST_VOCAB} (256 bytes and {len(SPECIAL_TOKENS)} control "
            f"tokens), got {vocab_size}."
        )
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(texts, trainer)
    return Tokenizer(
        backend,
        chat_template=CHATML_TEMPLATE,
        eos_token=IM_END,
        pad_token=END_OF_TEXT,
        stop_tokens=(END_OF_TEXT,),
    )
