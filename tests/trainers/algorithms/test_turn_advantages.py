"""Advantages of turns and of tokens: against plain loops, and by hand."""

from __future__ import annotations

import statistics

import numpy as np
import pytest

from gymllm.errors import ConfigError, UnknownNameError
from gymllm_trainers.algorithms.turn_advantages import gae, gigpo, turn, turn_advantages, whitened


def compare(value: float, others: list[float], *, scaled: bool) -> float:
    if len(set(others)) == 1:
        return 0.0
    spread = statistics.stdev(others) + 1e-6 if scaled else 1.0
    return (value - statistics.mean(others)) / spread


def to_go(rewards: list[float], start: int, gamma: float) -> float:
    return sum(gamma**k * reward for k, reward in enumerate(rewards[start:]))


def group(seed: int = 0) -> tuple[list[list[float]], list[list[str]]]:
    rng = np.random.default_rng(seed)
    rewards = [rng.integers(0, 3, size).astype(float).tolist() for size in (4, 1, 3, 6, 2)]
    states = [["start", *rng.choice(list("abc"), len(row) - 1)] for row in rewards]
    states[3][5] = "seen once"
    return rewards, states


@pytest.mark.parametrize("scale", ["std", "none"])
def test_gigpo_agrees_with_the_reference(scale) -> None:
    rewards, states = group()
    found = gigpo(rewards, states, gamma=0.9, weight=0.7, scale=scale)
    returns = [sum(row) for row in rewards]
    for i, row in enumerate(rewards):
        episode = compare(returns[i], returns, scaled=scale == "std")
        for s in range(len(row)):
            alike = [
                to_go(rewards[j], k, 0.9)
                for j in range(len(rewards))
                for k in range(len(rewards[j]))
                if states[j][k] == states[i][s]
            ]
            own = compare(to_go(row, s, 0.9), alike, scaled=scale == "std")
            np.testing.assert_allclose(found[i][s], episode + 0.7 * own, rtol=1e-5, atol=1e-6)


def test_gigpo_by_hand() -> None:
    # Both start in s. One goes to t and solves it there; the other goes round in s and gives up.
    rewards, states = [[0, 1], [0, 0]], [["s", "t"], ["s", "s"]]
    first, second = gigpo(rewards, states, gamma=0.5, scale="none")
    # Episodes: 1 and 0, so +-0.5. Returns in s: 0.5, 0, 0, mean 1/6; t was seen once.
    np.testing.assert_allclose(first, [0.5 + 1 / 3, 0.5], rtol=1e-6)
    np.testing.assert_allclose(second, [-0.5 - 1 / 6, -0.5 - 1 / 6], rtol=1e-6)


def test_gigpo_tells_equal_episodes_apart_by_their_turns() -> None:
    # Both solve it; the one that takes a turn less had the better start.
    short, long = gigpo([[0, 1], [0, 0, 1]], [["s", "t"], ["s", "u", "t"]], scale="none")
    assert short[0] > 0 > long[0]
    assert short[1] == long[1] == 0


def test_a_return_that_is_given_goes_over_the_sum() -> None:
    rewards, states = [[1.0], [1.0]], [["a"], ["b"]]
    assert not np.concatenate(gigpo(rewards, states)).any()
    shaped = gigpo(rewards, states, scale="none", return_G=[1.0, 0.0])
    np.testing.assert_allclose(np.concatenate(shaped), [0.5, -0.5])
    shaped = turn(rewards, return_G=[1.0, 0.0])
    np.testing.assert_allclose(np.concatenate(shaped), [0.25, -0.25])
    with pytest.raises(ConfigError, match="one number a member"):
        turn(rewards, return_G=[1.0])


def test_turn_agrees_with_the_reference() -> None:
    rewards, _ = group(1)
    found = turn(rewards, gamma=0.8, share=0.3)
    returns = [sum(row) for row in rewards]
    for i, row in enumerate(rewards):
        for s in range(len(row)):
            there = [to_go(other, s, 0.8) for other in rewards if len(other) > s]
            own = compare(to_go(row, s, 0.8), there, scaled=False)
            expected = 0.7 * compare(returns[i], returns, scaled=False) + 0.3 * own
            np.testing.assert_allclose(found[i][s], expected, rtol=1e-5, atol=1e-6)


def test_turn_by_hand() -> None:
    first, second = turn([[1, 0, 2], [0, 0]], gamma=1.0, share=0.5)
    # Returns 3 and 0: +-1.5. To go: 3, 2, 2 and 0, 0: +-1.5, +-1, and alone 0.
    np.testing.assert_allclose(first, [1.5, 1.25, 0.75])
    np.testing.assert_allclose(second, [-1.5, -1.25])


@pytest.mark.parametrize("name", ["gigpo", "turn"])
@pytest.mark.parametrize("reward", [0.1, 0.7, 1e-30])
def test_members_that_did_the_same_have_exactly_zero(name, reward: float) -> None:
    rewards, states = [[0.0, reward]] * 7, [["a", "b"]] * 7
    found = turn_advantages(name, rewards, states, gamma=0.9, turn_weight=0.5)
    assert not np.concatenate(found).any()


@pytest.mark.parametrize("name", ["gigpo", "turn"])
def test_settings_go_by_name(name) -> None:
    rewards, states = group(2)
    found = turn_advantages(name, rewards, states, gamma=0.6, turn_weight=0.25, scale="none")
    alone = (
        gigpo(rewards, states, gamma=0.6, weight=0.25, scale="none")
        if name == "gigpo"
        else turn(rewards, gamma=0.6, share=0.25)
    )
    for one, other in zip(found, alone, strict=True):
        np.testing.assert_array_equal(one, other)
        assert one.dtype == np.float32


def test_mistakes_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"rollout.group_size >= 2"):
        turn([[1.0]])
    with pytest.raises(ConfigError, match=r"a state for each turn: got members of \[1, 2\]"):
        gigpo([[1.0], [1.0, 0.0]], [["a"], ["b"]])
    with pytest.raises(UnknownNameError, match="Unknown advantage of turns 'grpo'"):
        turn_advantages("grpo", [], [], gamma=1, turn_weight=1)
    with pytest.raises(ConfigError, match=r"one shape \[T\]"):
        gae(np.zeros(3), np.zeros(2), np.zeros(3))


def test_gae_agrees_with_the_sum_of_discounted_differences() -> None:
    rng = np.random.default_rng(4)
    reward, value = rng.normal(size=(2, 12))
    last = np.zeros(12, bool)
    last[[4, 5, 11]] = True
    gamma, lam = 0.9, 0.7
    found = gae(reward, value, last, gamma=gamma, lam=lam)
    for t in range(12):
        end = t + int(np.argmax(last[t:]))
        expected = 0.0
        for k in range(t, end + 1):
            following = value[k + 1] if k < end else 0.0
            expected += (gamma * lam) ** (k - t) * (reward[k] + gamma * following - value[k])
        np.testing.assert_allclose(found.advantage[t], expected, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(found.returns[t], expected + value[t], rtol=1e-5, atol=1e-6)
    assert found.advantage.dtype == found.returns.dtype == np.float32


def test_gae_by_hand() -> None:
    # Two tokens with reward 1 at the end, then an episode of one token.
    found = gae([0, 1, 2], [0.5, 0.25, 1], [False, True, True], gamma=0.5, lam=0.5)
    # Differences: 0.125 - 0.5, 1 - 0.25, 2 - 1.
    np.testing.assert_allclose(found.advantage, [-0.375 + 0.25 * 0.75, 0.75, 1.0])
    np.testing.assert_allclose(found.returns, [0.3125, 1.0, 2.0])
    # lambda 1 and gamma 1: the return less the value.
    whole = gae([0, 1, 2], [0.5, 0.25, 1], [False, True, True], gamma=1, lam=1)
    np.testing.assert_allclose(whole.advantage, [0.5, 0.75, 1.0])


def test_whitened_has_mean_zero_and_spread_one() -> None:
    found = whitened(np.random.default_rng(5).normal(3, 7, 200))
    np.testing.assert_allclose([found.mean(), found.std(ddof=1)], [0, 1], atol=1e-6)
    np.testing.assert_allclose(whitened([0.0, 2.0]), [-(0.5**0.5), 0.5**0.5], rtol=1e-6)
    np.testing.assert_array_equal(whitened([5.0]), [0])
    np.testing.assert_array_equal(whitened([5.0, 5.0]), [0, 0])
