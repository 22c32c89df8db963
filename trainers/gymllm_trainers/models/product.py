"""Products with a kernel in the activations' type, summed in float32, forward and backward."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array


def product(x_MI: Array, kernel_IO: Array) -> Array:
    """x @ kernel, [M, O] in x's type.

    A kernel of another type is cast to x's first. Sums are float32: a bfloat16 product of XLA that returns
    bfloat16 takes ten times as long on a CPU. The kernel's gradient has the kernel's type and is not rounded
    to x's on the way.
    """
    if x_MI.dtype == jnp.float32:
        return x_MI @ kernel_IO.astype(jnp.float32)
    return _narrow(x_MI, kernel_IO)


@jax.custom_vjp
def _narrow(x_MI: Array, kernel_IO: Array) -> Array:
    return _sum(x_MI, kernel_IO.astype(x_MI.dtype), 1, 0).astype(x_MI.dtype)


def _forward(x_MI: Array, kernel_IO: Array) -> tuple[Array, tuple[Array, Array]]:
    return _narrow(x_MI, kernel_IO), (x_MI, kernel_IO)


def _backward(kept: tuple[Array, Array], gradient_MO: Array) -> tuple[Array, Array]:
    # Left to JAX, the transpose of a product that returns float32 would be two float32 products.
    x_MI, kernel_IO = kept
    gradient_MO = gradient_MO.astype(x_MI.dtype)
    x = _sum(gradient_MO, kernel_IO.astype(x_MI.dtype), 1, 1).astype(x_MI.dtype)
    return x, _sum(x_MI, gradient_MO, 0, 0).astype(kernel_IO.dtype)


def _sum(left: Array, right: Array, left_axis: int, right_axis: int) -> Array:
    """Contracts one axis of each, in float32."""
    axes = (((left_axis,), (right_axis,)), ((), ()))
    return jax.lax.dot_general(left, right, axes, preferred_element_type=jnp.float32)


_narrow.defvjp(_forward, _backward)
