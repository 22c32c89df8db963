"""How the C library hands out memory while JAX computes on a CPU."""

from __future__ import annotations

import ctypes
import sys

_TRIM_THRESHOLD, _TOP_PAD, _MMAP_MAX, _ARENA_MAX = -1, -2, -4, -8
"""glibc's names for them, mallopt(3)."""


def keep_freed_memory() -> None:
    """Makes glibc keep memory that was freed, for the whole process. Call it before threads start.

    XLA frees its temporaries after each program; by default they go back to the kernel, and a fifth of a
    small model's training time is page faults. No-op without glibc.
    """
    if not sys.platform.startswith("linux"):
        return
    try:
        mallopt = ctypes.CDLL("libc.so.6").mallopt
    except (OSError, AttributeError):
        return
    # A few, not one: threads that compile at once would wait for each other's every allocation.
    mallopt(_ARENA_MAX, 4)
    mallopt(_MMAP_MAX, 0)
    mallopt(_TRIM_THRESHOLD, 2**31 - 1)
    mallopt(_TOP_PAD, 64 * 2**20)
