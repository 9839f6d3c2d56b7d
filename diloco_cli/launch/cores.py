"""Which cores may this process use, and which of them does each region get?"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Sequence


def my_cores() -> tuple[int, ...]:
    """Lists the cores this process may use."""
    if sys.platform == "linux":
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def deal_cores(names: Sequence[str], cores: Iterable[int]) -> dict[str, tuple[int, ...]]:
    """Deals the cores out: neighbours stay together, shares differ by one, each has at least one.

    With more names than cores, some share a core.
    """
    deck = sorted(cores)
    if len(names) > len(deck):
        return {name: (deck[n % len(deck)],) for n, name in enumerate(names)}
    small, more = divmod(len(deck), len(names)) if names else (0, 0)
    shares: dict[str, tuple[int, ...]] = {}
    start = 0
    for n, name in enumerate(names):
        size = small + (n < more)
        shares[name] = tuple(deck[start : start + size])
        start += size
    return shares
