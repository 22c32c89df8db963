"""How a process that plays thousands of episodes looks after its memory."""

from __future__ import annotations

import gc

YOUNG, MIDDLE, OLD = 200_000, 20, 100
"""Allocations, and collections of the generation below, between two collections (Python's: 700, 10, 10)."""


def collect_rarely() -> None:
    """Has Python's cyclic garbage collector look less often, for the whole process.

    Thousands of live episodes are looked through again and again: with 4,096 of them that is a third of
    all time. What is alive now, modules above all, is never looked at again. Commands call this at their
    start; a library should not.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG, MIDDLE, OLD)
