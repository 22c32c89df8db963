"""How long things may take in a pool, and what it counts."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How long things may take in a slot, in seconds."""

    start_timeout_s: float
    """Making the environment, once it is its turn."""
    reset_timeout_s: float
    step_timeout_s: float
    close_timeout_s: float


@dataclass(kw_only=True)
class PoolStats:
    """What a pool has counted since it was made."""

    resets: int = 0
    steps: int = 0
    crashes: int = 0
    """Calls that raised."""
    timeouts: int = 0
    """Calls that passed their limit."""
    type_errors: int = 0
    """Answers of a wrong type."""
    cancelled: int = 0
    """Calls that were cancelled by whoever made them."""
    close_failures: int = 0
    """Environments that raised in `close` or did not end it in time."""
    built: int = 0
    """Environments that were made, the first ones and spare ones included."""
    rebuilt: int = 0
    """... of these, in place of one that broke."""
    abandoned_threads: int = 0
    """Threads left behind because their environment never came back."""
