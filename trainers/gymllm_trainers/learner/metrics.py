"""What a batch says of itself: host-side counts beside the sums that its micro-batches come with."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gymllm_trainers.packing import PackedBatch


@dataclass
class Counts:
    """Host-side sums over the groups of a batch."""

    groups: int = 0
    zero_variance: int = 0
    filtered: int = 0
    """Episodes left out: by the overlong filter, or as not among the best."""
    penalty: float = 0.0
    """Sum of the soft overlong penalties, in reward units."""
    episodes: int = 0
    generated: int = 0
    stale: int = 0
    lag_sum: int = 0
    lag_max: int = 0

    def add_tokens(self, lag_N: npt.NDArray[np.int32], stale: int) -> None:
        """Counts a segment's generated tokens by their lag; `stale` of them are too old to be trained on."""
        self.generated += len(lag_N)
        self.stale += stale
        self.lag_sum += int(lag_N.sum())
        self.lag_max = max(self.lag_max, int(lag_N.max(initial=0)))

    def metrics(self) -> dict[str, float]:
        """Shares and means, by name."""
        generated, episodes = max(self.generated, 1), max(self.episodes, 1)
        return {
            "lag_mean": self.lag_sum / generated,
            "lag_max": float(self.lag_max),
            "stale_share": self.stale / generated,
            "filtered_episodes": self.filtered / episodes,
            "overlong_penalty": self.penalty / episodes,
        }


@dataclass
class Packing:
    """What was packed into the micro-batches whose gradient is taken, over every pass."""

    tokens: int = 0
    """Tokens computed that are not padding."""
    sequence_tokens: int = 0
    """Tokens of the sequences, before what they share was computed once."""
    computed: int = 0
    """Tokens computed, padding included."""

    def add(self, batch: PackedBatch) -> None:
        """Counts a micro-batch."""
        self.tokens += batch.tokens
        self.sequence_tokens += batch.unshared
        self.computed += batch.ids.size

    def metrics(self) -> dict[str, float]:
        """By name; without micro-batches nothing."""
        if not self.computed:
            return {}
        return {
            "train_tokens": float(self.tokens),
            "padding_share": 1 - self.tokens / self.computed,
            "shared_share": 1 - self.tokens / max(self.sequence_tokens, 1),
        }
