"""Memory that is no longer needed goes back to the system.

A server makes large vectors and drops them all day. Left to itself, glibc learns to keep
such memory for the next one, in each of the many heaps it opens for threads, and a process
that needs 250 MB keeps 400.

Nor is memory filled with what nobody needs: numba loads SciPy's linear algebra, 18 MB, along
with the first kernel, and no kernel of ours multiplies matrices.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Sequence
from contextlib import suppress
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8

LARGE = 1 << 20
"""Bytes from which memory is asked of the system, and given back to it, on its own."""

HEAPS = 2


class _NotForNumba(MetaPathFinder):
    """Hides SciPy's linear algebra from numba, which can do without; from nobody else."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if name == "scipy.linalg":
            frame = sys._getframe(1)
            while frame is not None:
                if frame.f_globals.get("__name__") == "numba.np.linalg":
                    raise ModuleNotFoundError("not needed here", name=name)
                frame = frame.f_back
        return None


def keep_little() -> None:
    """Makes this process give back what it frees, and load less.

    Elsewhere than on glibc nothing is given back.
    """
    if not any(isinstance(each, _NotForNumba) for each in sys.meta_path):
        sys.meta_path.insert(0, _NotForNumba())
    if sys.platform != "linux":
        return
    with suppress(OSError, AttributeError):
        mallopt = ctypes.CDLL("libc.so.6").mallopt
        mallopt(_M_ARENA_MAX, HEAPS)
        mallopt(_M_MMAP_THRESHOLD, LARGE)
        mallopt(_M_TRIM_THRESHOLD, 2 * LARGE)
