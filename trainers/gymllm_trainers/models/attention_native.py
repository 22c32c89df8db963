"""Attention of packed rows on a CPU, in C: `engine/kernels/packed_attention.c`.

XLA's loop over blocks (`attention_reference.py`) computes whole blocks of several rows at once, and goes
over the scores in memory again for each of softmax's steps: half of a small model's gradient was spent there.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import jax
import jax.numpy as jnp
from jax import Array

if TYPE_CHECKING:
    from gymllm_trainers.engine.kernels import Kernels

_Inputs = tuple[Array, ...]


def refusal(size: int) -> str | None:
    """Why heads of this size can't be computed here; None if they can."""
    # The engine is made of models: neither can import the other while it is being imported.
    from gymllm_trainers.engine.kernels import load, unavailable

    kernels = load()
    if kernels is None:
        return str(unavailable())
    if size % kernels.lanes:
        return f"a head's size must be a multiple of {kernels.lanes}, got {size}"
    return None


def native_attention(
    query_BTNH: Array,
    key_BTKH: Array,
    value_BTKH: Array,
    ends_BT: Array,
    positions_BT: Array,
    *,
    scale: float,
    window: Array | int | None = None,
) -> Array:
    """See `attention.packed_attention`; in float32, whatever comes in. Differentiable once, in reverse.

    Args:
        query_BTNH: Queries.
        key_BTKH: Keys.
        value_BTKH: Values.
        ends_BT: Key a is seen by queries a to ends - 1, int32; 0 is padding, whose result means nothing.
        positions_BT: What a window counts in, int32.
        scale: Scores are multiplied by it.
        window: A query sees the keys less than this many positions before it, itself included.
    """
    # 0 is none.
    width = jnp.int32(0) if window is None else jnp.maximum(jnp.asarray(window, jnp.int32), 1)
    wide = (x.astype(jnp.float32) for x in (query_BTNH, key_BTKH, value_BTKH))
    mixed: Array = _attend(scale, *wide, ends_BT, positions_BT, width)
    return mixed.astype(query_BTNH.dtype)


def _kernels() -> Kernels:
    from gymllm_trainers.engine.kernels import load

    kernels = load()
    assert kernels is not None, "`refusal` said that there are some"
    return kernels


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(scale: float, *inputs: Array) -> Array:
    return _forward(scale, *inputs)[0]


def _forward(scale: float, *inputs: Array) -> tuple[Array, tuple[_Inputs, _Inputs]]:
    query, key, value, ends, positions, window = inputs
    outputs = _kernels().packed_attention(query, key, value, ends, positions, window, scale=scale)
    return outputs[0], (inputs, outputs)


def _backward(
    scale: float, saved: tuple[_Inputs, _Inputs], cotangent: Array
) -> tuple[Array | None, ...]:
    inputs, outputs = saved
    found = _kernels().packed_attention_backward(inputs, outputs, cotangent, scale=scale)
    return *found, None, None, None


_attend.defvjp(_forward, _backward)
