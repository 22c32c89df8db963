"""Large pages of the system's memory for arrays that are read at random, as the paged cache is.

With pages of 4 kB a processor looks up where memory is for each page of keys; that takes longer than
reading them.
"""

from __future__ import annotations

import ctypes
import sys

import jax
from jax import Array

_ADVISE_LARGE, _COLLAPSE = 14, 25
"""MADV_HUGEPAGE; MADV_COLLAPSE, of Linux 6.1 (madvise(2))."""
_LARGE_BYTES = 2**21


def use_large_pages(array: Array) -> bool:
    """Moves an array in a CPU's memory to large pages, where the system has them; its address stays.

    It takes about as long as copying it. The array is in use meanwhile only by the caller.

    Returns:
        Whether that was done. False for arrays of less than a large page, and on other systems.
    """
    array.block_until_ready()
    if not sys.platform.startswith("linux") or jax.default_backend() != "cpu":
        return False
    if len(array.sharding.device_set) > 1:
        return False
    start = array.unsafe_buffer_pointer()
    first = -(-start // _LARGE_BYTES) * _LARGE_BYTES
    last = (start + array.nbytes) // _LARGE_BYTES * _LARGE_BYTES
    if last <= first:
        return False
    advise = ctypes.CDLL(None, use_errno=True).madvise
    advise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    size = last - first
    return not advise(first, size, _ADVISE_LARGE) and not advise(first, size, _COLLAPSE)
