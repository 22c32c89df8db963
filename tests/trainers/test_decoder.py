"""The decoder's own rules: packing, the cache, adapters. That its numbers are right: decoder parity."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import Array

from gymllm.errors import ConfigError
from gymllm_trainers.engine.paged_attention import PagedCache, new_cache
from gymllm_trainers.models import Decoder, DecoderConfig
from gymllm_trainers.models.decoder import (
    LINEARS,
    LoRAParam,
    merge_adapters,
)

LENGTH = 24
hidden = nnx.jit(Decoder.hidden)


@pytest.fixture(scope="module")
def decoder(make_decoder: Callable[..., Decoder]) -> Decoder:
    return make_decoder(0)


def alone(decoder: Decoder, ids: np.ndarray) -> np.ndarray:
    """Hidden states of one sequence in a row of its own, padded behind."""
    length = max(LENGTH, len(ids))
    row = np.zeros((1, length), np.int32)
    row[0, : len(ids)] = ids
    ends = np.where(np.arange(length) < len(ids), len(ids), 0).astype(np.int32)[None]
    return np.asarray(hidden(decoder, row, np.arange(length)[None], ends))[0, : len(ids)]


def test_packed_sequences_do_not_see_each_other(decoder: Decoder) -> None:
    rng = np.random.default_rng(0)
    sequences = [rng.integers(64, size=size).astype(np.int32) for size in (9, 4, 8)]
    row = np.zeros((3, LENGTH), np.int32)
    for array, parts in zip(
        row,
        (
            sequences,
            [np.arange(len(s)) for s in sequences],
            [np.full(len(s), end) for s, end in zip(sequences, (9, 13, 21), strict=True)],
        ),
        strict=True,
    ):
        array[: 9 + 4 + 8] = np.concatenate(parts)
    ids, positions, ends = (part[None] for part in row)
    packed = np.asarray(hidden(decoder, ids, positions, ends))[0]
    expected = np.concatenate([alone(decoder, sequence) for sequence in sequences])
    np.testing.assert_allclose(packed[: 9 + 4 + 8], expected, atol=1e-5)
    # And padding is seen by nobody.
    ids[0, 21:] = 7
    again = np.asarray(hidden(decoder, ids, positions, ends))[0, :21]
    np.testing.assert_array_equal(again, packed[:21])


def test_a_token_sees_what_is_before_it_only(decoder: Decoder) -> None:
    ids = np.arange(20, dtype=np.int32)
    changed = ids.copy()
    changed[12] = 50
    left, right = alone(decoder, ids), alone(decoder, changed)
    np.testing.assert_array_equal(left[:12], right[:12])
    assert (np.abs(left[12:] - right[12:]).max(axis=1) > 1e-4).all()


@pytest.mark.parametrize("seed", range(3))
def test_any_chunks_into_any_pages_agree_with_the_whole(
    decoder: Decoder, extend: Callable[..., tuple[Array, PagedCache]], seed: int
) -> None:
    """Two conversations in pages that held others, chunk by chunk, one row not in use."""
    longest, size = 88, 8
    rng = np.random.default_rng(seed)
    ids = rng.integers(64, size=(2, longest)).astype(np.int32)
    expected = [alone(decoder, row) for row in ids]
    cache = new_cache(decoder.config, pages=30, page_size=size, dtype=jnp.float32)
    cache = jax.tree.map(lambda part: part + 3.0, cache)  # what others left behind
    pages = rng.permutation(np.arange(1, 30)).astype(np.int32)
    tables = np.stack([pages[:12], pages[12:24], np.zeros(12, np.int32)])
    held = np.zeros(2, int)
    while (held < longest).any():
        count = np.minimum(rng.integers(1, 14, size=2), longest - held)
        chunk = np.full((3, 13), 9, np.int32)
        for row in range(2):
            chunk[row, : count[row]] = ids[row, held[row] : held[row] + count[row]]
        start_R, count_R = (np.append(part, 0).astype(np.int32) for part in (held, count))
        result, cache = extend(decoder, cache, chunk, tables, start_R, count_R)
        held += count
        for row in np.flatnonzero(count):
            np.testing.assert_allclose(result[row], expected[row][held[row] - 1], atol=1e-5)
    for part in cache:
        assert (np.asarray(part)[:, pages[24:]] == 3).all(), "other pages stay as they are"


# ---------------------------------------------------------------------- adapters


@pytest.fixture(scope="module")
def adapted(make_decoder: Callable[..., Decoder]) -> Decoder:
    decoder = make_decoder(0)
    decoder.add_adapters(rank=2, alpha=8.0, rngs=nnx.Rngs(1))
    return decoder


def test_adapters_start_as_the_identity(decoder: Decoder, adapted: Decoder) -> None:
    ids = np.arange(10, dtype=np.int32)
    np.testing.assert_allclose(alone(decoder, ids), alone(adapted, ids), atol=1e-5)


def test_merged_adapters_compute_the_same(adapted: Decoder, decoder: Decoder) -> None:
    graph, adapters, rest = nnx.split(adapted, LoRAParam, ...)
    rng = np.random.default_rng(0)
    moved = nnx.merge(
        graph,
        jax.tree.map(lambda leaf: leaf + 0.2 * rng.normal(size=leaf.shape).astype("f"), adapters),
        rest,
    )
    ids = np.arange(10, dtype=np.int32)
    expected = alone(moved, ids)
    merged = merge_adapters(moved)
    assert merged.adapters is None
    np.testing.assert_allclose(alone(merged, ids), expected, atol=1e-4)
    assert np.abs(expected - alone(decoder, ids)).max() > 0.1
    assert moved.adapters is not None, "what was given stays as it was"
    np.testing.assert_array_equal(alone(moved, ids), expected)


def test_merging_without_adapters_changes_nothing(decoder: Decoder) -> None:
    for left, right in zip(
        jax.tree.leaves(nnx.state(decoder)),
        jax.tree.leaves(nnx.state(merge_adapters(decoder))),
        strict=True,
    ):
        np.testing.assert_array_equal(left, right)


# ---------------------------------------------------------------------- memory and size


def test_recomputed_activations_give_the_same_gradient(
    make_decoder: Callable[..., Decoder],
) -> None:
    ids = jnp.arange(8)[None]

    gradients = []
    for remat in ("none", "full", "dots", "offload"):
        decoder = make_decoder(0, num_hidden_layers=1)
        decoder.remat = remat
        graph, state = nnx.split(decoder)

        @jax.jit
        @jax.grad
        def gradient(state: nnx.State, graph: nnx.GraphDef = graph) -> jax.Array:
            out = nnx.merge(graph, state).hidden(ids, ids, jnp.full_like(ids, 8))
            return jnp.sum(jnp.sin(out))

        gradients.append(jax.tree.leaves(gradient(state)))
    for kept, *recomputed in zip(*gradients, strict=True):
        for other in recomputed:
            np.testing.assert_allclose(other, kept, atol=1e-5)


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": False, "qk_norm": False}])
def test_parameters_are_counted(
    make_decoder: Callable[..., Decoder], changes: dict[str, bool]
) -> None:
    decoder = make_decoder(0, **changes)
    config: DecoderConfig = decoder.config
    assert config.parameters == sum(leaf.size for leaf in jax.tree.leaves(nnx.state(decoder)))


# ---------------------------------------------------------------------- the trunk


def test_trunk_takes_tokens_without_rows_and_products_of_its_caller(adapted: Decoder) -> None:
    """One sequence as [T], dense attention, the carry counted from layer to layer."""
    ids = np.arange(9, dtype=np.int32)
    config = adapted.config
    called: set[tuple[int, ...]] = set()

    def linear(x_MI: jax.Array, kernels_LIO: jax.Array, layer: jax.Array) -> jax.Array:
        called.add(kernels_LIO.shape)
        return x_MI @ kernels_LIO[layer]

    def attend(
        layer: jax.Array,
        window: jax.Array | None,
        query: jax.Array,
        key: jax.Array,
        value: jax.Array,
        carry: jax.Array,
    ) -> tuple[jax.Array, jax.Array]:
        assert window is None
        assert query.shape == (9, config.num_attention_heads, config.head_dim)
        groups = config.num_attention_heads // config.num_key_value_heads
        key, value = (jnp.repeat(part, groups, axis=1) for part in (key, value))
        scores = jnp.einsum("tnh,snh->nts", query, key) * config.attention_scale
        scores = jnp.where(jnp.tri(9, dtype=bool), scores, -jnp.inf)
        mixed = jnp.einsum("nts,snh->tnh", jax.nn.softmax(scores), value)
        return mixed, carry.at[layer].add(1)

    @nnx.jit
    def run(decoder: Decoder) -> tuple[jax.Array, jax.Array]:
        carry = jnp.zeros(config.num_hidden_layers, jnp.int32)
        return decoder.trunk(jnp.asarray(ids), jnp.arange(9), attend, carry, linear=linear)

    result, carry = run(adapted)
    np.testing.assert_allclose(result, alone(adapted, ids), atol=1e-5)
    np.testing.assert_array_equal(carry, np.ones(config.num_hidden_layers))
    assert adapted.adapters is not None
    wanted = {getattr(adapted.layers, name)[...].shape for name in LINEARS}
    wanted |= {leaf.shape for leaf in jax.tree.leaves(nnx.state(adapted, LoRAParam))}
    assert called == wanted


def test_adapters_on_what_is_not_there_are_refused(make_decoder: Callable[..., Decoder]) -> None:
    decoder = make_decoder(0)
    with pytest.raises(ConfigError, match=r"on router; this model's linears are query, key"):
        decoder.add_adapters(rank=2, alpha=1.0, linears=("router",), rngs=nnx.Rngs(0))  # type: ignore[arg-type]  # the point
    with pytest.raises(ConfigError, match="rank of adapters must be >= 1, got 0"):
        decoder.add_adapters(rank=0, alpha=1.0, rngs=nnx.Rngs(0))


def test_unknown_remat_policy_is_refused(make_decoder: Callable[..., Decoder]) -> None:
    decoder = make_decoder(0)
    decoder.remat = "some"  # type: ignore[assignment]  # the point
    ids = jnp.zeros((1, 2), jnp.int32)
    with pytest.raises(ConfigError, match=r"one of none, full, dots, offload, got 'some'"):
        decoder.hidden(ids, ids, ids)
