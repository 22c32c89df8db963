"""What the algorithms' tests share: seeded targets, and derivatives by finite differences."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

Numbers = np.ndarray


def _derivative(function: Callable[[Numbers], float], point: Numbers) -> Numbers:
    step = 1e-6
    moved = [point + step * row for row in np.eye(len(point))]
    back = [point - step * row for row in np.eye(len(point))]
    return np.array([function(a) - function(b) for a, b in zip(moved, back, strict=True)]) / 2e-6


@pytest.fixture
def derivative() -> Callable[[Callable[[Numbers], float], Numbers], Numbers]:
    """Gradient of a scalar NumPy function at a float64 vector, by central differences."""
    return _derivative


@pytest.fixture
def draw() -> dict[str, Numbers]:
    """24 targets of 5 sequences in float64; ratios on both sides of every bound and away from corners."""
    rng = np.random.default_rng(11)
    size = 24
    behaviour = -0.05 - rng.exponential(0.8, size)
    proximal = np.minimum(behaviour + rng.normal(0, 0.3, size), -0.01)
    moves = np.log([0.2, 0.5, 0.79, 0.81, 0.95, 1.0, 1.1, 1.27, 1.29, 2.0, 2.9, 3.1, 6.0])
    logprob = proximal + rng.choice(moves, size)
    return {
        "behaviour": behaviour,
        "proximal": proximal,
        "logprob": logprob,
        "reference": logprob + rng.normal(0, 0.5, size),
        "advantage": rng.normal(0, 1, size),
        "entropy": rng.uniform(0, 2, size),
        "weight": rng.uniform(0.1, 1, size),
        "mask": (rng.uniform(size=size) < 0.8).astype(np.float64),
        "age": rng.integers(0, 12, size).astype(np.float64),
        "sequence": np.sort(rng.integers(0, 5, size)).astype(np.int32),
        "value": rng.normal(0, 1, size),
        "old_value": rng.normal(0, 1, size),
        "returns": rng.normal(0, 1, size),
    }
