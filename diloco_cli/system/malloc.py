"""glibc's malloc, tuned two ways: a trainer keeps what it frees, a server gives it back.

A trainer needs the same large buffers again in every step. A server makes large vectors and
drops them all day: left to itself, glibc learns to keep such memory for the next one, in each
of the many heaps it opens for threads, and a process that needs 250 MB keeps 400. Once the
kernels are loaded, 70 MB of numba's compiler are of no more use to it either. Decision 11 in
docs/decisions has the figures.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Iterator
from contextlib import suppress

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # M_TRIM_THRESHOLD …, from malloc.h

LARGE = 1 << 20
"""Bytes from which the server maps memory on its own, and unmaps it when it is freed."""

SPARE = 16 << 20
"""Bytes at the end of a heap that the server keeps for the next body: pieces of uploads come and
go by the thousand, and fetching their pages again costs a twelfth of an upload."""

COMPILER = "libllvmlite"
_MADV_DONTNEED = 4
_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (\S+) .*")


def keep_memory() -> bool:
    """Keeps freed buffers in the process; call it before JAX starts its threads.

    By default glibc hands every large buffer back to the kernel, and each step and each frame
    fetches its pages again: a step of the tiny model on one core took 1.5 times as long, and
    encoding 1.25 times. Says whether the C library understood.
    """
    # Threads other than the first use arenas of 64 MiB at most and map what is larger,
    # whatever the threshold, so there must be one arena only.
    return _tune(arenas=1, mmap_from=1 << 30, trim_from=(1 << 31) - 1)


def return_memory() -> bool:
    """Gives freed buffers back to the system; says whether the C library understood."""
    return _tune(arenas=2, mmap_from=LARGE, trim_from=SPARE)


def _tune(*, arenas: int, mmap_from: int, trim_from: int) -> bool:
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):  # Not glibc.
        return False
    options = [(_ARENA_MAX, arenas), (_MMAP_THRESHOLD, mmap_from), (_TRIM_THRESHOLD, trim_from)]
    return all([mallopt(key, value) == 1 for key, value in options])


def release_compiler() -> int:
    """Releases the pages of numba's compiler; says how many bytes of addresses they cover.

    They are the library's own, so the system reads them again should one more kernel be
    loaded. Pages that were written to at load time (relocations) stay.
    """
    released = 0
    with suppress(OSError, AttributeError):
        madvise = ctypes.CDLL(None).madvise
        for start, length in _unwritten(COMPILER):
            if madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), _MADV_DONTNEED) == 0:
                released += length
    return released


def _unwritten(library: str) -> Iterator[tuple[int, int]]:
    """Yields (address, bytes) where a library's file is mapped unchanged."""
    candidate: tuple[int, int] | None = None
    with open("/proc/self/smaps") as lines:
        for line in lines:
            if mapping := _MAPPING.fullmatch(line.rstrip()):
                start, stop = (int(address, 16) for address in mapping.group(1, 2))
                unwritable = library in line and "w" not in mapping[3] and "p" in mapping[3]
                candidate = (start, stop - start) if unwritable else None
            elif candidate and line.split() == ["Anonymous:", "0", "kB"]:
                yield candidate
