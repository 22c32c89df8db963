"""Advantages of episodes: against NumPy, by hand, and where a group says nothing."""

from __future__ import annotations

import typing

import numpy as np
import pytest

from gymllm.errors import ConfigError, UnknownNameError
from gymllm_trainers.algorithms.advantages import (
    ADVANTAGES,
    batch_advantages,
    batch_std,
    best_of_n,
    centred,
    group_advantages,
    grpo,
    maxrl,
    reinforce_pp_baseline,
    rloo,
)
from gymllm_trainers.algorithms.names import AdvantageName

OF_GROUP = [name for name, needs in ADVANTAGES.items() if needs.what == "group"]
OF_BATCH = [name for name, needs in ADVANTAGES.items() if needs.what == "batch"]


def reference(name: str, rewards: list[float]) -> list[float]:
    size, mean = len(rewards), sum(rewards) / len(rewards)
    match name:
        case "rloo":
            others = [(sum(rewards) - one) / (size - 1) for one in rewards]
            return [one - other for one, other in zip(rewards, others, strict=True)]
        case "grpo":
            spread = (sum((one - mean) ** 2 for one in rewards) / (size - 1)) ** 0.5
            return [(one - mean) / (spread + 1e-6) for one in rewards]
        case "maxrl":
            return [(one - mean) / mean if mean else 0.0 for one in rewards]
        case _:
            return [one - mean for one in rewards]


@pytest.mark.parametrize("name", OF_GROUP)
@pytest.mark.parametrize("members", [2, 3, 8])
def test_of_a_group_agrees_with_the_reference(name: AdvantageName, members: int) -> None:
    rng = np.random.default_rng(members)
    reward_PG = rng.uniform(0, 3, (5, members)).astype(np.float32)
    expected = [reference(name, row) for row in reward_PG.astype(np.float64).tolist()]
    found = group_advantages(name, reward_PG)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)
    assert found.dtype == np.float32


def test_of_a_group_by_hand() -> None:
    reward_PG = np.array([[1, 0, 0, 0], [3, 1, 3, 1]], np.float32)
    np.testing.assert_allclose(centred(reward_PG), [[0.75, -0.25, -0.25, -0.25], [1, -1, 1, -1]])
    # Standard deviations with ddof 1: 0.5 and 2 / sqrt(3).
    scaled = [[1.5, -0.5, -0.5, -0.5], [0.75**0.5, -(0.75**0.5)] * 2]
    np.testing.assert_allclose(grpo(reward_PG), scaled, rtol=1e-5)
    left_out = [[1, -1 / 3, -1 / 3, -1 / 3], [4 / 3, -4 / 3, 4 / 3, -4 / 3]]
    np.testing.assert_allclose(rloo(reward_PG), left_out, rtol=1e-6)
    np.testing.assert_allclose(maxrl(reward_PG), [[3, -1, -1, -1], [0.5, -0.5, 0.5, -0.5]])


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", OF_GROUP)
def test_equal_rewards_give_exactly_zero(name: AdvantageName, dtype: type) -> None:
    # No binary fraction: in their own precision the mean of 7 can differ from them by a rounding.
    values = (0.1, 0.7, 1e-30, 3e8, 0.0)
    reward_PG = np.stack([np.full(7, value, dtype) for value in values])
    result = group_advantages(name, reward_PG)
    assert result.dtype == np.float32
    assert not result.any()


@pytest.mark.parametrize("name", OF_GROUP)
def test_groups_do_not_mix(name: AdvantageName) -> None:
    reward_PG = np.random.default_rng(0).uniform(size=(3, 4)).astype(np.float32)
    alone = np.concatenate([group_advantages(name, reward_PG[i : i + 1]) for i in range(3)])
    np.testing.assert_array_equal(group_advantages(name, reward_PG), alone)


@pytest.mark.parametrize("name", OF_GROUP)
@pytest.mark.parametrize("shape", [(3, 1), (4,), (2, 2, 2)])
def test_a_group_needs_two_members(name: AdvantageName, shape: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match=r"rollout.group_size >= 2"):
        group_advantages(name, np.zeros(shape, np.float32))


def test_maxrl_refuses_negative_rewards() -> None:
    with pytest.raises(ConfigError, match=r"needs rewards >= 0, got -0\.5"):
        maxrl(np.array([[1, -0.5]], np.float32))


def uneven() -> tuple[list[np.ndarray], list[np.ndarray]]:
    rng = np.random.default_rng(3)
    sizes = (2, 5, 3)
    rewards = [rng.normal(1, 2, size).astype(np.float32) for size in sizes]
    return rewards, [rng.integers(1, 50, size) for size in sizes]


def test_batch_std_agrees_with_the_reference() -> None:
    rewards, tokens = uneven()
    everything = [float(one) for row in rewards for one in row]
    mean = sum(everything) / len(everything)
    spread = (sum((one - mean) ** 2 for one in everything) / (len(everything) - 1)) ** 0.5
    for found, row in zip(batch_advantages("batch_std", rewards, tokens), rewards, strict=True):
        expected = np.array(reference("centred", row.tolist())) / (spread + 1e-6)
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-7)


def test_reinforce_pp_baseline_agrees_with_every_token_written_out() -> None:
    rewards, tokens = uneven()
    centres = [reference("centred", row.tolist()) for row in rewards]
    written = [
        one
        for row, counts in zip(centres, tokens, strict=True)
        for one, count in zip(row, counts, strict=True)
        for _ in range(count)
    ]
    mean, spread = np.mean(written), np.sqrt(np.var(written, ddof=1) + 1e-8)
    found = batch_advantages("reinforce_pp_baseline", rewards, tokens)
    for result, row in zip(found, centres, strict=True):
        np.testing.assert_allclose(result, (np.array(row) - mean) / spread, rtol=1e-5)


def test_of_a_batch_by_hand() -> None:
    rewards = [np.array([0, 2]), np.array([1, 1, 4])]
    # All rewards: mean 1.6, squares 2.56 + 0.16 + 0.36 + 0.36 + 5.76 = 9.2, over 4: 2.3.
    expected = [[-1, 1], [-1, -1, 2]]
    for found, row in zip(batch_std(rewards), expected, strict=True):
        np.testing.assert_allclose(found, np.array(row) / 2.3**0.5, rtol=1e-5)
    # One token each: centres -1, 1, -1, -1, 2; mean 0, squares 8, over 4: 2.
    even = reinforce_pp_baseline(rewards, [np.ones(2), np.ones(3)])
    for found, row in zip(even, expected, strict=True):
        np.testing.assert_allclose(found, np.array(row) / 2**0.5, rtol=1e-6)
    # Three tokens for the first member: -1 three times, 1, -1, -1, 2; mean -2/7.
    longer = reinforce_pp_baseline(rewards, [np.array([3, 1]), np.ones(3)])
    mean, spread = -2 / 7, np.std([-1, -1, -1, 1, -1, -1, 2], ddof=1)
    for found, row in zip(longer, expected, strict=True):
        np.testing.assert_allclose(found, (np.array(row) - mean) / spread, rtol=1e-6)


@pytest.mark.parametrize("name", OF_BATCH)
def test_a_flat_group_of_a_batch_has_exactly_zero(name: AdvantageName) -> None:
    rewards = [np.full(3, 0.1, np.float32), np.float32([0, 1]), np.full(7, 0.7, np.float32)]
    tokens = [np.array([3, 1, 1]), np.array([5, 9]), np.arange(1, 8)]
    found = batch_advantages(name, rewards, tokens)
    assert [bool(row.any()) for row in found] == [False, True, False]
    only_flat = batch_advantages(name, rewards[:1], tokens[:1])
    assert not only_flat[0].any()
    assert batch_advantages(name, [], []) == []


@pytest.mark.parametrize("name", OF_BATCH)
def test_a_group_of_a_batch_needs_two_members(name: AdvantageName) -> None:
    with pytest.raises(ConfigError, match=r"rollout.group_size >= 2"):
        batch_advantages(name, [np.ones(2), np.ones(1)], [np.ones(2), np.ones(1)])


def test_the_table_has_every_name_and_says_where_it_belongs() -> None:
    assert set(ADVANTAGES) == set(typing.get_args(AdvantageName))
    with pytest.raises(UnknownNameError, match=r"Unknown advantage of a group 'gae'"):
        group_advantages("gae", np.zeros((1, 2), np.float32))
    with pytest.raises(UnknownNameError, match=r"batch_std"):
        batch_advantages("grpo", [], [])


def test_best_of_n_keeps_the_best_above_the_threshold() -> None:
    reward_PG = np.array([[0, 3, 1, 3], [0, 0, 0, 0], [0.5, 0, 0, 0]], np.float32)
    kept = best_of_n(reward_PG, keep=2)
    np.testing.assert_array_equal(kept, [[0, 1, 0, 1], [0, 0, 0, 0], [1, 0, 0, 0]])
    np.testing.assert_array_equal(best_of_n(reward_PG)[0], [0, 1, 0, 0])  # of equals the first
    np.testing.assert_array_equal(best_of_n(reward_PG, keep=9, above=0.75)[2], [0, 0, 0, 0])
    np.testing.assert_array_equal(best_of_n(reward_PG, keep=9, above=-1.0), np.ones((3, 4)))
