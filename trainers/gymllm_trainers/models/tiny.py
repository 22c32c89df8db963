"""gymllm's own tiny model: Qwen3's architecture at a few million parameters."""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

from gymllm_trainers.models.config import DecoderConfig
from gymllm_trainers.models.decoder import Decoder


def tiny_config(vocab_size: int, *, max_position_embeddings: int = 2048) -> DecoderConfig:
    """The tiny model's shape; about 2.1 million parameters beside the embedding."""
    return DecoderConfig(
        vocab_size=vocab_size,
        hidden_size=256,
        intermediate_size=640,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=max_position_embeddings,
        # Its texts are short: a small base lets most of a head tell neighbouring tokens apart, and the
        # warm start learns to look at the right word in a third of the episodes that 10,000 takes.
        rope_theta=500.0,
        rms_norm_eps=1e-6,
        tie_word_embeddings=True,
        qk_norm=True,
    )


def random_decoder(
    config: DecoderConfig,
    *,
    seed: int,
    dtype: DTypeLike = jnp.float32,
    compute_dtype: DTypeLike = jnp.float32,
) -> Decoder:
    """A decoder with random weights, a function of `seed` alone.

    Truncated normal of spread 0.02; the projections that write to the residual stream are scaled
    down by sqrt(2 L), as GPT-2 does (`Decoder` says which).
    """
    return Decoder(
        config,
        rngs=nnx.Rngs(seed),
        dtype=jnp.dtype(dtype),
        compute_dtype=jnp.dtype(compute_dtype),
    )
