"""Policy losses, and the log-probabilities they are made of.

Pure functions of arrays. Axes: T tokens (of a whole micro-batch, flattened), D model, V vocabulary.
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


class TokenStatistics(NamedTuple):
    """Of each token, shape [T]; 0 where the mask is 0."""

    logprob: Array
    """Log-probability (nats) of the target."""
    entropy: Array
    """Entropy (nats) of the distribution the target was drawn from; carries no gradient."""


def token_statistics(
    hidden_TD: Array,
    head_DV: Array,
    target_T: Array,
    mask_T: Array,
    *,
    temperature: float = 1.0,
    chunk: int = 512,
) -> TokenStatistics:
    """Log-probabilities of targets without ever holding all logits.

    Masked-in tokens are moved to the front and taken `chunk` at a time; chunks with none are skipped, so
    the cost follows the number of trained tokens, not of context tokens. Logits are recomputed in the
    backward pass.

    Args:
        hidden_TD: Final hidden states.
        head_DV: Output projection.
        target_T: Token that each position predicts, int32.
        mask_T: 1 for positions whose log-probability is wanted.
        temperature: Logits are divided by it, as when they were sampled.
        chunk: Tokens whose logits are held at once.
    """
    tokens = hidden_TD.shape[0]
    chunk = min(chunk, tokens)
    padding = -tokens % chunk
    order_T = jnp.argsort(mask_T == 0, stable=True)
    order_T = jnp.concatenate([order_T, jnp.full((padding,), tokens, order_T.dtype)])
    wanted = jnp.sum(mask_T != 0)

    @jax.checkpoint
    def statistics(rows_CD: Array, target_C: Array, head_DV: Array) -> TokenStatistics:
        logits_CV = jnp.dot(rows_CD, head_DV, preferred_element_type=jnp.float32) / temperature
        normaliser_C = jax.nn.logsumexp(logits_CV, axis=-1)
        chosen_C = jnp.take_along_axis(logits_CV, target_C[:, None], axis=-1)[:, 0]
        logits_CV = jax.lax.stop_gradient(logits_CV)
        shares_CV = jax.nn.softmax(logits_CV, axis=-1)
        entropy_C = jax.lax.stop_gradient(normaliser_C) - jnp.sum(shares_CV * logits_CV, axis=-1)
        return TokenStatistics(chosen_C - normaliser_C, entropy_C)

    def body(start: Array, index_C: Array) -> tuple[Array, TokenStatistics]:
        rows_CD = hidden_TD.at[index_C].get(mode="clip")
        target_C = target_T.at[index_C].get(mode="clip")
        nothing = TokenStatistics(jnp.zeros(chunk, jnp.float32), jnp.zeros(chunk, jnp.float32))
        result = jax.lax.cond(
            start < wanted,
            lambda: statistics(rows_CD, target_C, head_DV),
            lambda: nothing,
        )
        return start + chunk, result

    _, parts = jax.lax.scan(body, jnp.zeros((), wanted.dtype), order_T.reshape(-1, chunk))

    def restore(values: Array) -> Array:
        scattered = (
            jnp.zeros((tokens,), values.dtype).at[order_T].set(values.reshape(-1), mode="drop")
        )
        return jnp.where(mask_T != 0, scattered, 0.0)

    return TokenStatistics(*(restore(part) for part in parts))


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
