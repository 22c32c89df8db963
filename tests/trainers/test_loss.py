"""Losses: against NumPy, by hand, and by finite differences."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gymllm_trainers.loss import (
    correction_weight,
    ppo_clip,
    reinforce,
)


def ppo_reference(
    logprob: float, proximal: float, advantage: float, low: float, high: float
) -> float:
    ratio = np.exp(logprob - proximal)
    held = min(max(ratio, 1 - low), 1 + high)
    return -min(ratio * advantage, held * advantage)


def test_ppo_clip_agrees_with_the_reference() -> None:
    rng = np.random.default_rng(0)
    logprob, proximal = -rng.exponential(size=(2, 500)).astype(np.float32)
    advantage = rng.normal(size=500).astype(np.float32)
    token = ppo_clip(logprob, proximal, advantage, clip_low=0.1, clip_high=0.3)
    expected = [
        ppo_reference(*row, 0.1, 0.3) for row in zip(logprob, proximal, advantage, strict=True)
    ]
    np.testing.assert_allclose(token.loss, expected, rtol=1e-5)


def test_ppo_clip_by_hand() -> None:
    ratio = np.array([1.0, 1.5, 1.5, 0.5, 0.5, 1.28, 0.8])
    advantage = np.array([2.0, 2.0, -2.0, 2.0, -2.0, 1.0, -1.0])
    token = ppo_clip(jnp.log(ratio), jnp.zeros(7), advantage, clip_low=0.2, clip_high=0.28)
    np.testing.assert_allclose(token.loss, [-2, -2.56, 3, -1, 1.6, -1.28, 0.8], rtol=1e-6)
    np.testing.assert_array_equal(token.clipped_high[:5], [0, 1, 0, 0, 0])
    np.testing.assert_array_equal(token.clipped_low[:5], [0, 0, 0, 0, 1])


def test_clipped_tokens_are_those_without_gradient() -> None:
    rng = np.random.default_rng(1)
    logprob, proximal = -rng.exponential(size=(2, 300)).astype(np.float32)
    advantage = rng.normal(size=300).astype(np.float32)
    token = ppo_clip(logprob, proximal, advantage)
    gradient = jax.jit(jax.grad(lambda values: ppo_clip(values, proximal, advantage).loss.sum()))(
        logprob
    )
    clipped = np.asarray(token.clipped_low + token.clipped_high)
    assert set(clipped.tolist()) == {0.0, 1.0}
    np.testing.assert_array_equal(np.asarray(gradient) == 0, clipped == 1)


def test_reinforce_with_advantage_one_is_the_supervised_loss() -> None:
    logprob = np.array([-0.5, -3.0, 0.0], np.float32)
    np.testing.assert_array_equal(reinforce(logprob, np.ones(3, np.float32)).loss, -logprob)
    np.testing.assert_array_equal(reinforce(logprob, np.float32([2, -1, 5])).loss, [1, -3, 0])


@pytest.mark.parametrize("loss", ["ppo_clip", "reinforce"])
def test_gradients_agree_with_finite_differences(loss: str) -> None:
    rng = np.random.default_rng(2)
    advantage = rng.normal(size=40)
    proximal = -rng.exponential(size=40)
    # Away from the clip's corners, where there is no derivative.
    ratio = rng.choice([0.5, 0.79, 0.81, 1.0, 1.27, 1.29, 2.0], size=40)
    logprob = proximal + np.log(ratio)
    with jax.enable_x64():

        def total(values: jax.Array) -> jax.Array:
            if loss == "ppo_clip":
                return ppo_clip(values, jnp.asarray(proximal), jnp.asarray(advantage)).loss.sum()
            return reinforce(values, jnp.asarray(advantage)).loss.sum()

        gradient = np.asarray(jax.jit(jax.grad(total))(jnp.asarray(logprob)))
        step = 1e-6 * jnp.eye(40)
        totals = jax.jit(jax.vmap(total))
        expected = np.asarray(totals(logprob + step) - totals(logprob - step)) / 2e-6
    np.testing.assert_allclose(gradient, expected, atol=1e-7)


def test_correction_weight_is_the_capped_ratio_and_carries_no_gradient() -> None:
    proximal, behaviour = np.log([[0.5, 0.1, 0.9], [0.5, 0.4, 0.1]]).astype(np.float32)
    np.testing.assert_allclose(correction_weight(proximal, behaviour), [1, 0.25, 2], rtol=1e-6)
    np.testing.assert_allclose(correction_weight(proximal, behaviour, cap=5)[2], 5, rtol=1e-6)
    far = correction_weight(np.float32([0, -1e4]), np.float32([-1e4, 0]))
    assert np.isfinite(far).all()
    np.testing.assert_allclose(far, [2, 0], atol=1e-8)
    for argument in (0, 1):
        gradient = jax.grad(lambda *a: correction_weight(*a).sum(), argument)(proximal, behaviour)
        assert not gradient.any()
