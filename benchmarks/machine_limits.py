"""What the machine itself can do: how fast memory is read, how fast matrices are multiplied."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from gymllm_trainers.models import DecoderConfig


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The machine's own rates."""

    bytes_a_s: float
    """Of reading memory."""
    operations_a_s: dict[str, float]
    """Of matrix products, by the type of their factors; a multiplication and an addition are two."""


def read_rate(size_bytes: int = 2**29, tries: int = 8) -> float:
    """Bytes a second that all cores together read from memory, the best of some tries.

    Each core takes BLAS's dot product of two parts of its own: the most that NumPy reads.
    """
    cores = os.cpu_count() or 1
    parts = np.split(np.ones(size_bytes // 4 // (2 * cores) * 2 * cores, np.float32), 2 * cores)

    def once() -> None:
        threads = [
            threading.Thread(target=np.dot, args=pair)
            for pair in zip(parts[::2], parts[1::2], strict=True)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    return sum(part.nbytes for part in parts) / best_s(once, tries)


def device_read_rate(size_bytes: int = 2**33, tries: int = 8) -> float:
    """Bytes a second that a device reads from its memory, the best of some tries: a sum of a large array."""
    large = jnp.ones(size_bytes // 2, jnp.bfloat16)
    total = jax.jit(lambda x: jnp.sum(x, dtype=jnp.float32))
    total(large).block_until_ready()
    return large.nbytes / best_s(lambda: total(large).block_until_ready(), tries)


def matmul_rate(dtype: DTypeLike, size: int = 2048, tries: int = 6) -> float:
    """Operations a second of XLA's square matrix product, the best of some tries."""
    # Random: a device that multiplies ones draws less power, and is faster than it can be at work.
    matrix = jax.random.normal(jax.random.key(0), (size, size), dtype)
    product = jax.jit(jnp.matmul)
    product(matrix, matrix).block_until_ready()
    return 2 * size**3 / best_s(lambda: product(matrix, matrix).block_until_ready(), tries)


def numpy_matmul_rate(size: int = 2048, tries: int = 6) -> float:
    """The same of NumPy's, in float32."""
    matrix = np.ones((size, size), np.float32)
    return 2 * size**3 / best_s(lambda: np.matmul(matrix, matrix), tries)


def best_s(run: Callable[[], object], tries: int) -> float:
    """Seconds of the fastest of some tries."""
    times: list[float] = []
    for _ in range(tries):
        started = time.perf_counter()
        run()
        times.append(time.perf_counter() - started)
    return min(times)


# The least that a model can take (the roofline: Williams et al. 2009)


def decode_s(
    limits: Limits, config: DecoderConfig, *, batch: int, context: float, dtype: str
) -> float:
    """Seconds of one decode step: reading weights, keys and values once, or multiplying, which is longer.

    Args:
        limits: The machine's.
        config: The model's shape.
        batch: Sequences that each get a token.
        context: Tokens that each holds, on average.
        dtype: Of weights, keys and values.
    """
    size = jnp.dtype(dtype).itemsize
    cached = 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    read = size * (_multiplied(config) + batch * context * cached)
    operations = batch * (2 * _multiplied(config) + _attention(config, context))
    return max(read / limits.bytes_a_s, operations / limits.operations_a_s[dtype])


def prefill_s(
    limits: Limits, config: DecoderConfig, *, batch: int, prompt: int, dtype: str
) -> float:
    """Seconds of computing prompts: their multiplications; the head is needed once a prompt."""
    layers = _multiplied(config) - config.vocab_size * config.hidden_size
    attention = _attention(config, prompt / 2)
    operations = batch * prompt * (2 * layers + attention)
    operations += batch * 2 * config.vocab_size * config.hidden_size
    return operations / limits.operations_a_s[dtype]


def training_s(
    limits: Limits,
    config: DecoderConfig,
    *,
    tokens: float,
    row: float,
    dtype: str = "bfloat16",
    trained: float | None = None,
) -> float:
    """Seconds of a gradient: three times the forward pass; what is recomputed isn't counted.

    Args:
        limits: The machine's.
        config: The model's shape.
        tokens: Of all sequences.
        row: Tokens of each.
        dtype: Of weights and activations.
        trained: Of these tokens, those whose probability is needed, and so the head; None: all.
    """
    head = config.vocab_size * config.hidden_size
    layers = _multiplied(config) - head
    forward = tokens * (2 * layers + _attention(config, row / 2))
    forward += 2 * head * (tokens if trained is None else trained)
    return 3 * forward / limits.operations_a_s[dtype]


def _multiplied(config: DecoderConfig) -> int:
    """Parameters that each token is multiplied with: all, but an embedding that is only looked up."""
    tied = config.tie_word_embeddings
    return config.parameters - (0 if tied else config.vocab_size * config.hidden_size)


def _attention(config: DecoderConfig, context: float) -> float:
    """Operations of a token's attention to `context` others."""
    return 4 * config.num_hidden_layers * config.num_attention_heads * config.head_dim * context
