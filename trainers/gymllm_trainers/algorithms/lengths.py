"""Episodes that are too long: a penalty that rises before the limit, and which cut ones are left out."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gymllm.errors import ConfigError
from gymllm.trajectory import Ending
from gymllm_trainers.algorithms.names import OverlongFilter

MACHINE_LIMITS = frozenset({"episode_timeout", "wall_clock"})
"""Reasons of truncation that are of the machine: on a faster one the same episode would have gone on."""


def soft_overlong(tokens: npt.ArrayLike, *, limit: int, buffer: float) -> npt.NDArray[np.float32]:
    """clamp((limit - buffer - tokens) / buffer, -1, 0): what is added to an episode's reward.

    DAPO, eq. 13 of Yu et al. 2025 (arXiv:2503.14476).

    Args:
        tokens: Tokens that the policy generated in each episode, any shape.
        limit: L_max, tokens: here the penalty is 1.
        buffer: L_buf, tokens: over so many before the limit it rises from 0.

    Returns:
        Penalty from -1 to 0, float32, the shape of `tokens`.

    Raises:
        ConfigError: `buffer` is not in (0, limit].
    """
    if not 0 < buffer <= limit:
        raise ConfigError(
            f"the soft overlong penalty's buffer must be > 0 and at most its limit, got {buffer:g} and "
            f"{limit} tokens: set algorithm.overlong_buffer and overlong_limit."
        )
    length = np.asarray(tokens, np.float64)
    return np.clip((limit - buffer - length) / buffer, -1.0, 0.0).astype(np.float32)


def overlong(ending: Ending, reason: str, *, rule: OverlongFilter) -> bool:
    """Whether an episode is left out of training because a limit cut it short.

    The overlong filter of DAPO, sec. 3.4 of Yu et al. 2025 (arXiv:2503.14476): whether the policy would
    have solved the task isn't known, so its reward is noise.

    Args:
        ending: How the episode ended.
        reason: Which limit truncated it (`Trajectory.reason`), perhaps with an agent's name after it.
        rule: machine: only limits of time on the clock; all: every limit; off: none.
    """
    if rule == "off" or ending is not Ending.TRUNCATED:
        return False
    return rule == "all" or reason.split(" (", 1)[0] in MACHINE_LIMITS
