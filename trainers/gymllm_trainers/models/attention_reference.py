"""Attention in memory linear in the tokens, in plain JAX: for CPUs, and for what kernels can't do.

Axes: B rows, T tokens, N query heads, K key-value heads, G = N / K, H head; J blocks of S tokens, and
R = G * S queries that share a key-value head in a block.

The scores of one block of queries with one block of keys are all that is held: softmax goes over the key
blocks online (Milakov and Gimelshein 2018, arXiv:1805.02867), and the backward pass computes the scores
again from each query's saved peak and sum (FlashAttention-2, algorithms 1 and 2 of Dao 2023,
arXiv:2307.08691).
A block of queries looks only at the key blocks that reach it: in a row of trees those are the beginnings it
shares, and its own.
"""

from __future__ import annotations

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

_HIDDEN = -1e30
"""Score of a key that a query must not see; finite, so that no row is all infinities."""
_FAR = 2**30
"""A position that no window reaches."""


class _Static(NamedTuple):
    """What a program is compiled for."""

    scale: float
    softcap: float | None
    block: int


class _Where(NamedTuple):
    """What decides which keys a query sees."""

    ends_JBS: Array
    positions_JBS: Array | None
    """None where there is no window."""
    window: Array | None
    keys_JJ: Array
    """Of each query block, the key blocks it has to look at, in order; then others."""
    count_J: Array
    """How many it has to look at."""


class _Saved(NamedTuple):
    """What the backward pass needs."""

    query_JBKRH: Array
    key_JBKSH: Array
    value_JBKSH: Array
    where: _Where
    mixed_JBKRH: Array
    peak_JBKR: Array
    """Each query's highest score."""
    total_JBKR: Array
    """Sum of exp(score - peak). Kept apart from the peak: their log-sum-exp would round large scores."""


def blocked_attention(
    query_BTNH: Array,
    key_BTKH: Array,
    value_BTKH: Array,
    ends_BT: Array,
    *,
    positions_BT: Array | None = None,
    scale: float,
    window: Array | int | None = None,
    softcap: float | None = None,
    block: int = 192,
) -> Array:
    """Causal attention of packed rows; see `attention.packed_attention`.

    Differentiable once, in reverse. Any `ends` are right, also those of no tree.

    Args:
        query_BTNH: Queries.
        key_BTKH: Keys.
        value_BTKH: Values.
        ends_BT: Key a is seen by queries a to ends - 1, int32; 0 is padding, whose result means nothing.
        positions_BT: What a window counts in, int32; None: the order in the row.
        scale: Scores are multiplied by it.
        window: A query sees the keys less than this many positions before it, itself included.
        softcap: Scores become softcap * tanh(score / softcap).
        block: Tokens of a block.
    """
    batch, tokens, heads, size = query_BTNH.shape
    groups = key_BTKH.shape[2]
    block = min(block, tokens)
    padding = -tokens % block
    count = (tokens + padding) // block

    def blocks(x_BT: Array) -> Array:
        """[B, T, ...] to [J, B, S, ...]."""
        x_BT = jnp.pad(x_BT, ((0, 0), (0, padding), *((0, 0) for _ in x_BT.shape[2:])))
        return x_BT.reshape(batch, count, block, *x_BT.shape[2:]).swapaxes(0, 1)

    # [J, B, K, R, H]: one matrix product a key-value head instead of one a query head.
    query = blocks(query_BTNH).reshape(count, batch, block, groups, heads // groups, size)
    query = query.transpose(0, 1, 3, 4, 2, 5).reshape(count, batch, groups, -1, size)
    key, value = blocks(key_BTKH).swapaxes(2, 3), blocks(value_BTKH).swapaxes(2, 3)
    window = None if window is None else jnp.asarray(window, jnp.int32)
    positions = None
    if window is not None:
        order_T = jnp.arange(tokens, dtype=jnp.int32)
        order_BT = jnp.broadcast_to(order_T, ends_BT.shape)
        positions = blocks(order_BT if positions_BT is None else positions_BT)
    where = _where(blocks(ends_BT), positions, window)
    mixed: Array = _attend(_Static(scale, softcap, block), query, key, value, where)
    mixed = mixed.reshape(count, batch, groups, heads // groups, block, size)
    mixed = mixed.transpose(1, 0, 4, 2, 3, 5).reshape(batch, count * block, heads, size)
    return mixed[:, :tokens]


def _where(ends_JBS: Array, positions_JBS: Array | None, window: Array | None) -> _Where:
    """Which key blocks each query block has to look at: those with a key that reaches it in some row."""
    count, _, block = ends_JBS.shape
    own_J = jnp.arange(count, dtype=jnp.int32)
    # Axes: query block, key block, row.
    reached = jnp.max(ends_JBS, axis=-1) > own_J[:, None, None] * block
    if window is not None and positions_JBS is not None:
        empty_JBS = ends_JBS == 0
        first_JB = jnp.min(jnp.where(empty_JBS, _FAR, positions_JBS), axis=-1)
        last_JB = jnp.max(jnp.where(empty_JBS, 0, positions_JBS), axis=-1)
        reached &= first_JB[:, None] - last_JB < window
    reached_JJ = jnp.any(reached, axis=-1) & (own_J <= own_J[:, None])
    keys_JJ = jnp.argsort(~reached_JJ, axis=1, stable=True).astype(jnp.int32)
    count_J = jnp.sum(reached_JJ, axis=1, dtype=jnp.int32)
    return _Where(ends_JBS, positions_JBS, window, keys_JJ, count_J)


def _bias(where: _Where, static: _Static, own: Array, other: Array) -> Array:
    """What is added to the scores of query block `own` with key block `other`; [B, 1, 1, S, S]."""
    order_S = jnp.arange(static.block, dtype=jnp.int32)
    query_S, key_S = order_S + own * static.block, order_S + other * static.block
    visible_BSS = where.ends_JBS[other][:, None] > query_S[:, None]
    visible_BSS &= query_S[:, None] >= key_S
    if where.window is not None and where.positions_JBS is not None:
        query_BS, key_BS = where.positions_JBS[own], where.positions_JBS[other]
        visible_BSS &= query_BS[:, :, None] - key_BS[:, None] < where.window
    return jnp.where(visible_BSS, 0.0, _HIDDEN)[:, None, None]


def _scores(
    static: _Static, where: _Where, query_BKRH: Array, key_BKSH: Array, own: Array, other: Array
) -> tuple[Array, Array]:
    """Scores [B, K, R, S], float32, of what is visible; and the capped scores before that was hidden."""
    scores = static.scale * _dot("bkrh,bksh->bkrs", query_BKRH, key_BKSH)
    if static.softcap is not None:
        scores = static.softcap * jnp.tanh(scores / static.softcap)
    grouped = scores.reshape(*scores.shape[:2], -1, static.block, static.block)
    hidden = grouped + _bias(where, static, own, other)
    return hidden.reshape(scores.shape), scores


def _dot(spec: str, left: Array, right: Array) -> Array:
    # XLA's products of bfloat16 on CPU are ten times slower with a bfloat16 result.
    return jnp.einsum(spec, left, right, preferred_element_type=jnp.float32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(static: _Static, query: Array, key: Array, value: Array, where: _Where) -> Array:
    return _forward(static, query, key, value, where)[0]


def _forward(
    static: _Static, query: Array, key: Array, value: Array, where: _Where
) -> tuple[Array, _Saved]:
    def block(
        _: None, inputs: tuple[Array, Array, Array]
    ) -> tuple[None, tuple[Array, Array, Array]]:
        query_BKRH, own, count = inputs

        def step(turn: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            mixed_BKRH, total_BKR, peak_BKR = carry
            other = where.keys_JJ[own, turn]
            scores, _ = _scores(static, where, query_BKRH, key[other], own, other)
            higher_BKR = jnp.maximum(peak_BKR, jnp.max(scores, axis=-1))
            shares = jnp.exp(scores - higher_BKR[..., None])
            keep_BKR = jnp.exp(peak_BKR - higher_BKR)
            part = _dot("bkrs,bksh->bkrh", shares.astype(value.dtype), value[other])
            return (
                mixed_BKRH * keep_BKR[..., None] + part,
                total_BKR * keep_BKR + jnp.sum(shares, axis=-1),
                higher_BKR,
            )

        zeros = jnp.zeros(query_BKRH.shape, jnp.float32)
        start = (zeros, zeros[..., 0], zeros[..., 0] + _HIDDEN)
        mixed, total, peak = jax.lax.fori_loop(0, count, step, start)
        total = jnp.maximum(total, 1e-30)  # 0 in a block that is all padding
        return None, ((mixed / total[..., None]).astype(query.dtype), peak, total)

    order_J = jnp.arange(len(query), dtype=jnp.int32)
    _, (mixed, peak, total) = jax.lax.scan(block, None, (query, order_J, where.count_J))
    return mixed, _Saved(query, key, value, where, mixed, peak, total)


def _backward(static: _Static, saved: _Saved, cotangent: Array) -> tuple[Array, Array, Array, None]:
    query, key, value, where, mixed, peak, total = saved
    wide = cotangent.astype(jnp.float32) * mixed.astype(jnp.float32)
    # Sum over keys of share * d share: the softmax's own term.
    delta_JBKR = jnp.sum(wide, axis=-1)

    def block(
        carry: tuple[Array, Array], inputs: tuple[Array, ...]
    ) -> tuple[tuple[Array, Array], Array]:
        query_BKRH, cotangent_BKRH, peak_BKR, total_BKR, delta_BKR, own, count = inputs

        def step(turn: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
            d_query, d_key, d_value = carry
            other = where.keys_JJ[own, turn]
            scores, capped = _scores(static, where, query_BKRH, key[other], own, other)
            shares = jnp.exp(scores - peak_BKR[..., None]) / total_BKR[..., None]
            d_shares = _dot("bkrh,bksh->bkrs", cotangent_BKRH, value[other])
            d_scores = shares * (d_shares - delta_BKR[..., None]) * static.scale
            if static.softcap is not None:
                d_scores *= 1 - jnp.square(capped / static.softcap)
            d_scores = d_scores.astype(query.dtype)
            narrow = shares.astype(query.dtype)
            return (
                d_query + _dot("bkrs,bksh->bkrh", d_scores, key[other]),
                d_key.at[other].add(_dot("bkrs,bkrh->bksh", d_scores, query_BKRH)),
                d_value.at[other].add(_dot("bkrs,bkrh->bksh", narrow, cotangent_BKRH)),
            )

        zeros = jnp.zeros(query_BKRH.shape, jnp.float32)
        d_query, *kept = jax.lax.fori_loop(0, count, step, (zeros, *carry))
        return (kept[0], kept[1]), d_query.astype(query.dtype)

    start = (jnp.zeros(key.shape, jnp.float32), jnp.zeros(value.shape, jnp.float32))
    order_J = jnp.arange(len(query), dtype=jnp.int32)
    inputs = (query, cotangent, peak, total, delta_JBKR, order_J, where.count_J)
    (d_key, d_value), d_query = jax.lax.scan(block, start, inputs)
    return d_query, d_key.astype(key.dtype), d_value.astype(value.dtype), None


_attend.defvjp(_forward, _backward)
