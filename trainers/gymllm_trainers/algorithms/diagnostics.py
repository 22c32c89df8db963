"""What a micro-batch says of itself: sums that add up over micro-batches and become metrics at the step.

Axes: N targets, flat. Everything is counted by target, without the aggregation's weights.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
import numpy.typing as npt
from jax import Array
from jax.lax import stop_gradient

from gymllm_trainers.algorithms.kl import k3
from gymllm_trainers.algorithms.losses import ratio

LAGS = 8
"""Ages 0 to 7 are counted each by itself; older tokens together."""


class PolicySums(NamedTuple):
    """Sums over the trained tokens of a micro-batch; float32 scalars unless said otherwise.

    p is the probability at the start of the update less 1, m the behaviour policy's: their moments give the
    correlation, and so shifted keep their digits where most tokens are near certain. gap = log p - log m.
    """

    tokens: Array
    loss: Array
    """The whole objective, weights applied, not divided."""
    entropy: Array
    clipped_low: Array
    clipped_high: Array
    advantage: Array
    advantage_square: Array
    weight: Array
    """The correction's weight."""
    weight_max: Array
    dropped: Array
    """Tokens that the correction gave the weight 0."""
    gap: Array
    """|gap|, nats."""
    gap_max: Array
    gap_k3: Array
    """k3 of the behaviour policy to the one at the start of the update, nats."""
    ratio: Array
    ratio_square: Array
    ratio_max: Array
    """Largest exp(gap)."""
    p: Array
    m: Array
    p_square: Array
    m_square: Array
    p_m: Array
    update_k3: Array
    """k3 of the policy at the start of the update to the one being trained, nats."""
    lag: Array
    """Tokens of each age, shape [LAGS + 1]; the last is of all older ones."""
    lag_sum: Array
    lag_max: Array
    referred: Array
    """Tokens with a reference."""
    reference_k1: Array
    reference_k3: Array
    valued: Array
    """Tokens with a value."""
    value_loss: Array
    value_clipped: Array
    value_error: Array
    """return - old value."""
    value_error_square: Array
    returns: Array
    returns_square: Array


MAXIMA = frozenset({"weight_max", "gap_max", "ratio_max", "lag_max"})
"""Fields of which micro-batches have a largest, not a sum."""


def distance_sums(
    logprob_N: Array, proximal_N: Array, behaviour_N: Array, mask_N: Array
) -> dict[str, Array]:
    """The sums that come from three policies' log-probabilities alone.

    Args:
        logprob_N: Log-probability (nats) under the policy being trained.
        proximal_N: At the start of the update.
        behaviour_N: Under the policy that made the token.
        mask_N: 1 where a token counts, float. Elsewhere the others must be finite.

    Returns:
        By the name of their field in `PolicySums`.
    """
    gap_N = proximal_N - behaviour_N
    u_N = ratio(proximal_N, behaviour_N)
    p_N, m_N = jnp.expm1(proximal_N), jnp.expm1(behaviour_N)

    def total(value_N: Array) -> Array:
        return jnp.sum(value_N * mask_N)

    return {
        "gap": total(jnp.abs(gap_N)),
        "gap_max": jnp.max(jnp.abs(gap_N) * mask_N),
        "gap_k3": total(k3(gap_N)),
        "ratio": total(u_N),
        "ratio_square": total(u_N**2),
        "ratio_max": jnp.max(u_N * mask_N),
        "p": total(p_N),
        "m": total(m_N),
        "p_square": total(p_N**2),
        "m_square": total(m_N**2),
        "p_m": total(p_N * m_N),
        "update_k3": total(k3(stop_gradient(logprob_N) - proximal_N)),
    }


def lag_sums(age_N: Array, mask_N: Array) -> dict[str, Array]:
    """How old tokens are.

    Args:
        age_N: Policy versions since the one that made the token, >= 0, float.
        mask_N: 1 where a token counts, float.

    Returns:
        By the name of their field in `PolicySums`.
    """
    bins = jnp.arange(LAGS + 1, dtype=age_N.dtype)
    at_N1 = jnp.minimum(jnp.floor(age_N), LAGS)[:, None]
    return {
        "lag": jnp.sum((at_N1 == bins) * mask_N[:, None], axis=0),
        "lag_sum": jnp.sum(age_N * mask_N),
        "lag_max": jnp.max(age_N * mask_N),
    }


def merge(parts: Sequence[PolicySums]) -> PolicySums:
    """The sums of several micro-batches, in float64 NumPy; `parts` is not empty and on the host.

    Adding up in float64, in order, is what makes metrics not depend on how many micro-batches there were.
    """
    merged: dict[str, npt.NDArray[np.float64]] = {}
    for name in PolicySums._fields:
        column = np.stack([np.asarray(getattr(part, name), np.float64) for part in parts])
        merged[name] = column.max(axis=0) if name in MAXIMA else column.sum(axis=0)
    return PolicySums(**merged)  # pyright: ignore[reportArgumentType] (NumPy's instead of JAX's)


def finish(sums: PolicySums, *, divisor: float) -> dict[str, float]:
    """The metrics of an optimizer step.

    Args:
        sums: Of the whole step: `merge`.
        divisor: What the aggregation divides the step's loss by.

    Returns:
        Means over trained tokens unless the name says otherwise; those of a reference and of values only
        where there are any; lag/0 to lag/8 are shares of tokens, the last of all older ones.
    """
    count = max(float(sums.tokens), 1.0)
    mean_advantage = float(sums.advantage) / count
    ratio_square = float(sums.ratio_square)
    metrics = {
        "loss": float(sums.loss) / divisor,
        "entropy": float(sums.entropy) / count,
        "clipped_low": float(sums.clipped_low) / count,
        "clipped_high": float(sums.clipped_high) / count,
        "advantage_mean": mean_advantage,
        "advantage_std": _root(float(sums.advantage_square) / count - mean_advantage**2),
        "correction_weight": float(sums.weight) / count,
        "correction_weight_max": float(sums.weight_max),
        "correction_dropped": float(sums.dropped) / count,
        "behaviour_kl_k3": float(sums.gap_k3) / count,
        "update_kl_k3": float(sums.update_k3) / count,
        "logprob_gap_mean": float(sums.gap) / count,
        "logprob_gap_max": float(sums.gap_max),
        "ratio_max": float(sums.ratio_max),
        "effective_sample_share": float(sums.ratio) ** 2 / (count * ratio_square)
        if ratio_square
        else 0.0,
        "probability_correlation": _correlation(sums),
        "lag_mean": float(sums.lag_sum) / count,
        "lag_max": float(sums.lag_max),
        "trained_tokens": float(sums.tokens),
    }
    metrics |= {f"lag/{age}": float(tokens) / count for age, tokens in enumerate(sums.lag)}
    if referred := float(sums.referred):
        metrics["reference_kl_k1"] = float(sums.reference_k1) / referred
        metrics["reference_kl_k3"] = float(sums.reference_k3) / referred
    if valued := float(sums.valued):
        metrics |= {
            "value_loss": float(sums.value_loss) / valued,
            "value_clipped": float(sums.value_clipped) / valued,
            "explained_variance": _explained(sums, valued),
        }
    return metrics


def _correlation(sums: PolicySums) -> float:
    """Pearson's, of the two policies' probabilities; 1 where neither varies."""
    count = max(float(sums.tokens), 1.0)
    p, m = float(sums.p) / count, float(sums.m) / count
    spread_p = _root(float(sums.p_square) / count - p**2)
    spread_m = _root(float(sums.m_square) / count - m**2)
    if not spread_p * spread_m:
        return 1.0
    return min(1.0, (float(sums.p_m) / count - p * m) / (spread_p * spread_m))


def _explained(sums: PolicySums, valued: float) -> float:
    """1 - variance(return - old value) / variance(return); 0 where returns don't vary."""
    returns, error = float(sums.returns) / valued, float(sums.value_error) / valued
    variance = float(sums.returns_square) / valued - returns**2
    unexplained = float(sums.value_error_square) / valued - error**2
    return 1 - unexplained / variance if variance > 0 else 0.0


def _root(variance: float) -> float:
    """Rounding can leave a variance a little below 0."""
    return math.sqrt(max(variance, 0.0))
