"""Large vectors whose memory is reused.

A version's vectors live until the next version takes their place, and that one has the same
size. Memory that goes back to the system in between comes back cleared, page by page, which
takes longer than the arithmetic that fills it.

    fresh(size) ──▶ a vector, used like any other ──last reference gone──▶ spare ──▶ fresh(size)

Nothing is given back by hand: memory is spare once no array, view or buffer of the vector is
left, so a reader of an old version keeps reading that version.
"""

from __future__ import annotations

import weakref
from collections import deque

import numpy as np

SMALL = 1 << 18
"""Values below which memory is had for nothing."""

MOST_SPARE = 3
"""Vectors of one version of a fragment: weights, momentum, published weights."""

LOOSE = 1.05
"""Fragments differ a little in size, so memory is asked for with some to spare for the next;
what is never touched is never given."""

_spare: deque[np.ndarray] = deque(maxlen=MOST_SPARE)


def fresh(size: int) -> np.ndarray:
    """A float32 vector with anything in it."""
    if size < SMALL:
        return np.empty(size, np.float32)
    block = _fitting(size)
    # Views refer to this array, not to the block: over a memoryview numpy looks no deeper.
    vector = np.frombuffer(block.data, np.float32, size)
    weakref.finalize(vector, _spare.append, block).atexit = False
    return vector


def _fitting(size: int) -> np.ndarray:
    # Without a lock, since a vector may die anywhere, also in here: each call is one act.
    for _ in range(MOST_SPARE):
        try:
            block = _spare.popleft()
        except IndexError:
            break
        if size <= block.size <= 1.25 * size:
            return block
        del block  # Too small or far too large: it makes room for one that fits.
    return np.empty(int(LOOSE * size), np.float32)
