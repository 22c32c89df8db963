"""Attention over the paged cache, by XLA and by our kernels, against a dense reference in NumPy."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
import pytest

from gymllm_trainers.engine import kernels
from gymllm_trainers.engine import paged_attention as xla
from gymllm_trainers.engine.paged_attention import PagedCache, copy_pages, new_cache
from gymllm_trainers.models import DecoderConfig

Floats = npt.NDArray[np.float32]
LAYERS, GROUPS, HEADS, SIZE = 2, 2, 6, 8
SCALE = SIZE**-0.5
STATIC = ("scale", "softcap")


class Implementation(NamedTuple):
    """Both functions, jitted once for all tests."""

    name: str
    attend: Any
    write: Any


XLA = Implementation(
    "xla",
    jax.jit(xla.paged_attention, static_argnames=STATIC),
    jax.jit(xla.write_pages, donate_argnums=0),
)


@pytest.fixture(scope="module", params=["xla", "kernels"])
def implementation(request: pytest.FixtureRequest) -> Implementation:
    if request.param == "xla":
        return XLA
    loaded = kernels.load()
    if loaded is None:
        pytest.skip(str(kernels.unavailable()))
    return Implementation(
        "kernels",
        jax.jit(loaded.paged_attention, static_argnames=STATIC),
        jax.jit(loaded.write_pages, donate_argnums=0),
    )


def dense(
    query_CNH: Floats, key_MKH: Floats, value_MKH: Floats, start: int, window: int, softcap: float
) -> Floats:
    """Attention of queries at `start`, `start` + 1, ... to keys at 0, 1, ...; in float64."""
    queries, heads, _ = query_CNH.shape
    groups = heads // key_MKH.shape[1]
    key, value = (np.repeat(part.astype(np.float64), groups, 1) for part in (key_MKH, value_MKH))
    scores = np.einsum("cnh,mnh->cnm", query_CNH.astype(np.float64), key) * SCALE
    if softcap:
        scores = softcap * np.tanh(scores / softcap)
    position, there = start + np.arange(queries)[:, None], np.arange(len(key))
    visible = (there <= position) & (there > position - (window or len(key)))
    shares = np.exp(scores - scores.max(-1, keepdims=True)) * visible[:, None]
    mixed = np.einsum("cnm,mnh->cnh", shares / shares.sum(-1, keepdims=True), value)
    return mixed.astype(np.float32)


@dataclass
class Rows:
    """Conversations whose keys and values are spread over a cache's pages."""

    implementation: Implementation
    cache: PagedCache
    table_BM: npt.NDArray[np.int32]
    lengths: list[int]
    queries: list[Floats]
    keys: list[Floats]
    values: list[Floats]

    def attend(
        self,
        spans: list[tuple[int, int]],
        width: int,
        *,
        tables: int | None = None,
        window: Any = None,
        softcap: float | None = None,
    ) -> npt.NDArray[Any]:
        """Attention of each row's queries at (start, count) in layer 1; see `paged_attention`."""
        query = np.full((len(spans), width, HEADS, SIZE), np.nan, np.float32)
        for row, (start, count) in enumerate(spans):
            query[row, :count] = self.queries[row][start : start + count]
        start, count = (np.array(part, np.int32) for part in zip(*spans, strict=True))
        dtype = jnp.bfloat16 if self.cache.key.dtype == jnp.bfloat16 else jnp.float32
        out = self.implementation.attend(
            jnp.asarray(query).astype(dtype),
            self.cache,
            jnp.int32(1),
            self.table_BM[: len(spans), :tables],
            start,
            count,
            scale=SCALE,
            window=None if window is None else jnp.int32(window),
            softcap=softcap,
        )
        return np.asarray(out.astype(jnp.float32))

    def expected(
        self, row: int, start: int, count: int, window: int = 0, softcap: float = 0.0
    ) -> Floats:
        """The same for one row, by the reference."""
        end = start + count
        parts = self.queries[row][start:end], self.keys[row][:end], self.values[row][:end]
        return dense(*parts, start, window, softcap)


def make_rows(
    implementation: Implementation,
    lengths: list[int],
    *,
    page_size: int = 4,
    dtype: str = "float32",
) -> Rows:
    """Writes random conversations to shuffled pages, one layer at a time; free pages are all NaN."""
    rng = np.random.default_rng(0)
    needed = [-(-length // page_size) for length in lengths]
    pages = sum(needed) + 3
    order = iter(rng.permutation(np.arange(1, pages)).astype(np.int32))
    table = np.zeros((len(lengths), max(needed) + 2), np.int32)
    for row, count in enumerate(needed):
        table[row, :count] = [next(order) for _ in range(count)]
    shape = LAYERS, pages, GROUPS, page_size, SIZE
    cache = PagedCache(jnp.full(shape, jnp.nan, dtype), jnp.full(shape, jnp.nan, dtype))

    def draw(length: int, heads: int) -> Floats:
        drawn = rng.normal(size=(length, heads, SIZE)).astype(np.float32) * 2
        return np.asarray(jnp.asarray(drawn).astype(dtype).astype(jnp.float32))

    queries = [draw(length, HEADS) for length in lengths]
    keys, values = ([draw(length, GROUPS) for length in lengths] for _ in range(2))
    slots = [
        table[row, np.arange(length) // page_size] * page_size + np.arange(length) % page_size
        for row, length in enumerate(lengths)
    ]
    # Two tokens of padding, as a step has them.
    slot = np.concatenate([*slots, np.zeros(2, np.int32)]).astype(np.int32)
    for layer in range(LAYERS):
        factor = 1.0 if layer == 1 else -3.0
        key, value = (
            np.concatenate([*part, np.full((2, GROUPS, SIZE), np.inf, np.float32)]) * factor
            for part in (keys, values)
        )
        cache = implementation.write(cache, jnp.int32(layer), key, value, slot)
    return Rows(implementation, cache, table, lengths, queries, keys, values)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("window", "softcap"), [(0, 0.0), (5, 0.0), (70, 1.5)])
def test_attention_equals_dense(
    implementation: Implementation, dtype: str, window: int, softcap: float
) -> None:
    rows = make_rows(implementation, [3, 150, 41, 300], dtype=dtype)
    spans = [(0, 3), (145, 5), (40, 1), (297, 3)]
    out = rows.attend(spans, 5, window=window or None, softcap=softcap or None)
    for row, (start, count) in enumerate(spans):
        expected = rows.expected(row, start, count, window, softcap)
        tolerance = 3e-6 if dtype == "float32" else 2e-2
        np.testing.assert_allclose(out[row, :count], expected, rtol=tolerance, atol=tolerance)


def test_window_reaches_across_first_blocks(implementation: Implementation) -> None:
    # The loop starts past the first block; the window's edge is inside a page.
    rows = make_rows(implementation, [700, 650], page_size=16)
    spans = [(690, 10), (648, 2)]
    for window in (1, 300):
        out = rows.attend(spans, 10, window=window)
        for row, (start, count) in enumerate(spans):
            expected = rows.expected(row, start, count, window)
            np.testing.assert_allclose(out[row, :count], expected, rtol=3e-6, atol=3e-6)


@pytest.mark.parametrize("page_size", [1, 3, 200])
def test_any_page_size(implementation: Implementation, page_size: int) -> None:
    rows = make_rows(implementation, [131, 7], page_size=page_size)
    out = rows.attend([(128, 3), (4, 3)], 3)
    np.testing.assert_allclose(out[0], rows.expected(0, 128, 3), rtol=3e-6, atol=3e-6)
    np.testing.assert_allclose(out[1], rows.expected(1, 4, 3), rtol=3e-6, atol=3e-6)


def test_prompt_in_blocks_equals_prompt_at_once(implementation: Implementation) -> None:
    rows = make_rows(implementation, [160])
    whole = rows.attend([(0, 160)], 160)
    for start in range(0, 160, 32):
        part = rows.attend([(start, 32)], 32)
        np.testing.assert_allclose(part[0], whole[0, start : start + 32], rtol=2e-6, atol=2e-6)
    if implementation.name == "kernels":
        for start, count in ((96, 32), (130, 7), (159, 1)):
            part = rows.attend([(start, count)], count)
            assert np.array_equal(part[0], whole[0, start : start + count])


def test_padding_comes_out_zero(implementation: Implementation) -> None:
    rows = make_rows(implementation, [9, 12])
    out = rows.attend([(6, 3), (0, 0)], 5)
    assert not out[0, 3:].any()
    assert not out[1].any()
    assert not rows.attend([(0, 0), (0, 0)], 2, window=4).any()


@pytest.mark.parametrize("window", [None, 140])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_row_is_bit_identical_whatever_the_others_are(
    implementation: Implementation, dtype: str, window: int | None
) -> None:
    rows = make_rows(implementation, [30, 150, 900, 16], dtype=dtype, page_size=16)
    spans = [(28, 2), (148, 2), (898, 2), (14, 2)]
    together = rows.attend(spans, 2, window=window)
    for row in range(len(spans)):
        alone: list[tuple[int, int]] = [(0, 0)] * len(spans)
        alone[row] = spans[row]
        assert np.array_equal(rows.attend(alone, 2, window=window)[row], together[row])
    # Fewer rows, and a shorter table.
    short = rows.attend(spans[:2], 2, tables=10, window=window)
    assert np.array_equal(short, together[:2])


def test_copied_pages_are_read_before_they_are_written() -> None:
    rows = make_rows(XLA, [8])
    first, second = rows.table_BM[0, :2]
    before = np.asarray(rows.cache.key)
    source, target = np.array([first, second, 0], np.int32), np.array([second, first, 0], np.int32)
    copied = np.asarray(jax.jit(copy_pages)(rows.cache, source, target).key)
    np.testing.assert_array_equal(copied[:, second], before[:, first])
    np.testing.assert_array_equal(copied[:, first], before[:, second])


def test_layer_scan_updates_the_cache_in_place(implementation: Implementation) -> None:
    config = DecoderConfig(
        vocab_size=8,
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=GROUPS,
        head_dim=SIZE,
        max_position_embeddings=64,
    )
    cache = new_cache(config, 1000, 16, "float32")

    def step(cache: PagedCache, query: jax.Array, key: jax.Array) -> tuple[jax.Array, PagedCache]:
        slot, table = jnp.full(2, 20, jnp.int32), jnp.ones((2, 4), jnp.int32)
        start, count = jnp.array([4, 4]), jnp.array([1, 1])

        def layer(
            carry: tuple[jax.Array, PagedCache], at: jax.Array
        ) -> tuple[tuple[jax.Array, PagedCache], None]:
            query, cache = carry
            cache = implementation.write(cache, at, key, key, slot)
            mixed = implementation.attend(query, cache, at, table, start, count, scale=SCALE)
            return (query + mixed, cache), None

        (query, cache), _ = jax.lax.scan(layer, (query, cache), jnp.arange(LAYERS))
        return query, cache

    query, key = jnp.ones((2, 1, HEADS, SIZE)), jnp.ones((2, GROUPS, SIZE))
    compiled = jax.jit(step, donate_argnums=0).lower(cache, query, key).compile()
    memory = compiled.memory_analysis()
    assert memory is not None
    assert memory.temp_size_in_bytes < cache.key.nbytes / 2
    assert memory.alias_size_in_bytes >= 2 * cache.key.nbytes
