"""Memory that is needed again in a moment stays in the process."""

from __future__ import annotations

import ctypes


def keep_memory() -> bool:
    """Keeps freed buffers in the process; call it before JAX starts its threads.

    By default glibc hands every large buffer back to the kernel, and each step and each frame
    fetches its pages again: a step of the tiny model on one core took 1.5 times as long, and
    encoding 1.25 times. Says whether the C library understood.
    """
    arenas, mmap_from, trim_from = -8, -3, -1  # M_ARENA_MAX and so on, from malloc.h
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):  # Not glibc.
        return False
    # Threads other than the first use arenas of 64 MiB at most and map what is larger,
    # whatever the threshold, so there must be one arena only.
    wanted = [(arenas, 1), (mmap_from, 1 << 30), (trim_from, (1 << 31) - 1)]
    return all([mallopt(key, value) == 1 for key, value in wanted])
