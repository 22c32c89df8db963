"""A value head: what the policy expects to get from here on, read from its own hidden states.

It shares the decoder's trunk and is no part of the decoder: it is trained and saved beside it, and a model
that is exported lacks it.
"""

from __future__ import annotations

import jax.numpy as jnp
from flax import nnx
from jax import Array
from jax.typing import DTypeLike


class ValueHead(nnx.Module):
    """One linear map from a hidden state to an expected return. It starts at zero everywhere."""

    def __init__(self, width: int, *, dtype: DTypeLike = jnp.float32) -> None:
        """Makes it.

        Args:
            width: Size of a hidden state, D.
            dtype: What its parameters are kept in.
        """
        # A vector, not a [D, 1] matrix: optimizers that treat matrices apart leave it alone.
        self.kernel = nnx.Param(jnp.zeros((width,), dtype))
        self.bias = nnx.Param(jnp.zeros((), dtype))

    def __call__(self, hidden: Array) -> Array:
        """Expected return of each state, float32 [...], of hidden states [..., D] of any float type."""
        kernel = self.kernel[...].astype(hidden.dtype)
        value = jnp.einsum("...d,d->...", hidden, kernel, preferred_element_type=jnp.float32)
        return value + self.bias[...].astype(jnp.float32)
