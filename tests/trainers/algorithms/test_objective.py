"""The objective: every preset against NumPy; what is split or padded adds up to the same."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gymllm_trainers.algorithms import Algorithm, AlgorithmConfig, Targets, objective, resolve
from gymllm_trainers.algorithms.algorithm import PRESETS
from gymllm_trainers.algorithms.diagnostics import finish, merge

Numbers = np.ndarray
Draw = dict[str, Numbers]
SEQUENCES = 5
VALUES = ("value", "old_value", "returns")


def targets(algorithm: Algorithm, draw: Draw) -> Targets:
    skipped = () if algorithm.needs_values else VALUES
    return Targets(**{name: jnp.asarray(x) for name, x in draw.items() if name not in skipped})


def reference(algorithm: Algorithm, d: Draw, x: Numbers, held: Numbers) -> float:
    """The loss in NumPy; `held` is x wherever the formula stops the gradient."""
    a = algorithm
    if a.correction == "off":
        base, proximal = d["behaviour"], held
    elif a.proximal == "loglinear":
        share = d["age"] / (d["age"] + 1)
        base = proximal = (1 - share) * d["behaviour"] + share * held
    else:
        base = proximal = d["proximal"] if a.proximal == "recompute" else held
    u = np.exp(proximal - d["behaviour"])
    total = 0.0
    for t in range(len(x)):
        if not d["mask"][t]:
            continue
        same = [i for i in range(len(x)) if d["sequence"][i] == d["sequence"][t] and d["mask"][i]]
        advantage, ratio = d["advantage"][t], np.exp(x[t] - base[t])
        if a.loss == "gspo":
            ratio = np.exp(np.mean(held[same] - base[same]) + x[t] - held[t])
        clip = np.clip(ratio, 1 - a.clip_low, 1 + a.clip_high)
        frozen = np.exp(held[t] - base[t])
        moved = np.exp(held[t]) - np.exp(d["behaviour"][t])
        temperature = a.sapo_positive if advantage > 0 else a.sapo_negative
        clipped = max(-ratio * advantage, -clip * advantage)
        inside = float(-a.clip_low <= moved if advantage < 0 else moved <= a.clip_high)
        loss = {
            "ppo_clip": clipped,
            "gspo": clipped,
            "dual_clip": min(clipped, -a.dual_clip * advantage) if advantage < 0 else clipped,
            "cispo": -np.clip(frozen, 1 - a.clip_low, 1 + a.clip_high) * advantage * x[t],
            "dppo_tv": -inside * min(frozen, a.ratio_cap) * advantage * x[t],
            "reinforce": -advantage * x[t],
            "sapo": -advantage * 4 / temperature / (1 + np.exp(temperature * (1 - ratio))),
            "supervised": -x[t],
        }[a.loss]
        kept = a.correction_floor <= u[t] <= a.correction_cap
        mean = np.exp(np.mean(np.log(u[same])))
        loss *= {
            "off": 1.0,
            "decoupled": min(u[t], a.correction_cap),
            "tis_token": min(u[t], a.correction_cap),
            "tis_sequence": min(np.prod(u[same]), a.correction_cap),
            "icepop": u[t] * kept,
            "geometric_mask": float(a.correction_floor <= mean <= a.correction_cap),
        }[a.correction]
        if a.kl_coef:
            far = d["reference"][t] - x[t]
            loss += a.kl_coef * {"k2": far**2 / 2, "k3": np.exp(far) - far - 1}[a.kl_form]
        loss -= a.entropy_coef * d["entropy"][t]
        if a.needs_values:
            value, old, wanted = d["value"][t], d["old_value"][t], d["returns"][t]
            near = np.clip(value, old - a.value_clip, old + a.value_clip)
            loss += a.value_coef * max((value - wanted) ** 2, (near - wanted) ** 2) / 2
        total += d["weight"][t] * loss
    return total


CASES: dict[str, AlgorithmConfig] = {name: AlgorithmConfig(preset=name) for name in PRESETS}
CASES |= {
    "loglinear": AlgorithmConfig(proximal="loglinear"),
    "icepop": AlgorithmConfig(correction="icepop", correction_floor=0.8, correction_cap=1.3),
    "geometric_mask": AlgorithmConfig(
        correction="geometric_mask", correction_floor=0.9, correction_cap=1.1
    ),
    "kl k2": AlgorithmConfig(kl_coef=0.3, kl_form="k2"),
    "kl k3": AlgorithmConfig(kl_coef=0.3, kl_form="k3"),
    "entropy": AlgorithmConfig(preset="cispo", entropy_coef=0.05),
    "off": AlgorithmConfig(preset="grpo", correction="off"),
}


@pytest.mark.parametrize("updates", [1, 2])
@pytest.mark.parametrize("name", CASES)
def test_agrees_with_the_reference_in_value_and_gradient(
    name: str, updates: int, draw: Draw, derivative
) -> None:
    algorithm = resolve(CASES[name], updates=updates)
    point = draw["logprob"]
    with jax.enable_x64():
        given = targets(algorithm, draw)
        loss, gradient = jax.value_and_grad(
            lambda x: objective(algorithm, given._replace(logprob=x), sequences=SEQUENCES).loss
        )(given.logprob)
    np.testing.assert_allclose(loss, reference(algorithm, draw, point, point), rtol=1e-9)
    expected = derivative(lambda x: reference(algorithm, draw, x, point), point)
    np.testing.assert_allclose(gradient, expected, atol=1e-7)


def test_the_default_by_hand() -> None:
    # One step a batch: the ratio is 1, and u = 0.5 / 0.4 and (0.9 / 0.1, capped) weigh A.
    given = Targets(
        logprob=jnp.log(jnp.array([0.5, 0.9, 0.3])),
        entropy=jnp.array([1.0, 2.0, 3.0]),
        behaviour=jnp.log(jnp.array([0.4, 0.1, 0.3])),
        advantage=jnp.array([2.0, -1.0, 7.0]),
        weight=jnp.array([1.0, 0.5, 1.0]),
        mask=jnp.array([1.0, 1.0, 0.0]),
        age=jnp.array([0.0, 1.0, 0.0]),
        sequence=jnp.array([0, 0, 1]),
    )
    found, gradient = jax.value_and_grad(
        lambda x: objective(resolve(AlgorithmConfig()), given._replace(logprob=x), sequences=2).loss
    )(given.logprob)
    np.testing.assert_allclose(found, -1.25 * 2 + 0.5 * 2 * 1, rtol=1e-6)
    np.testing.assert_allclose(gradient, [-2.5, 1, 0], rtol=1e-6)


@pytest.mark.parametrize("name", ["ppo", "entropy"])
def test_values_and_entropy_have_their_gradient(name: str, draw: Draw, derivative) -> None:
    algorithm = resolve(CASES[name])
    part = "value" if name == "ppo" else "entropy"
    with jax.enable_x64():
        given = targets(algorithm, draw)
        gradient = jax.grad(
            lambda x: objective(algorithm, given._replace(**{part: x}), sequences=SEQUENCES).loss
        )(getattr(given, part))
    held = draw["logprob"]
    expected = derivative(lambda x: reference(algorithm, {**draw, part: x}, held, held), draw[part])
    np.testing.assert_allclose(gradient, expected, atol=1e-7)
    assert expected.any()


def part_of(draw: Draw, sequences: list[int], *, length: int) -> Draw:
    """Some sequences, renumbered from 0, and padding that is no number."""
    chosen = np.concatenate([np.flatnonzero(draw["sequence"] == number) for number in sequences])
    padded: Draw = {}
    for name, values in draw.items():
        row = np.full(length, np.nan) if values.dtype == np.float64 else np.zeros(length, np.int32)
        row[: len(chosen)] = values[chosen]
        padded[name] = row
    padded["mask"][len(chosen) :] = 0
    padded["sequence"][: len(chosen)] = [
        sequences.index(number) for number in draw["sequence"][chosen]
    ]
    return padded


@pytest.mark.parametrize("name", ["default", "gspo", "ppo", "geometric_mask", "kl k3"])
@pytest.mark.parametrize("split", [[[0, 1, 2, 3, 4]], [[4, 1], [0, 3, 2]], [[3], [1], [4, 0], [2]]])
def test_any_split_into_micro_batches_adds_up_to_the_same(
    name: str, split: list[list[int]], draw: Draw
) -> None:
    algorithm = resolve(CASES[name], updates=2)

    def run(parts: list[Draw]) -> tuple[float, dict[float, float], dict[str, float]]:
        total, gradient, sums = 0.0, {}, []
        for part in parts:
            given = targets(algorithm, part)
            (loss, found), slope = jax.value_and_grad(
                lambda x, given=given: objective(
                    algorithm, given._replace(logprob=x), sequences=SEQUENCES
                ),
                has_aux=True,
            )(given.logprob)
            total += float(loss)
            sums.append(jax.device_get(found))
            for at, value in zip(part["behaviour"], np.asarray(slope), strict=True):
                if np.isnan(at):
                    assert value == 0
                else:
                    gradient[float(at)] = float(value)
        return total, gradient, finish(merge(sums), divisor=7.0)

    with jax.enable_x64():
        loss, gradient, metrics = run([draw])
        again, slopes, others = run([part_of(draw, numbers, length=30) for numbers in split])
    np.testing.assert_allclose(again, loss, rtol=1e-12)
    assert slopes == pytest.approx(gradient, rel=1e-12, abs=1e-15)
    assert others == pytest.approx(metrics, rel=1e-5)  # sums are kept in float32
    assert np.isfinite(list(others.values())).all()


def test_float32_is_near_float64_and_stays_float32(draw: Draw) -> None:
    algorithm = resolve(AlgorithmConfig(preset="ppo", kl_coef=0.1), updates=2)
    narrow = {
        name: value.astype(np.float32) if value.dtype == np.float64 else value
        for name, value in draw.items()
    }
    found = jax.jit(lambda given: objective(algorithm, given, sequences=SEQUENCES))(
        targets(algorithm, narrow)
    )
    assert {leaf.dtype for leaf in jax.tree.leaves(found)} == {jnp.dtype("float32")}
    held = draw["logprob"]
    wanted = resolve(
        AlgorithmConfig(preset="ppo", kl_coef=0.1, kl_form="k3"), updates=2
    )  # k3+ has its value
    np.testing.assert_allclose(found.loss, reference(wanted, draw, held, held), rtol=1e-5)


def test_without_a_proximal_policy_the_one_being_trained_stands_for_it(draw: Draw) -> None:
    algorithm = resolve(AlgorithmConfig(), updates=2)
    given = targets(algorithm, draw)
    nothing = objective(algorithm, given._replace(proximal=None), sequences=SEQUENCES)
    same = objective(algorithm, given._replace(proximal=given.logprob), sequences=SEQUENCES)
    assert nothing.loss == same.loss
    assert nothing.sums.clipped_low + nothing.sums.clipped_high == 0


def test_what_an_algorithm_needs_is_asked_for(draw: Draw) -> None:
    given = Targets(**{name: jnp.asarray(value) for name, value in draw.items()})
    with pytest.raises(ValueError, match=r"kl_coef = 0.5 needs Targets.reference"):
        objective(
            resolve(AlgorithmConfig(kl_coef=0.5)),
            given._replace(reference=None, value=None, old_value=None, returns=None),
            sequences=SEQUENCES,
        )
    with pytest.raises(ValueError, match="advantage gae needs value"):
        objective(
            resolve(AlgorithmConfig(preset="ppo")),
            given._replace(value=None),
            sequences=SEQUENCES,
        )
    with pytest.raises(ValueError, match="advantage centred takes no value"):
        objective(resolve(AlgorithmConfig()), given, sequences=SEQUENCES)
