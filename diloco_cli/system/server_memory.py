"""Memory that is no longer needed goes back to the system.

A server makes large vectors and drops them all day. Left to itself, glibc learns to keep
such memory for the next one, in each of the many heaps it opens for threads, and a process
that needs 250 MB keeps 400.

Once the kernels are loaded, 70 MB of numba's compiler are of no more use either. Decision 11
in docs/decisions has the figures.
"""

from __future__ import annotations

import ctypes
import re
import sys
from collections.abc import Iterator
from contextlib import suppress

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8

LARGE = 1 << 20
"""Bytes from which memory is asked of the system, and given back to it, on its own."""

SPARE = 16 << 20
"""Bytes at the end of a heap that are kept for the next body: pieces of uploads come and go by
the thousand, and fetching their pages anew costs a twelfth of an upload."""

HEAPS = 2

COMPILER = "libllvmlite"
_MADV_DONTNEED = 4
_MAPPING = re.compile(r"([0-9a-f]+)-([0-9a-f]+) (\S+) .*")


def keep_little() -> None:
    """Makes this process give back what it frees; does nothing where there is no glibc."""
    if sys.platform != "linux":
        return
    with suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL("libc.so.6").mallopt
        mallopt(_M_ARENA_MAX, HEAPS)
        mallopt(_M_MMAP_THRESHOLD, LARGE)
        mallopt(_M_TRIM_THRESHOLD, SPARE)


def forget_compiler() -> int:
    """Lets go of the pages of numba's compiler; says how many bytes of addresses that were.

    They are the library's own, so the system finds them again should one more kernel be
    loaded. Pages that were written to when it was (relocations) stay.
    """
    found = 0
    with suppress(OSError, AttributeError):
        madvise = ctypes.CDLL(None).madvise
        for start, length in _unwritten(COMPILER):
            if madvise(ctypes.c_void_p(start), ctypes.c_size_t(length), _MADV_DONTNEED) == 0:
                found += length
    return found


def _unwritten(library: str) -> Iterator[tuple[int, int]]:
    """Where a library's file is mapped as it is: (address, bytes)."""
    here: tuple[int, int] | None = None
    with open("/proc/self/smaps") as lines:
        for line in lines:
            if mapping := _MAPPING.fullmatch(line.rstrip()):
                start, stop = (int(each, 16) for each in mapping.group(1, 2))
                wanted = library in line and "w" not in mapping[3] and "p" in mapping[3]
                here = (start, stop - start) if wanted else None
            elif here and line.split() == ["Anonymous:", "0", "kB"]:
                yield here
