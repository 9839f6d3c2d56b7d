"""The order in which a corpus is read; any region can go on where another stopped.

A corpus is cut into windows of one sequence, and each epoch visits them in its own shuffled
order. Place p of that order belongs to lane p mod L; a region reads the lanes it owns, always
the window at the smallest position first. Regions of one order own different lanes, so no two
of them read the same window in one epoch, however often lanes change hands.

    order of epoch e   ▸ 17  4 92  8 61 30  5 …
    lane 0 of 3          ↑        ↑        ↑      positions 0, 1, 2, …

How far a region has come is its cursor: plain data that says everything to come, whatever the
batch, so a restart neither repeats nor skips.
"""

from __future__ import annotations

import hashlib
import json
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from diloco_cli.core.lanes import CorpusOrder, Cursor, LanePosition
from diloco_cli.errors import SpecError


@dataclass(frozen=True)
class ReadingOrder:
    """One way of reading one corpus."""

    seed: int
    """Of the shuffles."""
    named: CorpusOrder

    @property
    def windows(self) -> int:
        """In one epoch."""
        return self.named.windows

    @property
    def sequence(self) -> int:
        return self.named.sequence

    @classmethod
    def of(
        cls,
        settings: Mapping[str, Any],
        tokens: int,
        *,
        seed: int,
        sequence: int,
        lanes: int,
        content: str | None = None,
    ) -> ReadingOrder:
        """The order of a corpus of so many tokens, under these settings of its dataset.

        `content` is the digest of the corpus, where there is one.
        """
        agreed = _digest([seed, sequence, dict(settings)])
        digest = _digest([agreed, tokens, *([content] if content else [])])
        # Another corpus is shuffled in another way: it does not begin with what was read before.
        named = CorpusOrder(digest, agreed, tokens, _windows(tokens, sequence), sequence, lanes)
        return cls(int(digest[:14], 16), named)

    def starts(self, lanes: np.ndarray, positions: np.ndarray, count: int) -> np.ndarray:
        """Where in the corpus the windows at these positions of these of `count` lanes begin."""
        starts = np.empty_like(positions)
        epochs, rows = np.divmod(positions, self.windows // count)
        places = rows * count + lanes
        for epoch in np.unique(epochs).tolist():
            chosen = epochs == epoch
            window = shuffled(places[chosen], self.windows, self.seed, epoch)
            # Each epoch cuts at other places, so that later ones show new beginnings.
            shift = _mix(self.seed, epoch, 99) % self.sequence
            starts[chosen] = window * self.sequence + shift
        return starts


@dataclass(frozen=True)
class MixedCorpus:
    """One of several corpora that are read in turns."""

    begin: int
    """Where it begins in the row of all tokens."""
    windows: int
    slots: int
    """Its share of a mixed epoch."""


@dataclass(frozen=True)
class MixedOrder(ReadingOrder):
    """One way of reading several corpora, each for a share of the time.

    A mixed epoch has as many slots as there are windows, and every corpus has its share of them,
    by weight. The n-th slot that a corpus ever had shows the n-th window of its own epochs: one
    that is weighed low is read further in the next epoch, one that is weighed high begins again.
    """

    parts: tuple[MixedCorpus, ...] = ()

    @classmethod
    def mixed(
        cls,
        settings: Mapping[str, Any],
        sizes: Sequence[int],
        weights: Sequence[float],
        *,
        seed: int,
        sequence: int,
        lanes: int,
        content: str,
    ) -> MixedOrder:
        """The order of corpora of these sizes in tokens."""
        plain = ReadingOrder.of(
            settings, sum(sizes), seed=seed, sequence=sequence, lanes=lanes, content=content
        )
        windows = [_windows(size, sequence) for size in sizes]
        slots = _shared_out(sum(windows), weights)
        begins = np.cumsum([0, *sizes[:-1]]).tolist()
        parts = tuple(map(MixedCorpus, begins, windows, slots))
        return cls(plain.seed, replace(plain.named, windows=sum(windows)), parts)

    def starts(self, lanes: np.ndarray, positions: np.ndarray, count: int) -> np.ndarray:
        starts = np.empty_like(positions)
        epochs, rows = np.divmod(positions, self.windows // count)
        ends = np.cumsum([part.slots for part in self.parts])
        for epoch in np.unique(epochs).tolist():
            chosen = np.nonzero(epochs == epoch)[0]
            places = rows[chosen] * count + lanes[chosen]
            slots = shuffled(places, self.windows, self.seed, epoch)
            corpora = np.searchsorted(ends, slots, side="right")
            for number in np.unique(corpora).tolist():
                part, own = self.parts[number], corpora == number
                first = int(ends[number]) - part.slots
                turns = epoch * part.slots + slots[own] - first
                starts[chosen[own]] = self._starts_in(number, turns)
        return starts

    def _starts_in(self, number: int, turns: np.ndarray) -> np.ndarray:
        """Where the windows of a corpus begin that are shown at these of its turns."""
        part, starts = self.parts[number], np.empty_like(turns)
        own_epochs, places = np.divmod(turns, part.windows)
        seed = _mix(self.seed, number, 98)
        for epoch in np.unique(own_epochs).tolist():
            chosen = own_epochs == epoch
            window = shuffled(places[chosen], part.windows, seed, epoch)
            shift = _mix(seed, epoch, 99) % self.sequence
            starts[chosen] = part.begin + window * self.sequence + shift
        return starts


def _shared_out(slots: int, weights: Sequence[float]) -> list[int]:
    """Slots by weight, at least one each; what is left over goes to the largest remainders."""
    exact = np.asarray(weights, np.float64) * (slots / sum(weights))
    shares = np.maximum(1, np.floor(exact)).astype(np.int64)
    order = np.argsort(shares - exact, kind="stable")
    for at in range(slots - int(shares.sum())):
        shares[order[at % len(order)]] += 1
    while shares.sum() > slots:
        shares[int(np.argmax(shares))] -= 1
    return shares.tolist()


@dataclass(frozen=True)
class Enough:
    """How much text there must be at least for so many lanes and sequences so long."""

    lanes: int
    sequence: int

    @property
    def training(self) -> int:
        """Tokens; a window for every lane."""
        return self.sequence * (self.lanes + 1) + 1

    @property
    def apart(self) -> int:
        """Tokens; one sequence and the token after it."""
        return self.sequence + 1

    def check(self, training: int, apart: int, *, windows: int | None = None) -> None:
        """Raises a SpecError that says how many tokens are missing."""
        windows = _windows(training, self.sequence) if windows is None else windows
        if windows < self.lanes:
            raise SpecError(
                f"data: {training} tokens to train on are too few for {self.lanes} lanes "
                f"with sequences of {self.sequence}; at least {self.training} are needed.",
                hint="Give more text, shorten `inner.sequence`, or lower `data.lanes`; there is "
                "at least one for each region.",
            )
        if apart < self.apart:
            raise SpecError(
                f"data: the held-out part has {apart} tokens, one sequence takes {self.apart}.",
                hint="Give more text, shorten `inner.sequence`, or raise `data.heldout`.",
            )


@dataclass(frozen=True)
class Stream:
    """One region's batches, in an order fixed by the seed."""

    training: Corpus
    apart: Corpus
    order: ReadingOrder
    batch_size: int
    own: tuple[int, int] | None = None
    """A reader without a server has one lane of so many; all of the corpus when left out."""
    separator: int | None = None
    """The token that ends a document, where documents are to be kept apart."""
    vocabulary: int | None = None
    """Larger numbers are no tokens, where nobody has made sure of that before."""

    @classmethod
    def checked(
        cls,
        training: Corpus,
        apart: Corpus,
        order: ReadingOrder,
        batch: int,
        *,
        separator: int | None = None,
        vocabulary: int | None = None,
    ) -> Stream:
        """Makes one that has enough to read; raises a SpecError that says how much is missing."""
        enough = Enough(order.named.lanes, order.sequence)
        enough.check(training.size, apart.size, windows=order.windows)
        return cls(training, apart, order, batch, separator=separator, vocabulary=vocabulary)

    def start(self, position: int = 0) -> Cursor:
        """The cursor of a reader without a server, which has its lanes for good."""
        index, count = self.own or (0, 1)
        return Cursor(self.order.named.digest, count, {index: LanePosition(0, position)})

    def part(self, index: int, count: int) -> Stream:
        """The part of one of `count` readers who divide the corpus for good."""
        return replace(self, own=(index, count))

    def batch(self, cursor: Cursor) -> tuple[np.ndarray, Cursor]:
        """Gives int32[batch, sequence + 1] and the cursor of the batch after it."""
        lanes, positions, after = next_windows(cursor, self.batch_size)
        return self._rows(self.training, self.order.starts(lanes, positions, cursor.count)), after

    def heldout(self, count: int) -> list[np.ndarray]:
        """Gives `count` batches of text nobody trains on, the same for every region."""
        starts = self.apart.spread(count * self.batch_size, self.order.sequence + 1)
        return [self._rows(self.apart, part) for part in np.split(starts, count)]

    def _rows(self, corpus: Corpus, starts: np.ndarray) -> np.ndarray:
        size = self.order.sequence + 1
        rows = np.empty((len(starts), size), np.int32)
        for row, start in zip(rows, starts.tolist(), strict=True):
            row[:] = corpus.window(start, size)
        if self.vocabulary is not None and not 0 <= rows.min() <= rows.max() < self.vocabulary:
            raise SpecError(
                f"data: there is a token {rows.max()}, but `data.vocabulary` is {self.vocabulary}.",
                hint="Is it the vocabulary of the tokenizer that the files were made with?",
            )
        return rows


def next_windows(cursor: Cursor, count: int) -> tuple[np.ndarray, np.ndarray, Cursor]:
    """Lanes and positions of the next windows in their order, and the cursor after them.

    The next window is always at the smallest position, ties by the number of the lane.
    """
    numbers = sorted(cursor.lanes)
    own = [cursor.lanes[lane] for lane in numbers]
    lanes = np.fromiter(numbers, np.int64, len(own))
    begin = np.fromiter((at.position for at in own), np.int64, len(own))
    rows = np.arange(int(begin.min()), _level(begin, count) + 1)
    # A lane takes part from its own position on: row after row is what comes next.
    row, column = (found[:count] for found in np.nonzero(rows[:, None] >= begin))
    after = (begin + np.bincount(column, minlength=len(own))).tolist()
    moved = {
        lane: LanePosition(at.grant, position)
        for lane, at, position in zip(numbers, own, after, strict=True)
    }
    return lanes[column], rows[row], replace(cursor, lanes=moved)


def _level(begin: np.ndarray, count: int) -> int:
    """The position that the last of the next `count` windows has."""
    low = np.sort(begin)
    sums, lanes = np.cumsum(low), np.arange(1, low.size + 1)
    # Windows below each lane's own position, all read before it takes part.
    below = low * (lanes - 1) - (sums - low)
    taking_part = int(np.searchsorted(below, count, side="left"))
    return int(-(-(count + sums[taking_part - 1]) // taking_part)) - 1


class Corpus:
    """Many files read as one row of tokens, without copying the large ones."""

    def __init__(self, pieces: Sequence[np.ndarray]) -> None:
        self.pieces = list(pieces)
        self.ends: list[int] = np.cumsum([piece.size for piece in pieces]).tolist()
        self.size = self.ends[-1] if self.pieces else 0
        # The same without what numpy does whenever a part of a memory map is made.
        self._plain = [np.asarray(piece) for piece in pieces]

    def window(self, start: int, size: int) -> np.ndarray:
        number = bisect_right(self.ends, start)
        offset = start - (self.ends[number] - self._plain[number].size)
        parts = [self._plain[number][offset : offset + size]]
        while (missing := size - sum(part.size for part in parts)) > 0:
            number += 1
            parts.append(self._plain[number][:missing])
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def spread(self, count: int, size: int) -> np.ndarray:
        """Where so many windows begin that are spread over all of it."""
        return np.linspace(0, self.size - size, count).astype(np.int64)


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


def _digest(parts: list[Any]) -> str:
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:32]


@lru_cache(maxsize=64)
def _mix(*numbers: int) -> int:
    text = ".".join(map(str, numbers)).encode()
    return int.from_bytes(hashlib.sha256(text).digest()[:7], "little")
