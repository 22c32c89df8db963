"""Policy losses, from log-probabilities (`models/logprob_head.py`).

Pure functions of arrays. Axes: T tokens (of a whole micro-batch, flattened).
Every loss is *per token and unnormalised*: groups arrive one at a time, so sums and counts are
accumulated and divided once, at the optimizer step (token mean over the global batch).
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

LossName = Literal["ppo_clip", "reinforce"]
CorrectionName = Literal["decoupled", "off"]


class TokenLoss(NamedTuple):
    """Of each token, shape [T], before any mask."""

    loss: Array
    clipped_low: Array
    """1 where the ratio was held at 1 - clip_low and the token has no gradient."""
    clipped_high: Array


def ppo_clip(
    logprob_T: Array,
    proximal_T: Array,
    advantage_T: Array,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
) -> TokenLoss:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A) with r = exp(logprob - proximal).

    PPO, eq. 7 of Schulman et al. 2017 (arXiv:1707.06347); the higher upper bound is DAPO's clip-higher,
    sec. 3.1 of Yu et al. 2025 (arXiv:2503.14476).

    Args:
        logprob_T: Log-probability (nats) under the policy being trained.
        proximal_T: Log-probability under the policy that the ratio is taken to; no gradient.
        advantage_T: Advantage of each token.
        clip_low: How far below 1 the ratio may fall.
        clip_high: How far above 1 it may rise.
    """
    ratio_T = jnp.exp(logprob_T - proximal_T)
    held_T = jnp.clip(ratio_T, 1 - clip_low, 1 + clip_high)
    return TokenLoss(
        -jnp.minimum(ratio_T * advantage_T, held_T * advantage_T),
        ((advantage_T < 0) & (ratio_T < 1 - clip_low)).astype(jnp.float32),
        ((advantage_T > 0) & (ratio_T > 1 + clip_high)).astype(jnp.float32),
    )


def reinforce(logprob_T: Array, advantage_T: Array) -> TokenLoss:
    """-A log pi (Williams 1992). With A = 1 it is the supervised loss."""
    nothing_T = jnp.zeros_like(logprob_T)
    return TokenLoss(-advantage_T * logprob_T, nothing_T, nothing_T)


def correction_weight(proximal_T: Array, behaviour_T: Array, *, cap: float = 2.0) -> Array:
    """min(exp(proximal - behaviour), cap): what the loss of tokens from an older policy is weighted by.

    Decoupled PPO (Hilton et al. 2021, arXiv:2110.00641), truncated as in AReaL (arXiv:2505.24298): the
    clip is taken around the proximal policy and this correction stands outside it. No gradient.
    """
    ratio_T = jnp.exp(jnp.clip(proximal_T - behaviour_T, -20.0, 20.0))
    return jax.lax.stop_gradient(jnp.minimum(ratio_T, cap))
