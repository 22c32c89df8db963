"""The objective of a micro-batch: everything that an algorithm says, as one unnormalised sum.

A step may take several micro-batches, so nothing here divides by a count that is only a micro-batch's.
Axes: N targets, flat; a sequence's targets are all in one micro-batch.
"""

from __future__ import annotations

from typing import NamedTuple

import jax.numpy as jnp
from jax import Array
from jax.lax import stop_gradient

from gymllm_trainers.algorithms import corrections, losses
from gymllm_trainers.algorithms.algorithm import Algorithm
from gymllm_trainers.algorithms.diagnostics import PolicySums, distance_sums, lag_sums
from gymllm_trainers.algorithms.kl import kl_estimate
from gymllm_trainers.algorithms.losses import TokenLoss, ValueLoss, value_loss


class Targets(NamedTuple):
    """What is known of each target; shape [N], float32 unless said otherwise."""

    logprob: Array
    """Log-probability (nats) under the policy being trained; carries the gradient."""
    entropy: Array
    """Of the distribution that the token was drawn from, nats; carries the gradient."""
    behaviour: Array
    """Log-probability under the policy that made the token."""
    advantage: Array
    weight: Array
    """The aggregation's (`aggregation.token_weight`)."""
    mask: Array
    """1 where there is a target, else 0: nothing else of it counts, not even if it is no number."""
    age: Array
    """Policy versions between the one that made the token and the one at the start of the update, >= 0."""
    sequence: Array
    """Number of its sequence, int32, unique in the micro-batch, below the bound that `objective` gets."""
    proximal: Array | None = None
    """Log-probability at the start of the update; None: the policy being trained is that one."""
    reference: Array | None = None
    """Log-probability under the reference; needed where kl_coef > 0, else only measured."""
    value: Array | None = None
    """Value before the token; carries the gradient. With it `old_value` and `returns` are needed."""
    old_value: Array | None = None
    """The same at the start of the update."""
    returns: Array | None = None
    """What the value should have been."""


class Objective(NamedTuple):
    """Of one micro-batch."""

    loss: Array
    """Scalar, float32: weights applied, not divided."""
    sums: PolicySums


def objective(algorithm: Algorithm, targets: Targets, *, sequences: int) -> Objective:
    """The loss of a micro-batch, and what it says of itself.

    sum of weight * (correction * policy loss + kl_coef * KL + value_coef * value loss - entropy_coef *
    entropy): the correction weights the policy loss alone. Differentiate `loss` by what `logprob`,
    `entropy` and `value` came from; add up gradients and sums over a step's micro-batches, and divide the
    gradient by `aggregation.divisor`.

    Args:
        algorithm: What `resolve` gave.
        targets: The micro-batch.
        sequences: More than any number in `targets.sequence`; static.

    Raises:
        ValueError: The algorithm needs a reference or values, and there are none; or values without a use.
    """
    _require(algorithm, targets)
    targets = _without_padding(targets)
    mask_N = targets.mask
    proximal_N = _proximal(algorithm, targets)
    base_N = targets.behaviour if algorithm.correction == "off" else proximal_N
    token = _policy_loss(algorithm, targets, base_N, sequences)
    correction_N = _correction(algorithm, targets, proximal_N, sequences)
    loss_N = token.loss * correction_N
    if algorithm.kl_coef > 0 and targets.reference is not None:
        kl_N = kl_estimate(algorithm.kl_form, targets.logprob, targets.reference)
        loss_N += algorithm.kl_coef * kl_N
    if algorithm.entropy_coef > 0:
        loss_N -= algorithm.entropy_coef * targets.entropy
    value: ValueLoss | None = None
    if targets.value is not None and targets.old_value is not None and targets.returns is not None:
        value = value_loss(
            targets.value, targets.old_value, targets.returns, clip=algorithm.value_clip
        )
        loss_N += algorithm.value_coef * value.loss
    loss = jnp.sum(loss_N * targets.weight * mask_N)
    sums = {
        "tokens": jnp.sum(mask_N),
        "loss": stop_gradient(loss),
        "entropy": jnp.sum(stop_gradient(targets.entropy) * mask_N),
        "clipped_low": jnp.sum(token.clipped_low * mask_N),
        "clipped_high": jnp.sum(token.clipped_high * mask_N),
        "advantage": jnp.sum(targets.advantage * mask_N),
        "advantage_square": jnp.sum(targets.advantage**2 * mask_N),
        "weight": jnp.sum(correction_N * mask_N),
        "weight_max": jnp.max(correction_N * mask_N),
        "dropped": jnp.sum((correction_N == 0) * mask_N),
    }
    sums |= distance_sums(targets.logprob, proximal_N, targets.behaviour, mask_N)
    sums |= lag_sums(targets.age, mask_N)
    sums |= _reference_sums(targets) | _value_sums(targets, value)
    return Objective(loss, PolicySums(**sums))


def _require(algorithm: Algorithm, targets: Targets) -> None:
    if algorithm.needs_reference and targets.reference is None:
        raise ValueError(f"kl_coef = {algorithm.kl_coef:g} needs Targets.reference, got None.")
    parts = (targets.value, targets.old_value, targets.returns)
    if any((part is not None) != algorithm.needs_values for part in parts):
        raise ValueError(
            f"advantage {algorithm.advantage} {'needs' if algorithm.needs_values else 'takes no'} value, "
            "old_value and returns in Targets."
        )


def _without_padding(targets: Targets) -> Targets:
    """The same with 0 wherever there is no target, so that what stands there can't be felt."""
    there_N = targets.mask > 0

    def clean(value_N: Array | None) -> Array | None:
        return None if value_N is None else jnp.where(there_N, value_N, 0)

    # What may be None is None before as after.
    return Targets(*(clean(value_N) for value_N in targets))  # pyright: ignore[reportArgumentType]


def _proximal(algorithm: Algorithm, targets: Targets) -> Array:
    """Log-probability at the start of the update, or what stands for it; no gradient."""
    if algorithm.proximal == "loglinear":
        return corrections.loglinear_proximal(targets.logprob, targets.behaviour, targets.age)
    if algorithm.proximal == "current" or targets.proximal is None:
        return stop_gradient(targets.logprob)
    return stop_gradient(targets.proximal)


def _policy_loss(
    algorithm: Algorithm, targets: Targets, base_N: Array, sequences: int
) -> TokenLoss:
    logprob_N, advantage_N = targets.logprob, targets.advantage
    low, high = algorithm.clip_low, algorithm.clip_high
    match algorithm.loss:
        case "ppo_clip":
            return losses.ppo_clip(logprob_N, base_N, advantage_N, clip_low=low, clip_high=high)
        case "dual_clip":
            return losses.dual_clip(
                logprob_N,
                base_N,
                advantage_N,
                clip_low=low,
                clip_high=high,
                bound=algorithm.dual_clip,
            )
        case "gspo":
            return losses.gspo(
                logprob_N,
                base_N,
                advantage_N,
                targets.mask,
                targets.sequence,
                sequences=sequences,
                clip_low=low,
                clip_high=high,
            )
        case "cispo":
            return losses.cispo(logprob_N, base_N, advantage_N, clip_low=low, clip_high=high)
        case "dppo_tv":
            return losses.dppo_tv(
                logprob_N,
                base_N,
                targets.behaviour,
                advantage_N,
                low=low,
                high=high,
                cap=algorithm.ratio_cap,
            )
        case "reinforce":
            return losses.reinforce(logprob_N, advantage_N)
        case "sapo":
            return losses.sapo(
                logprob_N,
                base_N,
                advantage_N,
                positive=algorithm.sapo_positive,
                negative=algorithm.sapo_negative,
            )
        case "supervised":
            return losses.supervised(logprob_N)


def _correction(algorithm: Algorithm, targets: Targets, proximal_N: Array, sequences: int) -> Array:
    behaviour_N = targets.behaviour
    cap, floor = algorithm.correction_cap, algorithm.correction_floor
    match algorithm.correction:
        case "off":
            return jnp.ones_like(proximal_N)
        case "decoupled":
            return corrections.decoupled(proximal_N, behaviour_N, cap=cap)
        case "tis_token":
            return corrections.tis_token(proximal_N, behaviour_N, cap=cap)
        case "icepop":
            return corrections.icepop(proximal_N, behaviour_N, floor=floor, cap=cap)
        case "tis_sequence":
            return corrections.tis_sequence(
                proximal_N,
                behaviour_N,
                targets.mask,
                targets.sequence,
                sequences=sequences,
                cap=cap,
            )
        case "geometric_mask":
            return corrections.geometric_mask(
                proximal_N,
                behaviour_N,
                targets.mask,
                targets.sequence,
                sequences=sequences,
                floor=floor,
                cap=cap,
            )


def _reference_sums(targets: Targets) -> dict[str, Array]:
    if targets.reference is None:
        nothing = jnp.zeros((), jnp.float32)
        return {"referred": nothing, "reference_k1": nothing, "reference_k3": nothing}
    logprob_N, mask_N = stop_gradient(targets.logprob), targets.mask
    return {
        "referred": jnp.sum(mask_N),
        "reference_k1": jnp.sum(kl_estimate("k1", logprob_N, targets.reference) * mask_N),
        "reference_k3": jnp.sum(kl_estimate("k3", logprob_N, targets.reference) * mask_N),
    }


def _value_sums(targets: Targets, value: ValueLoss | None) -> dict[str, Array]:
    names = (
        "valued",
        "value_loss",
        "value_clipped",
        "value_error",
        "value_error_square",
        "returns",
        "returns_square",
    )
    if value is None or targets.returns is None or targets.old_value is None:
        return dict.fromkeys(names, jnp.zeros((), jnp.float32))
    error_N = targets.returns - targets.old_value
    columns = (
        jnp.ones_like(error_N),
        stop_gradient(value.loss),
        value.clipped,
        error_N,
        error_N**2,
        targets.returns,
        targets.returns**2,
    )
    return {
        name: jnp.sum(column_N * targets.mask)
        for name, column_N in zip(names, columns, strict=True)
    }
