"""What the trainer's tests share: a decoder small enough to compile in a moment."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import jax
import jax.monitoring
import jax.numpy as jnp
import pytest
from flax import nnx
from jax import Array

from gymllm_trainers.engine import kernels
from gymllm_trainers.engine.kernels.calls import open_library
from gymllm_trainers.engine.paged_attention import PagedCache, paged_attention, write_pages
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


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> kernels.Kernels:
    """The kernels without a processor's own instructions; one library can be opened once in a process."""
    folder = tmp_path_factory.mktemp("plain")
    return open_library(kernels.build(flags=("-DPORTABLE", "-O1"), folder=folder))


Extend = Callable[..., tuple[Array, PagedCache]]


@pytest.fixture(scope="session")
def extend() -> Extend:
    """Appends a chunk to some rows of a paged cache, as the engine does, by XLA alone.

    Called with a decoder, a cache, ids [R, C], page tables [R, M], and how many tokens each row holds and
    how many of the chunk are its own, [R]. Returns the last valid token's hidden state [R, D] and the cache.
    """

    @nnx.jit
    def call(
        decoder: Decoder,
        cache: PagedCache,
        ids_RC: Array,
        table_RM: Array,
        start_R: Array,
        count_R: Array,
    ) -> tuple[Array, PagedCache]:
        config, page_size = decoder.config, cache.key.shape[3]
        offset_C = jnp.arange(ids_RC.shape[1])
        position_RC = start_R[:, None] + offset_C
        page_RC = jnp.take_along_axis(table_RM, position_RC // page_size, axis=1, mode="clip")
        slot_RC = jnp.where(
            offset_C < count_R[:, None], page_RC * page_size + position_RC % page_size, 0
        )

        def attend(
            layer: Array,
            window: Array | None,
            query: Array,
            key: Array,
            value: Array,
            carry: PagedCache,
        ) -> tuple[Array, PagedCache]:
            flat = (part.reshape(-1, *part.shape[2:]) for part in (key, value))
            carry = write_pages(carry, layer, *flat, slot_RC.reshape(-1))
            mixed = paged_attention(
                query,
                carry,
                layer,
                table_RM,
                start_R,
                count_R,
                scale=config.attention_scale,
                window=window,
                softcap=config.attention_softcap,
            )
            return mixed, carry

        hidden_RCD, cache = decoder.trunk(ids_RC, position_RC, attend, cache)
        last_R = jnp.maximum(count_R - 1, 0)
        return hidden_RCD[jnp.arange(len(last_R)), last_R], cache

    return call


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
