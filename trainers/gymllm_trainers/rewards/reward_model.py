"""What a reward model is."""

from __future__ import annotations

from typing import Protocol

from gymllm.trajectory import Trajectory


class RewardModel(Protocol):
    """Scores finished episodes. Many may be asked for at once; cancelling `score` gives its own up."""

    async def score(self, trajectory: Trajectory) -> float:
        """How good the episode was: any finite number.

        Raises:
            Exception: It can't be told. That is never a score of 0: whoever asked lets the episode fail.
        """
        ...
