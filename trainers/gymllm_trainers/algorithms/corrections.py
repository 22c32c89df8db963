"""Corrections: what is done about tokens that another policy made, an older one or the engine's own.

u = exp(proximal - behaviour), the difference held within +-20. Every function gives the weight that a
token's loss is multiplied by, shape [N], without a gradient; the ratio of the loss is to the proximal policy.
With `off` the ratio is to the behaviour policy itself and there is no weight. Axes: N targets, flat; arrays
are float32 of shape [N] where nothing else is said.
"""

from __future__ import annotations

import jax.numpy as jnp
from jax import Array
from jax.lax import stop_gradient

from gymllm_trainers.algorithms.kl import FARTHEST
from gymllm_trainers.algorithms.losses import ratio, sequence_mean, sequence_sum


def decoupled(proximal_N: Array, behaviour_N: Array, *, cap: float = 2.0) -> Array:
    """min(u, cap).

    Decoupled PPO (Hilton et al. 2021, arXiv:2110.00641), truncated as in AReaL (arXiv:2505.24298): the
    clip is around the proximal policy and this correction stands outside it.

    Args:
        proximal_N: Log-probability (nats) at the start of the update.
        behaviour_N: Log-probability under the policy that made the token.
        cap: Largest weight.
    """
    return jnp.minimum(stop_gradient(ratio(proximal_N, behaviour_N)), cap)


def tis_token(proximal_N: Array, behaviour_N: Array, *, cap: float = 2.0) -> Array:
    """min(u, cap): truncated importance sampling (Ionides 2008) of each token.

    The same number as `decoupled`, by the name that it has where the two policies differ by their
    implementation (engine and trainer) instead of by their age.

    Args:
        proximal_N: Log-probability (nats) at the start of the update.
        behaviour_N: Log-probability under the policy that made the token.
        cap: Largest weight.
    """
    return decoupled(proximal_N, behaviour_N, cap=cap)


def tis_sequence(
    proximal_N: Array,
    behaviour_N: Array,
    mask_N: Array,
    sequence_N: Array,
    *,
    sequences: int,
    cap: float = 2.0,
) -> Array:
    """min(product of u over the sequence, cap), the same for each of its tokens.

    The sum of logarithms is held within +-20.

    Args:
        proximal_N: Log-probability (nats) at the start of the update.
        behaviour_N: Log-probability under the policy that made the token.
        mask_N: 1 where a token is trained on, float.
        sequence_N: Number of each token's sequence, int32, 0 <= number < `sequences`.
        sequences: More than any number; static.
        cap: Largest weight.
    """
    gap_N = stop_gradient(proximal_N - behaviour_N)
    total_N = sequence_sum(gap_N, mask_N, sequence_N, sequences=sequences)
    return jnp.minimum(jnp.exp(jnp.clip(total_N, -FARTHEST, FARTHEST)), cap)


def icepop(proximal_N: Array, behaviour_N: Array, *, floor: float = 0.5, cap: float = 2.0) -> Array:
    """u where floor <= u <= cap, else 0: tokens that the two policies disagree on are dropped.

    IcePop (Ling team 2025, "Small leak can sink a great ship").

    Args:
        proximal_N: Log-probability (nats) at the start of the update.
        behaviour_N: Log-probability under the policy that made the token.
        floor: Smallest u that is kept.
        cap: Largest u that is kept.
    """
    ratio_N = stop_gradient(ratio(proximal_N, behaviour_N))
    return jnp.where((ratio_N >= floor) & (ratio_N <= cap), ratio_N, 0)


def geometric_mask(
    proximal_N: Array,
    behaviour_N: Array,
    mask_N: Array,
    sequence_N: Array,
    *,
    sequences: int,
    floor: float = 0.99,
    cap: float = 1.01,
) -> Array:
    """1 where the geometric mean of u over the sequence is in [floor, cap], else 0: the sequence is dropped.

    Its tokens stay in the step's divisor, which is known before this is.

    Args:
        proximal_N: Log-probability (nats) at the start of the update.
        behaviour_N: Log-probability under the policy that made the token.
        mask_N: 1 where a token is trained on, float.
        sequence_N: Number of each token's sequence, int32, 0 <= number < `sequences`.
        sequences: More than any number; static.
        floor: Smallest mean that is kept.
        cap: Largest mean that is kept.
    """
    gap_N = stop_gradient(proximal_N - behaviour_N)
    mean_N = sequence_mean(gap_N, mask_N, sequence_N, sequences=sequences)
    geometric_N = jnp.exp(jnp.clip(mean_N, -FARTHEST, FARTHEST))
    return ((geometric_N >= floor) & (geometric_N <= cap)).astype(gap_N.dtype)


def loglinear_proximal(
    logprob_N: Array, behaviour_N: Array, age_N: Array, *, ahead: float = 1.0
) -> Array:
    """behaviour + a (logprob - behaviour) with a = age / (age + ahead): the proximal policy without a pass.

    AReaL's approximation (its docs/algorithms/prox_approx.md): the policy of version v_b that made the token,
    the one of v_p at the start of the update and the one on its way to v_p + ahead are taken to lie on a
    line in log-probability, a = (v_p - v_b) / (v_p + ahead - v_b). A token of the newest policy has a = 0:
    the ratio is to the policy that made it.

    Args:
        logprob_N: Log-probability (nats) under the policy being trained.
        behaviour_N: Log-probability under the policy that made the token.
        age_N: v_p - v_b >= 0, policy versions.
        ahead: Versions between the start of the update and the policy that is trained, > 0.

    Returns:
        Log-probability, shape [N], no gradient.
    """
    share_N = age_N / (age_N + ahead)
    return stop_gradient(behaviour_N + share_N * (logprob_N - behaviour_N))
