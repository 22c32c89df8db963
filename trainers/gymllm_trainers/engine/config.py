"""Sizes of the embedded engine. All its compiled shapes follow from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gymllm.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """How the embedded engine serves."""

    slots: int = 32
    """Conversations whose keys and values are kept; also the most that generate at once."""
    context_length: int = 384
    """Tokens of prompt and generation together that a slot holds."""
    small_batch: int = 8
    """Rows of the smaller of two batch shapes; the larger has a row for every slot."""
    prefill_chunks: tuple[int, ...] = (32, 128)
    """Prompt tokens that one step takes from a conversation; each size is compiled once a batch shape."""
    share_prefix: int = 32
    """Fewest common tokens for which one slot's keys and values are copied into another, or a request
    waits for another that computes them already."""
    reuse_lag: int = 2
    """Policy versions that kept keys and values may be behind when a request goes on from them; older
    ones are computed again."""
    cache_dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the kept keys and values."""

    def __post_init__(self) -> None:
        for name in ("slots", "small_batch", "share_prefix"):
            if getattr(self, name) < 1:
                raise ConfigError(f"engine.{name} must be >= 1, got {getattr(self, name)}.")
        if self.context_length < 2:
            raise ConfigError(f"engine.context_length must be >= 2, got {self.context_length}.")
        if self.reuse_lag < 0:
            raise ConfigError(f"engine.reuse_lag must be >= 0, got {self.reuse_lag}.")
        chunks = self.prefill_chunks
        if not chunks or any(c < 2 for c in chunks) or list(chunks) != sorted(set(chunks)):
            raise ConfigError(
                f"engine.prefill_chunks must be different sizes >= 2 in rising order, got {chunks}."
            )

    @property
    def batch_rows(self) -> tuple[int, ...]:
        """The batch shapes, in rows."""
        return tuple(sorted({min(self.small_batch, self.slots), self.slots}))

    @property
    def shapes(self) -> tuple[tuple[int, int], ...]:
        """Every compiled step, as (rows, tokens a row)."""
        return tuple((rows, size) for size in (1, *self.prefill_chunks) for rows in self.batch_rows)
