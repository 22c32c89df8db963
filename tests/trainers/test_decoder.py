"""The decoder's own rules: packing, the cache, adapters. That its numbers are right: decoder parity."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from gymllm_trainers.models import Decoder, DecoderConfig
from gymllm_trainers.models.decoder import LoRAParam, attention_windows, init_cache, merge_adapters

LENGTH = 24
hidden = nnx.jit(Decoder.hidden)
extend = nnx.jit(Decoder.extend)


@pytest.fixture(scope="module")
def decoder(make_decoder: Callable[..., Decoder]) -> Decoder:
    return make_decoder(0)


def alone(decoder: Decoder, ids: np.ndarray) -> np.ndarray:
    """Hidden states of one sequence in a row of its own, padded behind."""
    length = max(LENGTH, len(ids))
    row = np.zeros((1, length), np.int32)
    row[0, : len(ids)] = ids
    segments = (np.arange(length) < len(ids)).astype(np.int32)[None]
    return np.asarray(hidden(decoder, row, np.arange(length)[None], segments))[0, : len(ids)]


def test_packed_sequences_do_not_see_each_other(decoder: Decoder) -> None:
    rng = np.random.default_rng(0)
    sequences = [rng.integers(64, size=size).astype(np.int32) for size in (9, 4, 8)]
    row = np.zeros((3, LENGTH), np.int32)
    for array, parts in zip(
        row,
        (
            sequences,
            [np.arange(len(s)) for s in sequences],
            [np.full(len(s), number) for number, s in enumerate(sequences, 1)],
        ),
        strict=True,
    ):
        array[: 9 + 4 + 8] = np.concatenate(parts)
    ids, positions, segments = (part[None] for part in row)
    packed = np.asarray(hidden(decoder, ids, positions, segments))[0]
    expected = np.concatenate([alone(decoder, sequence) for sequence in sequences])
    np.testing.assert_allclose(packed[: 9 + 4 + 8], expected, atol=1e-5)
    # And padding is seen by nobody.
    ids[0, 21:] = 7
    again = np.asarray(hidden(decoder, ids, positions, segments))[0, :21]
    np.testing.assert_array_equal(again, packed[:21])


def test_a_token_sees_what_is_before_it_only(decoder: Decoder) -> None:
    ids = np.arange(20, dtype=np.int32)
    changed = ids.copy()
    changed[12] = 50
    left, right = alone(decoder, ids), alone(decoder, changed)
    np.testing.assert_array_equal(left[:12], right[:12])
    assert (np.abs(left[12:] - right[12:]).max(axis=1) > 1e-4).all()


@pytest.mark.parametrize("seed", range(3))
def test_any_chunks_into_any_slots_agree_with_the_whole(decoder: Decoder, seed: int) -> None:
    """Two conversations in slots that held others, chunk by chunk, one row not in use.

    They grow through every window of the cache that attention is compiled for.
    """
    length, longest = 90, 88
    assert len(attention_windows(length)) == 3
    rng = np.random.default_rng(seed)
    ids = rng.integers(64, size=(2, longest)).astype(np.int32)
    expected = [alone(decoder, row) for row in ids]
    cache = init_cache(decoder.config, slots=4, length=length, dtype=jnp.float32)
    cache = jax.tree.map(lambda part: part + 3.0, cache)  # what others left behind
    held, slots = np.zeros(2, int), np.array([3, 1, 4])
    while (held < longest).any():
        count = np.minimum(rng.integers(1, 14, size=2), longest - held)
        chunk = np.full((3, 13), 9, np.int32)
        for row in range(2):
            chunk[row, : count[row]] = ids[row, held[row] : held[row] + count[row]]
        rows = np.where(np.append(count, 0) > 0, slots, 4)
        result, cache = extend(
            decoder,
            cache,
            chunk,
            rows.astype(np.int32),
            np.append(held, 0).astype(np.int32),
            np.append(count, 0).astype(np.int32),
        )
        held += count
        for row in np.flatnonzero(count):
            np.testing.assert_allclose(result[row], expected[row][held[row] - 1], atol=1e-5)
    for part in cache:
        assert (np.asarray(part)[:, [0, 2]] == 3).all(), "other slots stay as they are"


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
    for remat in (False, True):
        decoder = make_decoder(0, num_hidden_layers=1)
        decoder.remat = remat
        graph, state = nnx.split(decoder)

        @jax.jit
        @jax.grad
        def gradient(state: nnx.State, graph: nnx.GraphDef = graph) -> jax.Array:
            out = nnx.merge(graph, state).hidden(ids, ids, jnp.ones_like(ids))
            return jnp.sum(jnp.sin(out))

        gradients.append(jax.tree.leaves(gradient(state)))
    for left, right in zip(*gradients, strict=True):
        np.testing.assert_allclose(left, right, atol=1e-5)


@pytest.mark.parametrize("changes", [{}, {"tie_word_embeddings": False, "qk_norm": False}])
def test_parameters_are_counted(
    make_decoder: Callable[..., Decoder], changes: dict[str, bool]
) -> None:
    decoder = make_decoder(0, **changes)
    config: DecoderConfig = decoder.config
    assert config.parameters == sum(leaf.size for leaf in jax.tree.leaves(nnx.state(decoder)))
