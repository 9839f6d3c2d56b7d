"""Memory that is no longer needed goes back to the system.

A server makes large vectors and drops them all day. Left to itself, glibc learns to keep
such memory for the next one, in each of the many heaps it opens for threads, and a process
that needs 250 MB keeps 400.
"""

from __future__ import annotations

import ctypes
import sys
from contextlib import suppress

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8

LARGE = 1 << 20
"""Bytes from which memory is asked of the system, and given back to it, on its own."""

HEAPS = 2


def keep_little() -> None:
    """Makes this process give back what it frees; elsewhere than on glibc nothing happens."""
    if sys.platform != "linux":
        return
    with suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL("libc.so.6").mallopt
        mallopt(_M_ARENA_MAX, HEAPS)
        mallopt(_M_MMAP_THRESHOLD, LARGE)
        mallopt(_M_TRIM_THRESHOLD, 2 * LARGE)
