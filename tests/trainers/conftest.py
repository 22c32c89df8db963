"""What the trainer's tests share: a decoder small enough to compile in a moment."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import jax
import jax.monitoring
import pytest
from flax import nnx

from gymllm_trainers.models import Decoder, DecoderConfig, random_decoder

SMALL = DecoderConfig(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=128,
    qk_norm=True,
)


@pytest.fixture(scope="session")
def make_decoder() -> Callable[..., Decoder]:
    """Makes a random decoder from a seed, with weights so large that its logits differ by much."""

    def make(seed: int, **changes: int) -> Decoder:
        graph, state = nnx.split(random_decoder(replace(SMALL, **changes), seed=seed))
        return nnx.merge(graph, jax.tree.map(lambda leaf: leaf * 4 if leaf.std() else leaf, state))

    return make


@pytest.fixture
def compilations() -> Iterator[list[str]]:
    """Grows by one with each program that XLA compiles, or takes from its cache, during the test."""
    seen: list[str] = []

    def listen(event: str, duration_s: float, **_: object) -> None:
        if event == "/jax/core/compile/backend_compile_duration":
            seen.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    yield seen
    jax.monitoring.unregister_event_duration_listener(listen)
