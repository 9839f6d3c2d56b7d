"""How long does a trainer take from its first instruction to its first inner step?

    import    Python, JAX and everything else is loaded, the process is set up
    restore   data, checkpoint, images: everything it goes on from is in memory
    compile   the first step is traced, loaded from the compile cache or compiled, and done

A region that lost its trainer stands still for the sum of these.
"""

from __future__ import annotations

import itertools
import os
import time
from pathlib import Path

PARTS = ("import", "restore", "compile")


class StartupTimes:
    """Measures the parts one after the other."""

    def __init__(self, began: float | None = None) -> None:
        self._began = time.time() - age() if began is None else began
        self._marks: list[float] = []

    def mark(self) -> None:
        """One part is over, the next one begins."""
        self._marks.append(time.time())

    def seconds(self) -> dict[str, float]:
        """What each part took, and all of them together."""
        edges = [self._began, *self._marks]
        took = [after - before for before, after in itertools.pairwise(edges)]
        parts = {name: round(max(0.0, one), 3) for name, one in zip(PARTS, took, strict=False)}
        return {**parts, "total": round(max(0.0, edges[-1] - self._began), 3)}


def age() -> float:
    """Seconds since this process was started; 0 where the system does not say."""
    try:
        stat = Path("/proc/self/stat").read_text()
        up = float(Path("/proc/uptime").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 0.0
    # The name of the program may hold anything, brackets too; what we want comes after it.
    ticks = int(stat.rpartition(")")[2].split()[19])
    return max(0.0, up - ticks / os.sysconf("SC_CLK_TCK"))
