"""Scores into trajectories: as their episode ends, before they are grouped."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import SupportsFloat

import anyio

from gymllm.trajectory import Ending, Trajectory
from gymllm_trainers.rewards.config import RewardConfig
from gymllm_trainers.rewards.reward_model import RewardModel

SCORE, ENVIRONMENT = "reward/score", "reward/environment"
"""Metrics of a scored trajectory: the model's score, not weighted, and the environment's own reward."""


async def apply_rewards(
    trajectories: Sequence[Trajectory], model: RewardModel | None, config: RewardConfig
) -> list[Trajectory]:
    """The trajectories of one episode, scored.

    A score counts for the last turn: the turns' rewards still add up to the trajectory's. With
    `combine: replace` the rewards of the other turns are 0.

    Args:
        trajectories: Of every trained agent of one episode. Failed ones are returned as they are.
        model: What scores them; None: nothing, and they are returned as they are.
        config: How scores are weighted and combined, and how long one may take.

    Returns:
        In the same order. Where one can't be scored (the model raised, took too long or answered with no
        finite number) the whole episode has failed, as it does when its environment breaks: every
        trajectory is `FAILED` with the reason.
    """
    if model is None or any(one.ending is Ending.FAILED for one in trajectories):
        return list(trajectories)
    scores: list[float] = []
    for trajectory in trajectories:
        try:
            with anyio.fail_after(config.timeout_s):
                score = await model.score(trajectory)
        except TimeoutError as error:
            reason = str(error) or f"no score within reward.timeout_s ({config.timeout_s:g} s)"
            return _failed(trajectories, f"RewardTimeout: {reason}")
        except Exception as error:
            # Whatever a user's function or a model's engine raises: infrastructure, never a score.
            return _failed(trajectories, f"RewardError: {type(error).__name__}: {error}")
        if not _is_finite(score):
            return _failed(
                trajectories, f"RewardError: a score must be a finite number, got {score!r}"
            )
        scores.append(float(score))
    return [_scored(one, score, config) for one, score in zip(trajectories, scores, strict=True)]


def _scored(trajectory: Trajectory, score: float, config: RewardConfig) -> Trajectory:
    added, turns = config.weight * score, trajectory.turns
    replaces = config.combine == "replace"
    if replaces:
        turns = tuple(turn._replace(reward=0.0) for turn in turns)
    if turns:
        turns = (*turns[:-1], turns[-1]._replace(reward=turns[-1].reward + added))
    return replace(
        trajectory,
        turns=turns,
        reward=added if replaces else trajectory.reward + added,
        metrics={**trajectory.metrics, SCORE: score, ENVIRONMENT: trajectory.reward},
    )


def _failed(trajectories: Sequence[Trajectory], reason: str) -> list[Trajectory]:
    return [replace(one, ending=Ending.FAILED, reason=reason) for one in trajectories]


def _is_finite(score: object) -> bool:
    """Whether it is a number, NumPy's and JAX's included, and a finite one. Users' functions are untyped."""
    try:
        return isinstance(score, SupportsFloat) and math.isfinite(score)
    except (TypeError, OverflowError):  # an array of several, or an int that no float holds
        return False
