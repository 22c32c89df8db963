"""From a group of trajectories to the sequences that are trained on.

Axes: N tokens of a sequence, K turns of a trajectory.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from gymllm.trajectory import Trajectory

IntArray = npt.NDArray[np.int32]
FloatArray = npt.NDArray[np.float32]


def turns_of_tokens(trajectory: Trajectory) -> list[IntArray]:
    """Which turn each token was generated in.

    A turn's tokens are generated one after another, over every segment in order, and it knows how many they
    are. What was generated after the last turn (an answer that a limit cut off) counts as of that turn.

    Returns:
        One array for each segment, int32 [N]: the turn's number from 0, -1 where the token was not generated.
    """
    ends = np.cumsum([turn.generated_tokens for turn in trajectory.turns])
    last = max(len(trajectory.turns) - 1, 0)
    numbers: list[IntArray] = []
    before = 0
    for segment in trajectory.segments:
        generated = segment.mask == 1
        order = before + np.cumsum(generated) - 1  # of each generated token, among all of them
        turn = np.minimum(np.searchsorted(ends, order, side="right"), last)
        numbers.append(np.where(generated, turn, -1).astype(np.int32))
        before += int(generated.sum())
    return numbers


def token_advantages(
    trajectory: Trajectory, advantage: float | Sequence[float] | FloatArray
) -> list[FloatArray]:
    """The advantage of each token.

    Args:
        trajectory: Whose.
        advantage: Of the whole episode, or one for each turn [K].

    Returns:
        One array for each segment, float32 [N].
    """
    if np.ndim(advantage) == 0:
        return [np.full(len(s), advantage, np.float32) for s in trajectory.segments]
    advantage_K = np.asarray(advantage, np.float32)
    if not len(advantage_K):  # an episode that ended before its first turn was over
        advantage_K = np.zeros(1, np.float32)
    return [
        np.where(turn_N >= 0, advantage_K[np.maximum(turn_N, 0)], 0).astype(np.float32)
        for turn_N in turns_of_tokens(trajectory)
    ]


def token_rewards(
    trajectory: Trajectory, reward: float, trained: Sequence[npt.NDArray[np.bool_]]
) -> FloatArray:
    """The reward that comes right after each trained token: a turn's own after the turn's last one.

    What `reward` has more than the turns' rewards (of turns without a trained token, of before the first
    turn, a penalty) comes after the last token.

    Args:
        trajectory: Whose.
        reward: Its return, shaped or not.
        trained: Which tokens of each segment are trained on, [N] each.

    Returns:
        float32, of all trained tokens in order; they sum to `reward`.
    """
    numbers = [
        turn_N[kept] for turn_N, kept in zip(turns_of_tokens(trajectory), trained, strict=True)
    ]
    turn = np.concatenate([*numbers, np.zeros(0, np.int32)])
    rewards = np.zeros(len(turn), np.float64)
    if not len(turn):
        return rewards.astype(np.float32)
    if trajectory.turns:
        last = np.flatnonzero(np.append(turn[1:] != turn[:-1], True))
        rewards[last] = [trajectory.turns[turn[at]].reward for at in last]
    rewards[-1] += reward - rewards.sum()
    return rewards.astype(np.float32)
