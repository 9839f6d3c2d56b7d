"""Many frames become one delta: the first two sweeps of a merge.

    1  every member, chunk by chunk   squares of each piece      → lengths
    2  every chunk, all members       Σ weight·delta, Σ weight·direction, and their lengths

`core/merge.py` says what is computed here and why; only rounding may differ, in the last
bit: lengths are summed in another order, and a sum of directions is stored as float32
before it gets its length.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import cast

import numpy as np

from diloco_cli.core.fragments import Fragment
from diloco_cli.errors import WireError
from diloco_cli.merge.robust import ByColumn, Clipped
from diloco_cli.merge.rules import MergeRule, Radial, radial_factor
from diloco_cli.wire.chunks import CHUNK, in_chunks, span_of, spread, tools
from diloco_cli.wire.codecs.block import Nibbles
from diloco_cli.wire.codecs.protocol import raw
from diloco_cli.wire.frame import Frame

TOGETHER = 32
"""Members whose chunks are decompressed at the same time: half a megabyte each in int4."""

KEPT_BYTES = 8
"""Decompressed bytes for each value that may wait for the second sweep: 16 members in int4."""

STRIP = 1 << 14
"""Values sorted at a time, so that all members' lie in the cache."""

Parts = list[tuple[int, slice]]
"""Pieces by number, and which of the fragment's values are meant."""


class MemberUnfit(Exception):
    """A member's frame cannot be decoded; `number` is its place among the members."""

    def __init__(self, number: int, error: WireError) -> None:
        super().__init__(error.message)
        self.number = number
        self.error = error


def merge_into(
    merged: np.ndarray,
    rule: MergeRule,
    fragment: Fragment,
    members: Sequence[tuple[float, Frame]],
    *,
    squares: Sequence[np.ndarray | None] = (),
    threads: int | None,
) -> list[float]:
    """Writes what is merged; says with what each piece is still to be multiplied.

    Raises MemberUnfit for a frame that does not decode.
    """
    frames = [frame for _, frame in members]
    if isinstance(rule, ByColumn):
        list(in_chunks(_Columns(rule, frames, merged).chunk, fragment.size, threads))
        return [1.0] * len(fragment.pieces)
    edges = edges_of(fragment)
    weights = np.array([weight for weight, _ in members])
    radial = np.array([type(rule) is Radial and not p.embedding for p in fragment.pieces])
    # What a delta counts with: its weight, or where directions are added up, its weight by
    # its length; a delta without a length has no direction.
    counts = np.where(radial, 0.0, weights[:, None])
    lengths = np.zeros_like(counts)
    bodies = _Bodies(frames, fragment.size)
    if radial.any() or isinstance(rule, Clipped):
        known = [each for each in squares if each is not None]
        if len(known) < len(members):
            known = _squares(bodies, edges, threads)
        lengths = np.sqrt(known) * radial
        np.divide(weights[:, None], lengths, out=counts, where=lengths > 0)
        if isinstance(rule, Clipped):
            shares = rule.shares(np.sqrt(np.sum(known, axis=1)).tolist())
            counts *= np.array(shares)[:, None]
    weight = _in_order(weights)
    fold = _Fold(edges, bodies, weights, counts, 1 / weight, merged)
    sums = sum(in_chunks(fold.chunk, fragment.size, threads), start=np.zeros(1))
    factors, cancelled = [1.0] * len(radial), []
    for number in np.flatnonzero(radial).tolist():
        mean = _in_order(weights * lengths[:, number]) / weight
        straight, agreement = (math.sqrt(square) for square in sums[:, number])
        by_direction, factor = radial_factor(len(frames), weight, mean, straight, agreement)
        factors[number] = factor * weight
        if not by_direction:
            cancelled.append(number)
    if cancelled:  # Rare. There the deltas are added up after all.
        counts[:, cancelled] = weights[:, None]
        fold.only = frozenset(cancelled)
        list(in_chunks(fold.chunk, fragment.size, threads))
    return factors


def _in_order(numbers: np.ndarray) -> float:
    return float(sum(numbers.tolist()))


class _Bodies:
    """Decompresses the members' chunks, and keeps them for a second time if they are small."""

    def __init__(self, frames: list[Frame], size: int) -> None:
        self.frames = frames
        self.codec = frames[0].codec
        self.size = size
        alike = all(frame.codec == self.codec for frame in frames)
        self.folds = alike and isinstance(self.codec, Nibbles) and len(frames) <= TOGETHER
        """Whether all members of a chunk are folded at once."""
        small = len(frames) * self.codec.body_size(size) <= KEPT_BYTES * size
        self._kept: dict[int, np.ndarray] | None = {} if self.folds and small else None

    def prepare(self) -> None:
        """Makes room, so that threads fill what is there and nothing else."""
        if self._kept is not None:
            for place in range(-(-self.size // CHUNK)):
                self._kept[place] = np.empty((len(self.frames), self.length(place)), np.uint8)

    def length(self, place: int) -> int:
        span = span_of(place, self.size)
        return self.codec.body_size(span.stop - span.start)

    def one(self, member: int, place: int) -> bytes:
        try:
            return self.frames[member].body(place)
        except WireError as error:
            raise MemberUnfit(member, error) from error

    def look(self, member: int, place: int, edges: list[int]) -> np.ndarray:
        """Sums the squares of one member's chunk; keeps its body."""
        body = self.one(member, place)
        if self._kept is not None:
            self._kept[place][member] = raw(body, self.length(place))
        try:
            return self.frames[member].chunk_squares(place, edges, body)
        except WireError as error:
            raise MemberUnfit(member, error) from error

    def all(self, place: int) -> np.ndarray:
        """Gives the bodies of all members of a chunk; valid until the next call in a thread."""
        if self._kept:
            return self._kept[place]
        length = self.length(place)
        bodies = tools.scratch("bodies", len(self.frames) * length, np.uint8)
        bodies = bodies.reshape(len(self.frames), length)
        for member in range(len(self.frames)):
            bodies[member] = raw(self.one(member, place), length)
        return bodies

    def values(self, member: int, place: int, count: int) -> np.ndarray:
        """Decodes one member's chunk; valid until the next call in a thread."""
        values = tools.scratch("values", count, np.float32)
        try:
            self.frames[member].read(place, values)
        except WireError as error:
            raise MemberUnfit(member, error) from error
        return values


def _squares(bodies: _Bodies, edges: list[int], threads: int | None) -> np.ndarray:
    """The squared length of every member's every piece; all members' chunks in one queue."""
    members, chunks = len(bodies.frames), -(-edges[-1] // CHUNK)
    squares = np.zeros((members, len(edges) - 1))
    bodies.prepare()
    found = spread(lambda n: bodies.look(n // chunks, n % chunks, edges), members * chunks, threads)
    for place, part in enumerate(found):
        squares[place // chunks] += part
    return squares


@dataclass
class _Fold:
    """Adds up all members, one chunk at a time."""

    edges: list[int]
    bodies: _Bodies
    weights: np.ndarray
    counts: np.ndarray
    """What each member's each piece counts with in what is merged."""

    factor: float
    """What the sums are multiplied with, so that they fit float32 whatever the weights."""

    merged: np.ndarray
    only: frozenset[int] | None = None
    """Pieces to add up, if not all."""

    def chunk(self, place: int, span: slice) -> np.ndarray:
        """Merges a chunk; gives the squares of Σ weight · delta and Σ count · delta by piece."""
        parts = [
            (number, part)
            for number, part in stretches(self.edges, span)
            if self.only is None or number in self.only
        ]
        squares = np.zeros((2, len(self.edges) - 1))
        if parts:
            fold = self._fold_nibbles if self.bodies.folds else self._fold_values
            fold(place, span, parts, squares)
        return squares

    def _fold_nibbles(self, place: int, span: slice, parts: Parts, squares: np.ndarray) -> None:
        from diloco_cli.merge.kernels import FINE, LANES, fold_int4

        count, block = span.stop - span.start, cast(Nibbles, self.bodies.codec).block
        bodies = self.bodies.all(place)
        decoded = tools.scratch("decoded", block, np.float32)
        near, far = tools.scratch("sums", 2 * block, np.float64).reshape(2, block)
        lanes, found = np.empty(2 * LANES), np.empty(2)
        for number, part in parts:
            counts = np.ascontiguousarray(self.counts[:, number])
            wrong = fold_int4(
                *(bodies, block, -(-count // block), part.start - span.start),
                *(self.weights, counts, self.factor, self.merged[part], found),
                *(decoded, near, far, lanes),
            )
            if wrong != FINE:
                self.bodies.values(wrong, place, count)  # Says what is wrong with it.
                raise AssertionError(f"member {wrong} is read in two ways")
            squares[:, number] = found

    def _fold_values(self, place: int, span: slice, parts: Parts, squares: np.ndarray) -> None:
        from diloco_cli.wire.kernels.sums import LANES, add_twice, put_scaled, square_sum_double

        count = span.stop - span.start
        straight, along = tools.scratch("sums", 2 * count, np.float64).reshape(2, count)
        straight[:] = along[:] = 0.0
        for member in range(len(self.weights)):
            values, weight = self.bodies.values(member, place, count), float(self.weights[member])
            for number, part in parts:
                inside = slice(part.start - span.start, part.stop - span.start)
                counted = float(self.counts[member, number])
                add_twice(values[inside], straight[inside], along[inside], weight, counted)
        lanes = np.empty(LANES)
        for number, part in parts:
            inside = slice(part.start - span.start, part.stop - span.start)
            squares[0, number] = square_sum_double(straight[inside], lanes)
            squares[1, number] = square_sum_double(along[inside], lanes)
            put_scaled(along[inside], self.merged[part], self.factor)


@dataclass(frozen=True)
class _Columns:
    """Merges all members value by value, one chunk at a time."""

    rule: ByColumn
    frames: list[Frame]
    merged: np.ndarray

    def chunk(self, place: int, span: slice) -> None:
        count = span.stop - span.start
        rows = tools.scratch("rows", len(self.frames) * count, np.float32)
        rows = rows.reshape(len(self.frames), count)
        for member, frame in enumerate(self.frames):
            try:
                frame.read(place, rows[member])
            except WireError as error:
                raise MemberUnfit(member, error) from error
        for start in range(0, count, STRIP):
            strip = slice(start, min(start + STRIP, count))
            inside = slice(span.start + strip.start, span.start + strip.stop)
            self.merged[inside] = self.rule.combine(rows[:, strip])


def edges_of(fragment: Fragment) -> list[int]:
    """Where pieces begin, and where the last one ends."""
    return [*(piece.offset for piece in fragment.pieces), fragment.size]


def stretches(edges: Sequence[int], span: slice) -> Parts:
    """Which pieces a chunk holds, and which of the fragment's values those are."""
    found = [
        (number, slice(max(start, span.start), min(stop, span.stop)))
        for number, (start, stop) in enumerate(pairwise(edges))
    ]
    return [(number, part) for number, part in found if part.start < part.stop]
