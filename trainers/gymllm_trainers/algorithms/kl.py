"""Estimates of the KL divergence from the policy to a reference, of each token.

Schulman 2020, "Approximating KL divergence" (joschu.net/blog/kl-approx.html). With d = log reference - log
policy on tokens that the policy drew, each has E[.] = KL(policy || reference) or close to it. Differentiated,
only k2 has that divergence's gradient on the policy's own tokens.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

from gymllm_trainers.algorithms.names import KLForm

FARTHEST = 20.0
"""Differences of log-probabilities are held within this before exp: e^20 is finite and more than enough."""


def kl_estimate(form: KLForm, logprob_N: Array, reference_N: Array) -> Array:
    """The estimate called `form`, nats, shape [N], in the log-probabilities' dtype.

    k1 = -d, k2 = d^2 / 2, k3 = e^d - d - 1; k3+ has k3's value and k2's gradient (straight through).

    Args:
        form: Which.
        logprob_N: Log-probability (nats) under the policy; carries the gradient.
        reference_N: Log-probability under the reference; no gradient.
    """
    difference_N = jax.lax.stop_gradient(reference_N) - logprob_N
    if form == "k1":
        return -difference_N
    if form == "k2":
        return difference_N**2 / 2
    if form == "k3":
        return k3(difference_N)
    half_square_N = difference_N**2 / 2
    value_N = k3(jax.lax.stop_gradient(difference_N))
    return value_N + half_square_N - jax.lax.stop_gradient(half_square_N)


def k3(difference: Array) -> Array:
    """e^d - d - 1 >= 0, of a difference held within +-20; elementwise."""
    held = jnp.clip(difference, -FARTHEST, FARTHEST)
    return jnp.expm1(held) - held
