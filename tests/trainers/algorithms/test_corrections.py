"""Corrections and KL estimates: against NumPy, by hand, and what carries a gradient."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gymllm_trainers.algorithms import corrections
from gymllm_trainers.algorithms.kl import k3, kl_estimate

Draw = dict[str, np.ndarray]


def test_weights_agree_with_the_reference(draw: Draw) -> None:
    proximal, behaviour, mask = draw["proximal"], draw["behaviour"], draw["mask"]
    sequence = draw["sequence"]
    u = np.exp(proximal - behaviour)
    with jax.enable_x64():
        found = {
            "decoupled": corrections.decoupled(proximal, behaviour, cap=1.2),
            "tis_token": corrections.tis_token(proximal, behaviour, cap=1.2),
            "icepop": corrections.icepop(proximal, behaviour, floor=0.8, cap=1.2),
            "tis_sequence": corrections.tis_sequence(
                proximal, behaviour, mask, sequence, sequences=5, cap=1.2
            ),
            "geometric_mask": corrections.geometric_mask(
                proximal, behaviour, mask, sequence, sequences=5, floor=0.9, cap=1.1
            ),
        }
    for t in range(len(u)):
        same = (sequence == sequence[t]) & (mask == 1)
        product = np.prod(u[same])
        mean = product ** (1 / max(same.sum(), 1))
        expected = {
            "decoupled": min(u[t], 1.2),
            "tis_token": min(u[t], 1.2),
            "icepop": u[t] if 0.8 <= u[t] <= 1.2 else 0.0,
            "tis_sequence": min(product, 1.2),
            "geometric_mask": float(0.9 <= mean <= 1.1),
        }
        for name, value in expected.items():
            np.testing.assert_allclose(found[name][t], value, rtol=1e-12, err_msg=name)
    for name in ("icepop", "geometric_mask"):  # both outcomes were seen
        assert 0 < np.count_nonzero(found[name]) < len(u)


def test_weights_by_hand() -> None:
    proximal, behaviour = np.log([[0.5, 0.1, 0.9, 0.5], [0.5, 0.4, 0.1, 0.4]]).astype(np.float32)
    # u = 1, 1/4, 9, 5/4
    np.testing.assert_allclose(
        corrections.decoupled(proximal, behaviour), [1, 0.25, 2, 1.25], rtol=1e-6
    )
    np.testing.assert_allclose(corrections.icepop(proximal, behaviour), [1, 0, 0, 1.25], rtol=1e-6)
    mask, sequence = np.float32([1, 1, 1, 0]), np.int32([0, 0, 1, 1])
    np.testing.assert_allclose(
        corrections.tis_sequence(proximal, behaviour, mask, sequence, sequences=2),
        [0.25, 0.25, 2, 2],
        rtol=1e-6,
    )
    # Geometric means 1/2 and 9.
    for floor, cap, kept in ((0.49, 1.01, [1, 1, 0, 0]), (0.99, 9.1, [0, 0, 1, 1])):
        found = corrections.geometric_mask(
            proximal, behaviour, mask, sequence, sequences=2, floor=floor, cap=cap
        )
        np.testing.assert_array_equal(found, kept)


def test_far_policies_give_finite_weights() -> None:
    near, far = np.float32([0, -1e4]), np.float32([-1e4, 0])
    sequences = (np.ones(2, np.float32), np.int32([0, 1]))
    found = [
        corrections.decoupled(near, far),
        corrections.tis_sequence(near, far, *sequences, sequences=2),
    ]
    for weight in found:
        np.testing.assert_allclose(weight, [2, 0], atol=1e-8)
    np.testing.assert_array_equal(corrections.icepop(near, far), [0, 0])


@pytest.mark.parametrize("argument", [0, 1])
def test_weights_carry_no_gradient(argument: int, draw: Draw) -> None:
    mask, sequence = draw["mask"], draw["sequence"]

    def total(proximal: jax.Array, behaviour: jax.Array) -> jax.Array:
        weights = (
            corrections.decoupled(proximal, behaviour),
            corrections.icepop(proximal, behaviour),
            corrections.tis_sequence(proximal, behaviour, mask, sequence, sequences=5),
            corrections.geometric_mask(proximal, behaviour, mask, sequence, sequences=5),
            corrections.loglinear_proximal(proximal, behaviour, draw["age"]),
        )
        return sum(weight.sum() for weight in weights)

    gradient = jax.grad(total, argument)(
        jnp.float32(draw["proximal"]), jnp.float32(draw["behaviour"])
    )
    assert not gradient.any()


def test_loglinear_is_on_the_line_between_the_two_policies() -> None:
    logprob, behaviour = jnp.float32([-1, -1, -1]), jnp.float32([-3, -3, -3])
    found = corrections.loglinear_proximal(logprob, behaviour, jnp.float32([0, 1, 3]))
    np.testing.assert_allclose(found, [-3, -2, -1.5])
    nearer = corrections.loglinear_proximal(logprob, behaviour, jnp.float32([0, 1, 3]), ahead=3)
    np.testing.assert_allclose(nearer, [-3, -2.5, -2])


def test_kl_estimates_agree_with_the_reference(draw: Draw, derivative) -> None:
    point, reference = draw["logprob"], draw["reference"]

    def estimate(form: str, x: np.ndarray) -> np.ndarray:
        d = reference - x
        return {"k1": -d, "k2": d**2 / 2, "k3": np.exp(d) - d - 1}[form]

    for form, value, slope in (
        ("k1", "k1", "k1"),
        ("k2", "k2", "k2"),
        ("k3", "k3", "k3"),
        ("k3+", "k3", "k2"),
    ):
        with jax.enable_x64():
            x = jnp.asarray(point)
            found = kl_estimate(form, x, reference)
            gradient = jax.grad(lambda x, form=form: kl_estimate(form, x, reference).sum())(x)
        np.testing.assert_allclose(found, estimate(value, point), rtol=1e-10, atol=1e-12)
        expected = derivative(lambda x, slope=slope: float(estimate(slope, x).sum()), point)
        np.testing.assert_allclose(gradient, expected, atol=1e-7, err_msg=form)


def test_kl_estimates_by_hand() -> None:
    logprob, reference = jnp.log(jnp.array([0.5, 0.25])), jnp.log(jnp.array([0.25, 0.5]))
    log2 = np.log(2)
    for form, expected in (
        ("k1", [log2, -log2]),
        ("k2", [log2**2 / 2, log2**2 / 2]),
        ("k3", [0.5 + log2 - 1, 2 - log2 - 1]),
        ("k3+", [0.5 + log2 - 1, 2 - log2 - 1]),
    ):
        np.testing.assert_allclose(kl_estimate(form, logprob, reference), expected, rtol=1e-5)


def test_only_k2_has_the_gradient_of_the_divergence_on_the_policy_s_own_tokens() -> None:
    """Exactly, by summing over a whole vocabulary with the policy's probabilities."""
    with jax.enable_x64():
        rng = np.random.default_rng(8)
        logits, reference = jnp.asarray(rng.normal(size=(2, 6)))
        reference = jax.nn.log_softmax(reference)

        def divergence(logits: jax.Array) -> jax.Array:
            logprob = jax.nn.log_softmax(logits)
            return jnp.sum(jnp.exp(logprob) * (logprob - reference))

        def expected(logits: jax.Array, form: str) -> jax.Array:
            logprob = jax.nn.log_softmax(logits)
            chance = jax.lax.stop_gradient(jnp.exp(logprob))
            return jnp.sum(chance * kl_estimate(form, logprob, reference))

        wanted = jax.grad(divergence)(logits)
        for form, right in (("k1", False), ("k2", True), ("k3", False), ("k3+", True)):
            gradient = jax.grad(expected)(logits, form)
            assert np.allclose(gradient, wanted, atol=1e-12) == right, form
        np.testing.assert_allclose(jax.grad(expected)(logits, "k1"), np.zeros(6), atol=1e-12)


def test_k3_is_finite_and_exact_near_zero() -> None:
    found = k3(jnp.float32([1e-3, 0, 500, -500]))
    np.testing.assert_allclose(found[0], 5.0017e-7, rtol=1e-3)
    assert found[1] == 0
    assert np.isfinite(found).all()
