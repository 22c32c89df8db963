"""The paged cache of keys and values, and attention over it, in plain JAX: it runs on any platform.

`kernels` has the same functions in C for CPUs.

Axes: L layers, P pages, S tokens of a page, K key-value heads, N query heads, G = N / K, H head, T new
tokens, B rows, C queries of a row, M pages of a row's table, J pages of a block, X copied pages.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from gymllm_trainers.models.config import DecoderConfig

_HIDDEN = -1e30
"""Score of a key that no query may see; finite, so that differences of two are numbers."""
_BLOCK_TOKENS = 128
"""Keys that one trip of the loop looks at, or a page's if those are more."""


class PagedCache(NamedTuple):
    """Keys (after RoPE) and values of every page; both [L, P, K, S, H]. Page 0 takes what is padding."""

    key: Array
    value: Array


def new_cache(config: DecoderConfig, pages: int, page_size: int, dtype: DTypeLike) -> PagedCache:
    """An empty cache of `pages` pages, page 0 included."""
    shape = (
        config.num_hidden_layers,
        pages,
        config.num_key_value_heads,
        page_size,
        config.head_dim,
    )
    return PagedCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))


def write_pages(
    cache: PagedCache, layer: Array, key_TKH: Array, value_TKH: Array, slot_T: Array
) -> PagedCache:
    """Writes new keys and values of one layer.

    Args:
        cache: Updated in place where it is donated or a loop's carry.
        layer: Which layer, int32 scalar.
        key_TKH: Keys, cast to the cache's type.
        value_TKH: Values, likewise.
        slot_T: Where each goes, int32: page * S + offset. Padding has a slot of page 0; no other slot
            may be given twice.
    """
    page_size = cache.key.shape[3]
    where = (layer, slot_T // page_size, slice(None), slot_T % page_size)
    return PagedCache(
        cache.key.at[where].set(key_TKH.astype(cache.key.dtype)),
        cache.value.at[where].set(value_TKH.astype(cache.value.dtype)),
    )


def copy_pages(cache: PagedCache, source_X: Array, target_X: Array) -> PagedCache:
    """Copies whole pages in every layer; all are read before any is written. Padding copies 0 to 0."""
    return PagedCache(*(part.at[:, target_X].set(part[:, source_X]) for part in cache))


def paged_attention(
    query_BCNH: Array,
    cache: PagedCache,
    layer: Array,
    table_BM: Array,
    start_B: Array,
    count_B: Array,
    *,
    scale: float,
    window: Array | int | None = None,
    softcap: float | None = None,
) -> Array:
    """Causal grouped-query attention of new tokens to the pages of their rows.

    The softmax is taken online (Milakov & Gimelshein 2018, arXiv:1805.02867), over blocks of pages whose
    size depends on the page's alone, from the first that any row can see to the last. A block that a
    row has no visible key in changes none of its numbers, so its result is the same, bit for bit,
    whatever the other rows are.

    Args:
        query_BCNH: Queries after RoPE; query c of a row stands at position start + c. N = K * G.
        cache: Keys and values, those of the queries' own positions included.
        layer: Which layer, int32 scalar.
        table_BM: Pages of each row in order, int32; what is past the last one is not looked at, but
            has to be a page (0).
        start_B: Position of each row's first query, int32.
        count_B: Queries of each row that count, int32; 0 for a row that is padding.
        scale: What scores are multiplied by.
        window: A query sees this many last positions, its own included; None sees all.
        softcap: Scores become softcap * tanh(score / softcap) (Gemma 2, arXiv:2408.00118, sec. 2).

    Returns:
        [B, C, N, H] in the queries' type; zero for queries that don't count.
    """
    rows, queries, heads, size = query_BCNH.shape
    groups, page_size = cache.key.shape[2:4]
    block_pages = max(_BLOCK_TOKENS // page_size, 1)
    block = block_pages * page_size
    table_BM = jnp.pad(table_BM, ((0, 0), (0, -table_BM.shape[1] % block_pages)))
    operand = jnp.promote_types(query_BCNH.dtype, cache.key.dtype)
    if jax.default_backend() == "cpu":
        # XLA multiplies bfloat16 there at a hundredth of float32's rate.
        operand = jnp.float32
    query_BKGCH = query_BCNH.reshape(rows, queries, groups, heads // groups, size)
    query_BKGCH = query_BKGCH.transpose(0, 2, 3, 1, 4).astype(operand)
    end_B = start_B + count_B
    position_BC = start_B[:, None] + jnp.arange(queries, dtype=jnp.int32)
    valid_BC = position_BC < end_B[:, None]
    first = jnp.zeros((), jnp.int32)
    if window is not None:
        sees_B = jnp.where(count_B > 0, start_B - window + 1, jnp.iinfo(jnp.int32).max)
        first = jnp.maximum(jnp.min(sees_B), 0) // block
    last = -(-jnp.max(jnp.where(count_B > 0, end_B, 0)) // block)

    def attend(at: Array, so_far: tuple[Array, Array]) -> tuple[Array, Array]:
        mixed_BKGCH, most_BKGC = so_far
        pages_BJ = jax.lax.dynamic_slice_in_dim(table_BM, at * block_pages, block_pages, axis=1)
        key, value = (
            part.at[layer, pages_BJ].get(mode="clip").swapaxes(1, 2).astype(operand)
            for part in cache
        )  # [B, K, J, S, H]
        key_BKSH, value_BKSH = (part.reshape(rows, groups, block, size) for part in (key, value))
        there_S = at * block + jnp.arange(block, dtype=jnp.int32)
        visible_BCS = (there_S <= position_BC[:, :, None]) & valid_BC[:, :, None]
        if window is not None:
            visible_BCS &= there_S > position_BC[:, :, None] - window
        visible = visible_BCS[:, None, None]
        scores = scale * jnp.einsum(
            "bkgch,bksh->bkgcs", query_BKGCH, key_BKSH, preferred_element_type=jnp.float32
        )
        if softcap is not None:
            scores = softcap * jnp.tanh(scores / softcap)
        scores = jnp.where(visible, scores, _HIDDEN)
        higher_BKGC = jnp.maximum(most_BKGC, jnp.max(scores, axis=-1))
        shares = jnp.where(visible, jnp.exp(scores - higher_BKGC[..., None]), 0.0)
        # What an earlier owner of the page left behind its last token may be anything, NaN too.
        written_BS = there_S < end_B[:, None]
        value_BKSH = jnp.where(written_BS[:, None, :, None], value_BKSH, 0)
        # A last column of ones sums the shares: XLA's own sum takes another order for another B.
        value_BKSH = jnp.pad(value_BKSH, ((0, 0), (0, 0), (0, 0), (0, 1)), constant_values=1)
        more = jnp.einsum(
            "bkgcs,bksh->bkgch",
            shares.astype(operand),
            value_BKSH,
            preferred_element_type=jnp.float32,
        )
        return mixed_BKGCH * jnp.exp(most_BKGC - higher_BKGC)[..., None] + more, higher_BKGC

    shape = query_BKGCH.shape[:-1]
    nothing = jnp.zeros((*shape, size + 1), jnp.float32), jnp.full(shape, _HIDDEN, jnp.float32)
    mixed_BKGCH, _ = jax.lax.fori_loop(first, last, attend, nothing)
    total_BKGC1 = mixed_BKGCH[..., size:]
    mixed_BKGCH = mixed_BKGCH[..., :size] / jnp.where(total_BKGC1 > 0, total_BKGC1, 1.0)
    mixed = mixed_BKGCH.transpose(0, 3, 1, 2, 4).reshape(rows, queries, heads, size)
    return mixed.astype(query_BCNH.dtype)
