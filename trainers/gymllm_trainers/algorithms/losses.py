"""Policy losses of a token, and the value loss. Pure functions of arrays.

Axes: N targets, the trained tokens of a whole micro-batch, flat; every array has the shape [N] and, where
nothing else is said, float32. Every loss is *per token and
unnormalised*: sums and counts are accumulated over micro-batches and divided once, at the optimizer step.
Log-probabilities are nats; r = exp(logprob - proximal), sg stops the gradient.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array
from jax.lax import stop_gradient

from gymllm_trainers.algorithms.kl import FARTHEST


class TokenLoss(NamedTuple):
    """Of each token, shape [N], before any mask. The marks are 0 or 1, float32."""

    loss: Array
    clipped_low: Array
    """1 where the ratio was held at its lower bound: the token has no gradient (cispo: a bounded one)."""
    clipped_high: Array
    """The same at its upper bound."""


class ValueLoss(NamedTuple):
    """Of each token, shape [N], before any mask."""

    loss: Array
    clipped: Array
    """1 where the value moved farther than allowed and has no gradient, float32."""


def ratio(logprob: Array, base: Array) -> Array:
    """exp(logprob - base), the difference held within +-20, past which there is no gradient; elementwise."""
    return jnp.exp(jnp.clip(logprob - base, -FARTHEST, FARTHEST))


def ppo_clip(
    logprob_N: Array,
    proximal_N: Array,
    advantage_N: Array,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
) -> TokenLoss:
    """-min(r A, clip(r, 1 - clip_low, 1 + clip_high) A).

    PPO, eq. 7 of Schulman et al. 2017 (arXiv:1707.06347); the higher upper bound is DAPO's clip-higher,
    sec. 3.1 of Yu et al. 2025 (arXiv:2503.14476).

    Args:
        logprob_N: Log-probability under the policy being trained.
        proximal_N: Log-probability under the policy that the ratio is to; no gradient.
        advantage_N: Advantage of each token.
        clip_low: How far below 1 the ratio may fall.
        clip_high: How far above 1 it may rise.
    """
    ratio_N = ratio(logprob_N, stop_gradient(proximal_N))
    return _clipped(ratio_N, advantage_N, clip_low, clip_high)


def dual_clip(
    logprob_N: Array,
    proximal_N: Array,
    advantage_N: Array,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    bound: float = 3.0,
) -> TokenLoss:
    """`ppo_clip`, and where A < 0 at most -bound A.

    Dual-clip PPO, Ye et al. 2020 (arXiv:1912.09729): without the bound a token that became much more
    likely although it was bad has a loss without limit. Such tokens count as clipped high.

    Args:
        logprob_N: Log-probability under the policy being trained.
        proximal_N: Log-probability under the policy that the ratio is to; no gradient.
        advantage_N: Advantage of each token.
        clip_low: How far below 1 the ratio may fall.
        clip_high: How far above 1 it may rise.
        bound: c > 1.
    """
    ratio_N = ratio(logprob_N, stop_gradient(proximal_N))
    token = _clipped(ratio_N, advantage_N, clip_low, clip_high)
    bounded_N = (advantage_N < 0) & (ratio_N > bound)
    return TokenLoss(
        jnp.where(bounded_N, -bound * advantage_N, token.loss),
        token.clipped_low,
        token.clipped_high + bounded_N.astype(jnp.float32),
    )


def gspo(
    logprob_N: Array,
    proximal_N: Array,
    advantage_N: Array,
    mask_N: Array,
    sequence_N: Array,
    *,
    sequences: int,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
) -> TokenLoss:
    """`ppo_clip` with one ratio for a sequence: s = exp(mean over its tokens of logprob - proximal).

    GSPO in its token form, sec. 4.3 of Zheng et al. 2025 (arXiv:2507.18071): each token has s as its value
    and its own gradient, sg[s] pi / sg[pi], so that advantages may differ within a sequence.

    Args:
        logprob_N: Log-probability under the policy being trained.
        proximal_N: Log-probability under the policy that the ratio is to; no gradient.
        advantage_N: Advantage of each token.
        mask_N: 1 where a token is trained on, float; the others are no part of their sequence.
        sequence_N: Number of each token's sequence, int32, 0 <= number < `sequences`.
        sequences: More than any number; static.
        clip_low: How far below 1 the ratio may fall.
        clip_high: How far above 1 it may rise.
    """
    gap_N = stop_gradient(logprob_N - proximal_N)
    mean_N = sequence_mean(gap_N, mask_N, sequence_N, sequences=sequences)
    log_ratio_N = mean_N + logprob_N - stop_gradient(logprob_N)
    return _clipped(ratio(log_ratio_N, jnp.zeros_like(mean_N)), advantage_N, clip_low, clip_high)


def cispo(
    logprob_N: Array,
    proximal_N: Array,
    advantage_N: Array,
    *,
    clip_low: float = 1.0,
    clip_high: float = 4.0,
) -> TokenLoss:
    """-sg[clip(r, 1 - clip_low, 1 + clip_high)] A logprob: the weight is bounded, no gradient is lost.

    CISPO, sec. 3.1 of MiniMax 2025 (arXiv:2506.13585).

    Args:
        logprob_N: Log-probability under the policy being trained.
        proximal_N: Log-probability under the policy that the ratio is to; no gradient.
        advantage_N: Advantage of each token.
        clip_low: How far below 1 the weight may fall; 1 is no bound.
        clip_high: How far above 1 it may rise.
    """
    ratio_N = stop_gradient(ratio(logprob_N, proximal_N))
    held_N = jnp.clip(ratio_N, 1 - clip_low, 1 + clip_high)
    return TokenLoss(
        -held_N * advantage_N * logprob_N,
        (ratio_N < 1 - clip_low).astype(jnp.float32),
        (ratio_N > 1 + clip_high).astype(jnp.float32),
    )


def dppo_tv(
    logprob_N: Array,
    proximal_N: Array,
    behaviour_N: Array,
    advantage_N: Array,
    *,
    low: float = 0.2,
    high: float = 0.2,
    cap: float = 20.0,
) -> TokenLoss:
    """-sg[min(r, cap)] A logprob, for tokens within a trust region in total variation.

    DPPO with the binary approximation of the total variation (arXiv:2602.04879). A token is out, and has no
    gradient, where its probability has already moved from the behaviour policy's by more than `high` up
    with A > 0, or by more than `low` down with A < 0. The paper's ratio is to the behaviour policy too.

    Args:
        logprob_N: Log-probability under the policy being trained.
        proximal_N: Log-probability under the policy that the ratio is to; no gradient.
        behaviour_N: Log-probability under the policy that made the token; no gradient.
        advantage_N: Advantage of each token.
        low: Largest fall of the probability.
        high: Largest rise of the probability.
        cap: Largest ratio.
    """
    current_N = stop_gradient(logprob_N)
    moved_N = jnp.exp(current_N) - jnp.exp(stop_gradient(behaviour_N))
    risen_N = (advantage_N > 0) & (moved_N > high)
    fallen_N = (advantage_N < 0) & (moved_N < -low)
    weight_N = jnp.minimum(ratio(current_N, stop_gradient(proximal_N)), cap)
    return TokenLoss(
        jnp.where(risen_N | fallen_N, 0.0, -weight_N * advantage_N * logprob_N),
        fallen_N.astype(jnp.float32),
        risen_N.astype(jnp.float32),
    )


def reinforce(logprob_N: Array, advantage_N: Array) -> TokenLoss:
    """-A logprob: REINFORCE (Williams 1992, Machine Learning 8, sec. 4).

    Args:
        logprob_N: Log-probability under the policy being trained, nats, float32.
        advantage_N: Advantage of each token, float32.
    """
    nothing_N = jnp.zeros_like(logprob_N, jnp.float32)
    return TokenLoss(-advantage_N * logprob_N, nothing_N, nothing_N)


def sapo(
    logprob_N: Array,
    proximal_N: Array,
    advantage_N: Array,
    *,
    positive: float = 1.0,
    negative: float = 1.05,
) -> TokenLoss:
    """-A sigmoid(t (r - 1)) 4 / t: a gate that closes softly, with the slope of r at r = 1.

    SAPO, Gao et al. 2025 (arXiv:2511.20347); t is `positive` where A > 0 and `negative` elsewhere.

    Args:
        logprob_N: Log-probability under the policy being trained.
        proximal_N: Log-probability under the policy that the ratio is to; no gradient.
        advantage_N: Advantage of each token.
        positive: Temperature where A > 0.
        negative: Temperature elsewhere; a larger one closes faster.
    """
    temperature_N = jnp.where(advantage_N > 0, positive, negative).astype(logprob_N.dtype)
    ratio_N = ratio(logprob_N, stop_gradient(proximal_N))
    gate_N = jax.nn.sigmoid(temperature_N * (ratio_N - 1)) * 4 / temperature_N
    nothing_N = jnp.zeros_like(logprob_N, jnp.float32)
    return TokenLoss(-gate_N * advantage_N, nothing_N, nothing_N)


def supervised(logprob_N: Array) -> TokenLoss:
    """-logprob: what was written is imitated, by the token's negative log-likelihood.

    Args:
        logprob_N: Log-probability under the policy being trained, nats, float32.
    """
    nothing_N = jnp.zeros_like(logprob_N, jnp.float32)
    return TokenLoss(-logprob_N, nothing_N, nothing_N)


def value_loss(
    value_N: Array, old_value_N: Array, return_N: Array, *, clip: float = 0.2
) -> ValueLoss:
    """max((v - R)^2, (clip(v, old - clip, old + clip) - R)^2) / 2.

    The clipped value loss of PPO's first implementation (OpenAI Baselines, ppo2); Schulman et al. 2017
    (arXiv:1707.06347), eq. 9, has the unclipped square.

    Args:
        value_N: Value of the state before each token, in reward units; carries the gradient.
        old_value_N: The same at the start of the update; no gradient.
        return_N: What it should have been; no gradient.
        clip: How far a value may move from the old one; 0 is any distance.
    """
    return_N = stop_gradient(return_N)
    square_N = (value_N - return_N) ** 2
    if clip == 0:
        return ValueLoss(square_N / 2, jnp.zeros_like(value_N, jnp.float32))
    old_value_N = stop_gradient(old_value_N)
    held_N = jnp.clip(value_N, old_value_N - clip, old_value_N + clip)
    held_square_N = (held_N - return_N) ** 2
    return ValueLoss(
        jnp.maximum(square_N, held_square_N) / 2, (held_square_N > square_N).astype(jnp.float32)
    )


def sequence_sum(value_N: Array, mask_N: Array, sequence_N: Array, *, sequences: int) -> Array:
    """Sum over the masked tokens of each token's sequence, at each of its tokens; shape [N].

    Args:
        value_N: What is added up, float.
        mask_N: 1 where a token counts, float.
        sequence_N: Number of each token's sequence, int32, 0 <= number < `sequences`.
        sequences: More than any number; static.
    """
    # where, not a product: what padding holds may be no number.
    counted_N = jnp.where(mask_N > 0, value_N, 0)
    return jax.ops.segment_sum(counted_N, sequence_N, num_segments=sequences)[sequence_N]


def sequence_mean(value_N: Array, mask_N: Array, sequence_N: Array, *, sequences: int) -> Array:
    """Mean over the masked tokens of each token's sequence, at each of its tokens; shape [N].

    Args:
        value_N: What is averaged, float.
        mask_N: 1 where a token counts, float.
        sequence_N: Number of each token's sequence, int32, 0 <= number < `sequences`.
        sequences: More than any number; static.
    """
    total_N = sequence_sum(value_N, mask_N, sequence_N, sequences=sequences)
    count_N = sequence_sum(jnp.ones_like(value_N), mask_N, sequence_N, sequences=sequences)
    return total_N / jnp.maximum(count_N, 1)


def _clipped(ratio_N: Array, advantage_N: Array, low: float, high: float) -> TokenLoss:
    held_N = jnp.clip(ratio_N, 1 - low, 1 + high)
    return TokenLoss(
        -jnp.minimum(ratio_N * advantage_N, held_N * advantage_N),
        ((advantage_N < 0) & (ratio_N < 1 - low)).astype(jnp.float32),
        ((advantage_N > 0) & (ratio_N > 1 + high)).astype(jnp.float32),
    )
