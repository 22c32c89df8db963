"""Aggregation and length rules: by hand, and against losses that are averaged directly."""

from __future__ import annotations

import numpy as np
import pytest

from gymllm.errors import ConfigError
from gymllm.trajectory import Ending
from gymllm_trainers.algorithms.aggregation import divisor, token_weight
from gymllm_trainers.algorithms.lengths import overlong, soft_overlong


def test_weights_and_divisors_give_the_averages_they_are_named_after() -> None:
    rng = np.random.default_rng(0)
    losses = [rng.normal(size=size) for size in (3, 1, 7, 4)]
    tokens = sum(len(row) for row in losses)
    expected = {
        "token_mean": np.concatenate(losses).mean(),
        "sequence_mean_token_mean": np.mean([row.mean() for row in losses]),
        "sequence_mean_token_sum": np.mean([row.sum() for row in losses]),
        "token_sum_constant": sum(row.sum() for row in losses) / (4 * 10),
    }
    for name, value in expected.items():
        total = sum(token_weight(name, trained_tokens=len(row)) * row.sum() for row in losses)
        below = divisor(name, tokens=tokens, trajectories=4, constant_tokens=10)
        np.testing.assert_allclose(total / below, value, rtol=1e-12, err_msg=name)


def test_an_empty_step_is_divided_by_one() -> None:
    for name in ("token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum"):
        assert divisor(name, tokens=0, trajectories=0) == 1
    assert divisor("token_sum_constant", tokens=0, trajectories=0, constant_tokens=5) == 5


def test_what_can_t_be_averaged_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"aggregation_tokens, which must be >= 1, got 0"):
        divisor("token_sum_constant", tokens=3, trajectories=1)
    with pytest.raises(ConfigError, match="needs a trained token, got 0"):
        token_weight("token_mean", trained_tokens=0)


def test_soft_overlong_by_hand() -> None:
    tokens = [0, 80, 81, 90, 100, 101, 1000]
    found = soft_overlong(tokens, limit=100, buffer=20)
    np.testing.assert_allclose(found, [0, 0, -0.05, -0.5, -1, -1, -1], rtol=1e-6)
    assert found.dtype == np.float32
    assert soft_overlong(95, limit=100, buffer=10.0) == np.float32(-0.5)


@pytest.mark.parametrize("buffer", [0, -1, 101])
def test_soft_overlong_refuses_a_buffer_that_does_not_fit(buffer: int) -> None:
    with pytest.raises(ConfigError, match=rf"at most its limit, got {buffer} and 100 tokens"):
        soft_overlong([1], limit=100, buffer=buffer)


@pytest.mark.parametrize(
    ("ending", "reason", "machine", "all_"),
    [
        (Ending.TRUNCATED, "episode_timeout", True, True),
        (Ending.TRUNCATED, "wall_clock (player_1)", True, True),
        (Ending.TRUNCATED, "max_turns", False, True),
        (Ending.TRUNCATED, "context_length (player_1)", False, True),
        (Ending.TERMINATED, "", False, False),
        (Ending.TERMINATED, "wall_clock", False, False),
    ],
)
def test_which_episodes_are_filtered(
    ending: Ending, reason: str, machine: bool, all_: bool
) -> None:
    assert overlong(ending, reason, rule="machine") == machine
    assert overlong(ending, reason, rule="all") == all_
    assert not overlong(ending, reason, rule="off")
