"""Metrics of a step: against NumPy over all tokens at once, and by hand."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from gymllm_trainers.algorithms import AlgorithmConfig, Targets, objective, resolve
from gymllm_trainers.algorithms.diagnostics import MAXIMA, PolicySums, finish, merge

Draw = dict[str, np.ndarray]


def measured(draw: Draw, config: AlgorithmConfig, *, updates: int = 2) -> dict[str, float]:
    algorithm = resolve(config, updates=updates)
    values = ("value", "old_value", "returns")
    given = Targets(
        **{
            name: jnp.asarray(x, jnp.int32 if name == "sequence" else jnp.float32)
            for name, x in draw.items()
            if algorithm.needs_values or name not in values
        }
    )
    sums = jax.jit(lambda given: objective(algorithm, given, sequences=5).sums)(given)
    return finish(merge([jax.device_get(sums)]), divisor=10.0)


def test_agree_with_numpy_over_all_tokens(draw: Draw) -> None:
    found = measured(draw, AlgorithmConfig(preset="ppo"))
    there = draw["mask"] > 0
    d = {name: value[there] for name, value in draw.items()}
    gap = d["proximal"] - d["behaviour"]
    u, weight = np.exp(gap), np.minimum(np.exp(gap), 2)
    p, m = np.exp(d["proximal"]), np.exp(d["behaviour"])
    ratio = np.exp(d["logprob"] - d["proximal"])
    moved = d["logprob"] - d["proximal"]
    far = d["reference"] - d["logprob"]
    error, returns = d["returns"] - d["old_value"], d["returns"]
    held = np.clip(d["value"], d["old_value"] - 0.2, d["old_value"] + 0.2)
    squares = (d["value"] - returns) ** 2, (held - returns) ** 2
    expected = {
        "entropy": d["entropy"].mean(),
        "clipped_low": np.mean((d["advantage"] < 0) & (ratio < 0.8)),
        "clipped_high": np.mean((d["advantage"] > 0) & (ratio > 1.2)),
        "advantage_mean": d["advantage"].mean(),
        "advantage_std": d["advantage"].std(),
        "correction_weight": weight.mean(),
        "correction_weight_max": weight.max(),
        "correction_dropped": 0.0,
        "behaviour_kl_k3": np.mean(u - gap - 1),
        "update_kl_k3": np.mean(ratio - moved - 1),
        "logprob_gap_mean": np.abs(gap).mean(),
        "logprob_gap_max": np.abs(gap).max(),
        "ratio_max": u.max(),
        "effective_sample_share": u.sum() ** 2 / (u**2).sum() / len(u),
        "probability_correlation": np.corrcoef(p, m)[0, 1],
        "lag_mean": d["age"].mean(),
        "lag_max": d["age"].max(),
        "trained_tokens": len(u),
        "reference_kl_k1": -far.mean(),
        "reference_kl_k3": np.mean(np.exp(far) - far - 1),
        "value_loss": np.maximum(*squares).mean() / 2,
        "value_clipped": np.mean(squares[1] > squares[0]),
        "explained_variance": 1 - error.var() / returns.var(),
    }
    lags = [np.mean(d["age"] == age) for age in range(8)] + [np.mean(d["age"] >= 8)]
    expected |= {f"lag/{age}": share for age, share in enumerate(lags)}
    assert set(found) == set(expected) | {"loss"}
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, rel=2e-5, abs=1e-6), name
    assert 0 < expected["clipped_low"] < 1
    assert 0 < lags[8] < 1


def test_by_hand() -> None:
    zeros = np.zeros(4)
    draw = {
        "logprob": np.log([0.5, 0.5, 0.25, 1.0]),
        "entropy": np.array([1.0, 2.0, 3.0, 9.0]),
        "behaviour": np.log([0.5, 0.25, 0.5, 0.1]),
        "advantage": np.array([1.0, 1.0, -2.0, 9.0]),
        "weight": np.ones(4),
        "mask": np.array([1.0, 1.0, 1.0, 0.0]),
        "age": np.array([0.0, 2.0, 9.0, 5.0]),
        "sequence": zeros,
    }
    found = measured(draw, AlgorithmConfig(), updates=1)
    log2 = np.log(2)
    # u = 1, 2, 1/2; the last token is padding.
    assert found["loss"] == pytest.approx(-(1 + 2 - 2 * 0.5) / 10)
    assert found["entropy"] == pytest.approx(2)
    assert found["advantage_std"] == pytest.approx(2**0.5)
    assert found["behaviour_kl_k3"] == pytest.approx((2 - log2 - 1 + 0.5 + log2 - 1) / 3)
    assert found["logprob_gap_mean"] == pytest.approx(2 * log2 / 3)
    assert found["ratio_max"] == pytest.approx(2)
    assert found["effective_sample_share"] == pytest.approx(3.5**2 / 5.25 / 3)
    assert found["probability_correlation"] == pytest.approx(-0.5, abs=1e-5)
    assert [found[f"lag/{age}"] for age in (0, 2, 5, 8)] == pytest.approx([1 / 3, 1 / 3, 0, 1 / 3])
    assert "reference_kl_k3" not in found
    assert "value_loss" not in found


def test_what_a_correction_drops_is_counted(draw: Draw) -> None:
    config = AlgorithmConfig(correction="icepop", correction_floor=0.8, correction_cap=1.2)
    u = np.exp(draw["proximal"] - draw["behaviour"])[draw["mask"] > 0]
    dropped = np.mean((u < 0.8) | (u > 1.2))
    assert measured(draw, config)["correction_dropped"] == pytest.approx(dropped)
    assert 0 < dropped < 1


def test_equal_policies_correlate_and_nothing_is_no_number(draw: Draw) -> None:
    same = {**draw, "proximal": draw["behaviour"], "logprob": draw["behaviour"]}
    found = measured(same, AlgorithmConfig())
    assert found["probability_correlation"] == pytest.approx(1, abs=1e-6)
    assert found["effective_sample_share"] == pytest.approx(1)
    assert found["logprob_gap_max"] == found["update_kl_k3"] == 0
    empty = measured({**draw, "mask": np.zeros(24)}, AlgorithmConfig(preset="ppo"))
    assert np.isfinite(list(empty.values())).all()
    assert empty["trained_tokens"] == 0


def test_near_certain_tokens_keep_their_correlation() -> None:
    """A policy that is sure of nearly everything: its probabilities' variance is tiny, not lost."""
    rng = np.random.default_rng(6)
    size = 4000
    logprob = -rng.exponential(1e-4, size)
    behaviour = logprob * rng.uniform(0.5, 1.5, size)
    draw = {
        "logprob": logprob,
        "behaviour": behaviour,
        "sequence": np.zeros(size),
        **{name: np.ones(size) for name in ("entropy", "advantage", "weight", "mask", "age")},
    }
    expected = np.corrcoef(np.exp(logprob), np.exp(behaviour))[0, 1]
    found = measured(draw, AlgorithmConfig(), updates=1)["probability_correlation"]
    assert found == pytest.approx(expected, abs=1e-3)


def test_merging_adds_sums_and_keeps_the_largest() -> None:
    one = PolicySums(*(np.float32(index) for index in range(len(PolicySums._fields))))
    two = PolicySums(*(np.float32(10) for _ in PolicySums._fields))
    merged = merge([one, two])
    for index, name in enumerate(PolicySums._fields):
        expected = max(index, 10) if name in MAXIMA else index + 10
        assert getattr(merged, name) == expected, name
