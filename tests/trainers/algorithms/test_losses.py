"""Losses: against NumPy, by hand, and by finite differences of what stop-gradients leave to be moved.

A reference is a function of two log-probabilities: the one that is differentiated, and the same numbers
where the formula stops the gradient.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gymllm_trainers.algorithms import losses
from gymllm_trainers.algorithms.losses import TokenLoss

Numbers = np.ndarray
Draw = dict[str, Numbers]
SEQUENCES = 5


def clipped(ratio: float, advantage: float, low: float, high: float) -> float:
    held = min(max(ratio, 1 - low), 1 + high)
    return -min(ratio * advantage, held * advantage)


def ppo_clip(d: Draw, x: Numbers, held: Numbers) -> list[float]:
    rows = zip(x, d["proximal"], d["advantage"], strict=True)
    return [clipped(np.exp(a - b), advantage, 0.2, 0.28) for a, b, advantage in rows]


def dual_clip(d: Draw, x: Numbers, held: Numbers) -> list[float]:
    found = []
    for a, b, advantage in zip(x, d["proximal"], d["advantage"], strict=True):
        loss = clipped(np.exp(a - b), advantage, 0.2, 0.2)
        found.append(min(loss, -3 * advantage) if advantage < 0 else loss)
    return found


def gspo(d: Draw, x: Numbers, held: Numbers) -> list[float]:
    found = []
    for t, number in enumerate(d["sequence"]):
        members = [i for i, n in enumerate(d["sequence"]) if n == number and d["mask"][i]]
        gap = sum(held[i] - d["proximal"][i] for i in members) / max(len(members), 1)
        found.append(clipped(np.exp(gap) * np.exp(x[t] - held[t]), d["advantage"][t], 0.15, 0.25))
    return found


def cispo(d: Draw, x: Numbers, held: Numbers) -> list[float]:
    weight = np.clip(np.exp(held - d["proximal"]), 1 - 0.4, 1 + 0.6)
    return list(-weight * d["advantage"] * x)


def dppo_tv(d: Draw, x: Numbers, held: Numbers) -> list[float]:
    found = []
    for t in range(len(x)):
        moved = np.exp(held[t]) - np.exp(d["behaviour"][t])
        advantage = d["advantage"][t]
        out = (advantage > 0 and moved > 0.05) or (advantage < 0 and moved < -0.1)
        weight = min(np.exp(held[t] - d["proximal"][t]), 2.5)
        found.append(0.0 if out else -weight * advantage * x[t])
    return found


def reinforce(d: Draw, x: Numbers, held: Numbers) -> list[float]:
    return [-a * b for a, b in zip(d["advantage"], x, strict=True)]


def sapo(d: Draw, x: Numbers, held: Numbers) -> list[float]:
    found = []
    for a, b, advantage in zip(x, d["proximal"], d["advantage"], strict=True):
        t = 1.0 if advantage > 0 else 1.05
        found.append(-advantage * 4 / t / (1 + np.exp(-t * (np.exp(a - b) - 1))))
    return found


def supervised(d: Draw, x: Numbers, held: Numbers) -> list[float]:
    return [-a for a in x]


def ours(name: str, d: Draw, x: jax.Array) -> TokenLoss:
    proximal, advantage = d["proximal"], d["advantage"]
    match name:
        case "ppo_clip":
            return losses.ppo_clip(x, proximal, advantage)
        case "dual_clip":
            return losses.dual_clip(x, proximal, advantage)
        case "gspo":
            return losses.gspo(
                x,
                proximal,
                advantage,
                d["mask"],
                d["sequence"],
                sequences=SEQUENCES,
                clip_low=0.15,
                clip_high=0.25,
            )
        case "cispo":
            return losses.cispo(x, proximal, advantage, clip_low=0.4, clip_high=0.6)
        case "dppo_tv":
            return losses.dppo_tv(
                x, proximal, d["behaviour"], advantage, low=0.1, high=0.05, cap=2.5
            )
        case "reinforce":
            return losses.reinforce(x, advantage)
        case "sapo":
            return losses.sapo(x, proximal, advantage)
        case _:
            return losses.supervised(x)


REFERENCES: dict[str, Callable[[Draw, Numbers, Numbers], list[float]]] = {
    "ppo_clip": ppo_clip,
    "dual_clip": dual_clip,
    "gspo": gspo,
    "cispo": cispo,
    "dppo_tv": dppo_tv,
    "reinforce": reinforce,
    "sapo": sapo,
    "supervised": supervised,
}


@pytest.mark.parametrize("name", REFERENCES)
def test_agrees_with_the_reference(name: str, draw: Draw) -> None:
    narrow = {
        key: value.astype(np.float32) if value.dtype == np.float64 else value
        for key, value in draw.items()
    }
    token = ours(name, narrow, jnp.asarray(narrow["logprob"]))
    expected = REFERENCES[name](draw, draw["logprob"], draw["logprob"])
    np.testing.assert_allclose(token.loss, expected, rtol=2e-5, atol=1e-6)
    assert token.loss.dtype == token.clipped_low.dtype == token.clipped_high.dtype == jnp.float32


@pytest.mark.parametrize("name", REFERENCES)
def test_gradient_agrees_with_finite_differences(name: str, draw: Draw, derivative) -> None:
    with jax.enable_x64():
        gradient = jax.grad(lambda x: ours(name, draw, x).loss.sum())(jnp.asarray(draw["logprob"]))
    point = draw["logprob"]
    expected = derivative(lambda x: float(np.sum(REFERENCES[name](draw, x, point))), point)
    np.testing.assert_allclose(gradient, expected, atol=1e-8)
    assert np.abs(expected).max() > 0.1


@pytest.mark.parametrize("name", ["ppo_clip", "dual_clip", "gspo", "dppo_tv"])
def test_marked_tokens_are_those_without_gradient(name: str, draw: Draw) -> None:
    with jax.enable_x64():
        x = jnp.asarray(draw["logprob"])
        gradient = jax.grad(lambda x: ours(name, draw, x).loss.sum())(x)
        token = ours(name, draw, x)
    marked = np.asarray(token.clipped_low + token.clipped_high)
    assert set(marked.tolist()) == {0.0, 1.0}
    np.testing.assert_array_equal(np.asarray(gradient) == 0, marked == 1)


def test_ppo_clip_by_hand() -> None:
    ratio = np.array([1.0, 1.5, 1.5, 0.5, 0.5, 1.28, 0.8])
    advantage = np.array([2.0, 2.0, -2.0, 2.0, -2.0, 1.0, -1.0])
    token = losses.ppo_clip(jnp.log(ratio), jnp.zeros(7), advantage, clip_low=0.2, clip_high=0.28)
    np.testing.assert_allclose(token.loss, [-2, -2.56, 3, -1, 1.6, -1.28, 0.8], rtol=1e-6)
    np.testing.assert_array_equal(token.clipped_high[:5], [0, 1, 0, 0, 0])
    np.testing.assert_array_equal(token.clipped_low[:5], [0, 0, 0, 0, 1])


def test_dual_clip_by_hand() -> None:
    logprob, zeros = jnp.log(jnp.array([5.0, 5.0, 0.5])), jnp.zeros(3)
    token = losses.dual_clip(logprob, zeros, jnp.array([-1.0, 1.0, -1.0]), bound=3.0)
    # 5 would be the loss of the first: held at 3. The second is clipped at 1.2, the third at 0.8.
    np.testing.assert_allclose(token.loss, [3, -1.2, 0.8], rtol=1e-6)
    np.testing.assert_array_equal(token.clipped_high, [1, 1, 0])
    np.testing.assert_array_equal(token.clipped_low, [0, 0, 1])


def test_gspo_by_hand() -> None:
    # Sequence 0: ratios 2 and 1/2, geometric mean 1. Sequence 1: ratios 4 and, masked, 100: 4.
    logprob = jnp.log(jnp.array([2.0, 0.5, 4.0, 100.0]))
    token = losses.gspo(
        logprob,
        jnp.zeros(4),
        jnp.array([1.0, -3.0, 1.0, 1.0]),
        jnp.array([1.0, 1.0, 1.0, 0.0]),
        jnp.array([0, 0, 1, 1]),
        sequences=3,
        clip_low=0.2,
        clip_high=0.2,
    )
    np.testing.assert_allclose(token.loss, [-1, 3, -1.2, -1.2], rtol=1e-6)
    np.testing.assert_array_equal(token.clipped_high, [0, 0, 1, 1])


def test_cispo_by_hand() -> None:
    logprob = jnp.log(jnp.array([0.5, 0.5, 0.5]))
    proximal = jnp.log(jnp.array([0.5, 0.05, 1.0]))  # ratios 1, 10, 0.5
    token = losses.cispo(logprob, proximal, jnp.array([1.0, -1.0, 2.0]))
    log_half = np.log(0.5)
    np.testing.assert_allclose(token.loss, [-log_half, 5 * log_half, -log_half], rtol=1e-6)
    np.testing.assert_array_equal(token.clipped_high, [0, 1, 0])
    gradient = jax.grad(
        lambda x: losses.cispo(x, proximal, jnp.array([1.0, -1.0, 2.0])).loss.sum()
    )(logprob)
    np.testing.assert_allclose(gradient, [-1, 5, -1], rtol=1e-6)  # clipped, and yet it learns


def test_dppo_tv_by_hand() -> None:
    logprob, behaviour = jnp.log(jnp.array([[0.8, 0.8, 0.1, 0.1], [0.5, 0.5, 0.4, 0.4]]))
    advantage = jnp.array([1.0, -1.0, -1.0, 1.0])
    token = losses.dppo_tv(logprob, behaviour, behaviour, advantage)
    # Moves of +0.3 and -0.3, in the advantage's direction (out) and against it (in).
    expected = [0, 1.6 * np.log(0.8), 0, -0.25 * np.log(0.1)]
    np.testing.assert_allclose(token.loss, expected, rtol=1e-5)
    np.testing.assert_array_equal(token.clipped_high, [1, 0, 0, 0])
    np.testing.assert_array_equal(token.clipped_low, [0, 0, 1, 0])


def test_sapo_by_hand() -> None:
    same = jnp.log(jnp.array([0.3, 0.3]))
    advantage = jnp.array([2.0, -2.0])
    token = losses.sapo(same, same, advantage)
    # At ratio 1 the gate is half open: 4 / t / 2, with the ratio's own slope.
    np.testing.assert_allclose(token.loss, [-2 * 2, 2 * 2 / 1.05], rtol=1e-6)
    gradient = jax.grad(lambda x: losses.sapo(x, same, advantage).loss.sum())(same)
    np.testing.assert_allclose(gradient, [-2, 2], rtol=1e-6)


def test_reinforce_and_supervised_by_hand() -> None:
    logprob = np.array([-0.5, -3.0, 0.0], np.float32)
    np.testing.assert_array_equal(losses.supervised(logprob).loss, [0.5, 3, 0])
    np.testing.assert_array_equal(
        losses.reinforce(logprob, np.float32([2, -1, 5])).loss, [1, -3, 0]
    )


@pytest.mark.parametrize("name", ["ppo_clip", "dual_clip", "gspo", "cispo", "dppo_tv", "sapo"])
def test_far_policies_give_finite_losses_and_gradients(name: str) -> None:
    far = {
        "proximal": np.float32([-500, 0, -1e4, 0]),
        "behaviour": np.float32([-500, 0, 0, -1e4]),
        "advantage": np.float32([1, 1, -1, -1]),
        "mask": np.ones(4, np.float32),
        "sequence": np.int32([0, 1, 2, 3]),
    }
    x = jnp.float32([0, -500, 0, -1e4])
    loss, gradient = jax.value_and_grad(lambda x: ours(name, far, x).loss.sum())(x)
    assert np.isfinite(loss)
    assert np.isfinite(gradient).all()


@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_value_loss_agrees_with_the_reference(clip: float, draw: Draw, derivative) -> None:
    old, returns = draw["old_value"], draw["returns"]

    def reference(value: Numbers) -> float:
        total = 0.0
        for v, o, r in zip(value, old, returns, strict=True):
            held = min(max(v, o - clip), o + clip) if clip else v
            total += max((v - r) ** 2, (held - r) ** 2) / 2
        return total

    with jax.enable_x64():
        loss, gradient = jax.value_and_grad(
            lambda value: losses.value_loss(value, old, returns, clip=clip).loss.sum()
        )(jnp.asarray(draw["value"]))
    np.testing.assert_allclose(loss, reference(draw["value"]), rtol=1e-12)
    np.testing.assert_allclose(gradient, derivative(reference, draw["value"]), atol=1e-7)


def test_value_loss_by_hand() -> None:
    value, old, returns = jnp.array([[1.0, 1.0, 0.1], [0.0, 0.0, 0.0], [2.0, 0.5, 2.0]])
    found = losses.value_loss(value, old, returns, clip=0.2)
    # 1 is held at 0.2: (0.2 - 2)^2 = 3.24 > 1, but (0.2 - 0.5)^2 = 0.09 < 0.25.
    np.testing.assert_allclose(found.loss, [1.62, 0.125, 1.805], rtol=1e-6)
    np.testing.assert_array_equal(found.clipped, [1, 0, 0])
