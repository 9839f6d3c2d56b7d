"""The order in which a region reads its text; it survives a restart.

A corpus is cut into windows of one sequence. Each epoch visits all windows in its own
shuffled order; region i of N takes every N-th place of that order, starting at i, so
regions that share a corpus (and a sequence length) never read the same window in one
epoch. How far a region has come is one number, the cursor; it is plain data and says
everything, so a restart neither repeats nor skips.

    order of epoch e   ▸ 17  4 92  8 61 30  5 …
    region 0 of 3        ↑        ↑        ↑
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from diloco_cli.spec.schema import RunSpec

Cursor = dict[str, int]


def place_of(spec: RunSpec, region: str) -> tuple[int, int]:
    """Says which of how many readers of its corpus a region is, for `open`."""
    data = spec.data_of(region)
    together = [other.name for other in spec.regions if spec.data_of(other.name) == data]
    return together.index(region), len(together)


@dataclass(frozen=True)
class Share:
    """Which part of a corpus one region reads, and in what portions."""

    seed: int
    index: int
    count: int
    batch: int
    sequence: int


@dataclass(frozen=True)
class Stream:
    """One region's batches, in an order fixed by the seed."""

    training: Corpus
    apart: Corpus
    share: Share

    def start(self) -> Cursor:
        return {"windows": 0}

    def batch(self, cursor: Cursor) -> tuple[np.ndarray, Cursor]:
        """Gives int32[batch, sequence + 1] and the cursor of the batch after it."""
        begin = cursor["windows"]
        end = begin + self.share.batch
        starts = self._starts(np.arange(begin, end))
        return self._rows(self.training, starts), {"windows": end}

    def heldout(self, count: int) -> list[np.ndarray]:
        """Gives `count` batches of text nobody trains on, the same for every region."""
        last = self.apart.size - self.share.sequence - 1
        starts = np.linspace(0, last, count * self.share.batch).astype(np.int64)
        return [self._rows(self.apart, part) for part in np.split(starts, count)]

    @property
    def windows(self) -> int:
        """Windows this region reads in one epoch."""
        return _windows(self.training.size, self.share.sequence) // self.share.count

    def _starts(self, numbers: np.ndarray) -> np.ndarray:
        total = _windows(self.training.size, self.share.sequence)
        starts = np.empty_like(numbers)
        epochs, places = np.divmod(numbers, self.windows)
        for epoch in np.unique(epochs):
            chosen = epochs == epoch
            slots = places[chosen] * self.share.count + self.share.index
            window = shuffled(slots, total, self.share.seed, int(epoch))
            # Each epoch cuts at other places, so that later ones show new beginnings.
            shift = _mix(self.share.seed, int(epoch), 99) % self.share.sequence
            starts[chosen] = window * self.share.sequence + shift
        return starts

    def _rows(self, corpus: Corpus, starts: np.ndarray) -> np.ndarray:
        size = self.share.sequence + 1
        return np.stack([corpus.window(int(start), size) for start in starts]).astype(np.int32)


class Corpus:
    """Many files read as one row of tokens, without copying the large ones."""

    def __init__(self, pieces: Sequence[np.ndarray]) -> None:
        self.pieces = list(pieces)
        self.ends = np.cumsum([piece.size for piece in pieces])
        self.size = int(self.ends[-1]) if self.pieces else 0

    def window(self, start: int, size: int) -> np.ndarray:
        number = int(np.searchsorted(self.ends, start, side="right"))
        offset = start - (int(self.ends[number]) - self.pieces[number].size)
        parts = [self.pieces[number][offset : offset + size]]
        while (missing := size - sum(part.size for part in parts)) > 0:
            number += 1
            parts.append(self.pieces[number][:missing])
        return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _windows(size: int, sequence: int) -> int:
    """Counts windows with room for the next token and for a shift of up to one window."""
    return max(0, (size - 1) // sequence - 1)


def shuffled(places: np.ndarray, total: int, seed: int, epoch: int) -> np.ndarray:
    """Says which window stands at each place of an epoch's order.

    A Feistel network is a permutation whatever its round function, and needs no table:
    a corpus of a billion windows costs no memory. Numbers that fall outside `total` are
    sent through again until they land inside.
    """
    half = max(1, ((total - 1).bit_length() + 1) // 2)
    keys = [_mix(seed, epoch, number) for number in range(6)]
    result = _feistel(places.astype(np.uint64), half, keys)
    while (outside := result >= total).any():
        result[outside] = _feistel(result[outside], half, keys)
    return result.astype(np.int64)


def _feistel(values: np.ndarray, half: int, keys: list[int]) -> np.ndarray:
    mask = np.uint64((1 << half) - 1)
    left, right = values >> np.uint64(half), values & mask
    for key in keys:
        # Odd multiplier and high bits: the low bits of a product mix badly.
        noise = (right + np.uint64(key)) * np.uint64(0x9E3779B97F4A7C15)
        noise ^= noise >> np.uint64(29)
        noise *= np.uint64(0xBF58476D1CE4E5B9)
        left, right = right, left ^ ((noise >> np.uint64(32)) & mask)
    return (left << np.uint64(half)) | right


def _mix(*numbers: int) -> int:
    text = ".".join(map(str, numbers)).encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:7], "little")
