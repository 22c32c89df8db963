"""Advantages: against NumPy, by hand, and where a group says nothing."""

from __future__ import annotations

import numpy as np
import pytest

from gymllm.errors import ConfigError
from gymllm_trainers.advantage import advantages, centred, grpo


def reference(reward_PG: np.ndarray, *, scaled: bool, eps: float = 1e-6) -> np.ndarray:
    rows = []
    for rewards in reward_PG.astype(np.float64):
        mean = sum(rewards) / len(rewards)
        centre = [reward - mean for reward in rewards]
        spread = (sum(value**2 for value in centre) / (len(rewards) - 1)) ** 0.5
        rows.append([value / (spread + eps) if scaled else value for value in centre])
    return np.array(rows)


@pytest.mark.parametrize("group", [2, 3, 8])
def test_agree_with_the_reference(group: int) -> None:
    reward_PG = np.random.default_rng(group).normal(size=(5, group)).astype(np.float32)
    np.testing.assert_allclose(centred(reward_PG), reference(reward_PG, scaled=False), atol=1e-6)
    np.testing.assert_allclose(grpo(reward_PG), reference(reward_PG, scaled=True), atol=1e-5)


def test_by_hand() -> None:
    reward_PG = np.array([[1, 0, 0, 0], [3, 1, 3, 1]], np.float32)
    np.testing.assert_allclose(centred(reward_PG), [[0.75, -0.25, -0.25, -0.25], [1, -1, 1, -1]])
    # Standard deviations with ddof 1: 0.5 and 2 / sqrt(3).
    expected = [[1.5, -0.5, -0.5, -0.5], [0.75**0.5, -(0.75**0.5)] * 2]
    np.testing.assert_allclose(grpo(reward_PG), expected, rtol=1e-5)


@pytest.mark.parametrize("name", ["centred", "grpo"])
def test_equal_rewards_give_exactly_zero(name) -> None:
    # 0.1 is no float32: its mean over 7 members differs from it by a rounding.
    reward_PG = np.stack([np.full(7, value, np.float32) for value in (0.1, 0.7, 1e-30, -3e8)])
    result = advantages(name, reward_PG)
    assert result.dtype == np.float32
    assert not result.any()


@pytest.mark.parametrize("name", ["centred", "grpo"])
def test_groups_do_not_mix(name) -> None:
    reward_PG = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
    alone = np.concatenate([advantages(name, reward_PG[i : i + 1]) for i in range(3)])
    np.testing.assert_array_equal(advantages(name, reward_PG), alone)


@pytest.mark.parametrize("name", ["centred", "grpo"])
@pytest.mark.parametrize("shape", [(3, 1), (4,), (2, 2, 2)])
def test_a_group_needs_two_members(name, shape) -> None:
    with pytest.raises(ConfigError, match=r"rollout.group_size >= 2"):
        advantages(name, np.zeros(shape, np.float32))
