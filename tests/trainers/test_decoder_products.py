"""Products and experts: against NumPy, forward and backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gymllm_trainers.models.experts import mix_experts
from gymllm_trainers.models.product import product


def test_product_in_bfloat16_sums_in_float32_both_ways() -> None:
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(512, 96)), jnp.bfloat16)
    kernel = jnp.asarray(rng.normal(size=(96, 64)), jnp.float32)
    weight = jnp.asarray(rng.normal(size=(512, 64)), jnp.bfloat16)

    def loss(x: jax.Array, kernel: jax.Array) -> jax.Array:
        return jnp.sum((product(x, kernel) * weight).astype(jnp.float32))

    out = product(x, kernel)
    dx, dkernel = jax.grad(loss, (0, 1))(x, kernel)
    assert (out.dtype, dx.dtype, dkernel.dtype) == (jnp.bfloat16, jnp.bfloat16, jnp.float32)
    exact_x, exact_weight = np.asarray(x, np.float64), np.asarray(weight, np.float64)
    exact_kernel = np.asarray(kernel.astype(jnp.bfloat16), np.float64)
    # One rounding to bfloat16, whose eight bits leave 1/512 of a value.
    np.testing.assert_allclose(
        np.asarray(out, float), exact_x @ exact_kernel, rtol=1 / 256, atol=1e-4
    )
    expected = exact_weight @ exact_kernel.T
    np.testing.assert_allclose(np.asarray(dx, float), expected, rtol=1 / 256, atol=1e-4)
    # A sum over 512 tokens that was rounded to bfloat16 would be off by 0.05.
    np.testing.assert_allclose(dkernel, exact_x.T @ exact_weight, atol=1e-3, rtol=0)


EXPERTS, PER_TOKEN, TOKENS, MODEL, INNER = 5, 2, 11, 6, 4
Weights = tuple[jax.Array, jax.Array, jax.Array, jax.Array, jax.Array]


@pytest.fixture(scope="module")
def weights() -> Weights:
    """Tokens, router and the experts' kernels; expert 4 is never chosen."""
    rng = np.random.default_rng(0)
    shapes = [
        (TOKENS, MODEL),
        (MODEL, EXPERTS),
        (EXPERTS, MODEL, INNER),
        (EXPERTS, MODEL, INNER),
        (EXPERTS, INNER, MODEL),
    ]
    x, router, *kernels = (jnp.asarray(rng.normal(size=s) / 2, jnp.float32) for s in shapes)
    x = x.at[:, 0].set(1.0)
    return x, router.at[0, 4].set(-50.0), *kernels


def run(weights: Weights, implementation: Literal["dense", "ragged"]) -> jax.Array:
    return mix_experts(
        *weights,
        experts_per_token=PER_TOKEN,
        normalise=True,
        activation=jax.nn.silu,
        implementation=implementation,
    )


def by_hand(weights: Weights) -> np.ndarray:
    x, router, gate, up, down = (np.asarray(part, np.float64) for part in weights)
    out = np.zeros_like(x)
    for row, token in enumerate(x):
        shares = np.exp(token @ router)
        chosen = np.argsort(-shares)[:PER_TOKEN]
        for expert in chosen:
            inner = token @ gate[expert]
            inner = inner / (1 + np.exp(-inner)) * (token @ up[expert])
            out[row] += shares[expert] / shares[chosen].sum() * (inner @ down[expert])
    return out


@pytest.mark.parametrize("implementation", ["dense", "ragged"])
def test_experts_agree_with_numpy(
    weights: Weights, implementation: Literal["dense", "ragged"]
) -> None:
    np.testing.assert_allclose(run(weights, implementation), by_hand(weights), atol=1e-5)


def test_no_token_is_dropped_when_all_choose_the_same(weights: Weights) -> None:
    x, router, *kernels = weights
    crowded = (x, router.at[0, :2].set(60.0), *kernels)
    for implementation in ("dense", "ragged"):
        np.testing.assert_allclose(run(crowded, implementation), by_hand(crowded), atol=1e-5)


def test_gradients_of_both_ways_agree_and_follow_the_loss(weights: Weights) -> None:
    def gradient(implementation: Literal["dense", "ragged"]) -> Weights:
        return jax.jit(jax.grad(lambda w: jnp.sum(jnp.sin(run(w, implementation)))))(weights)

    dense, ragged = gradient("dense"), gradient("ragged")
    for left, right in zip(dense, ragged, strict=True):
        np.testing.assert_allclose(left, right, atol=1e-5)
        assert np.abs(left).max() > 1e-2
    assert not np.abs(dense[2][4]).any(), "an expert that nobody chose isn't moved"
    # And a step along it changes the loss by as much as it says, experts' choice unchanged.
    step = 1e-4
    moved = tuple(
        np.asarray(w, np.float64) + step * np.asarray(g)
        for w, g in zip(weights, dense, strict=True)
    )
    loss: Callable[[Weights], float] = lambda w: float(np.sin(by_hand(w)).sum())  # noqa: E731
    expected = step * sum(float(np.sum(np.square(g, dtype=np.float64))) for g in dense)
    assert loss(moved) - loss(weights) == pytest.approx(expected, rel=0.02)


def test_a_token_does_not_depend_on_the_others(weights: Weights) -> None:
    x, *rest = weights
    whole = run(weights, "dense")
    np.testing.assert_array_equal(run((x.at[3:].set(7.0), *rest), "dense")[:3], whole[:3])
