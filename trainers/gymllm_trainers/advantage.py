"""Advantages: what a group's rewards say of each of its members.

Pure functions of arrays. Axes: P groups, G members.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
import numpy.typing as npt

from gymllm.errors import ConfigError

AdvantageName = Literal["centred", "grpo"]


def centred(reward_PG: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Reward less the group's mean.

    Dr. GRPO, sec. 3.2 of Liu et al. 2025 (arXiv:2503.20783): GRPO's advantage without the division by
    the group's spread, which weights nearly solved and nearly hopeless tasks up.

    Args:
        reward_PG: Return of each episode, float32, shape [P, G] with G >= 2.

    Returns:
        Advantage, shape [P, G]; exactly zero for a group whose rewards are all equal.

    Raises:
        ConfigError: G < 2.
    """
    _require_group(reward_PG)
    # The float32 mean of equal numbers can differ from them by one rounding: say zero outright.
    spread = np.ptp(reward_PG, axis=1, keepdims=True)
    return np.where(spread == 0, 0, reward_PG - reward_PG.mean(axis=1, keepdims=True)).astype(
        np.float32
    )


def grpo(reward_PG: npt.NDArray[np.float32], *, eps: float = 1e-6) -> npt.NDArray[np.float32]:
    """Reward less the group's mean, over the group's standard deviation (ddof 1).

    GRPO, sec. 4.1 of Shao et al. 2024 (arXiv:2402.03300).

    Args:
        reward_PG: Return of each episode, float32, shape [P, G] with G >= 2.
        eps: Added to the standard deviation, in reward units.

    Returns:
        Advantage, shape [P, G]; exactly zero for a group whose rewards are all equal.

    Raises:
        ConfigError: G < 2.
    """
    centre = centred(reward_PG)
    return (centre / (reward_PG.std(axis=1, ddof=1, keepdims=True) + eps)).astype(np.float32)


def advantages(name: AdvantageName, reward_PG: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """The advantage called `name`, shape [P, G]."""
    return centred(reward_PG) if name == "centred" else grpo(reward_PG)


def _require_group(reward_PG: npt.NDArray[np.float32]) -> None:
    if reward_PG.ndim != 2 or reward_PG.shape[1] < 2:
        raise ConfigError(
            f"a group baseline needs rewards of shape [groups, members] with at least 2 members, got "
            f"shape {reward_PG.shape}; set rollout.group_size >= 2."
        )
