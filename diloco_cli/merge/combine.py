"""Many frames become one delta.

    1  every member, chunk by chunk   squares of each piece      → lengths
    2  every chunk, all members       Σ weight · delta, Σ count · delta, and their lengths

These are the sweeps of a `WeightedSum`; the first is made only if the rule asks for lengths
that nobody measured before. A `ByColumn` rule takes one sweep. Any other rule is folded as
`rules.merge` has it, one decoded member after another.

Frames stay compressed but for the chunks at hand, or while all of them together are no
larger than two copies of the fragment. So memory does not grow with the number of members
beyond that. Chunks may be merged on any number of threads: sums are float64 and added up
in one order, members as given and chunks from first to last.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, reduce
from itertools import pairwise
from typing import cast

import numpy as np

from diloco_cli.core.fragments import Fragment
from diloco_cli.errors import WireError
from diloco_cli.merge.protocols import (
    ByColumn,
    MergeMembers,
    MergeRule,
    PieceSums,
    WeightedSum,
    is_by_column,
    is_weighted_sum,
)
from diloco_cli.merge.rules import merge
from diloco_cli.wire.buffers import fresh
from diloco_cli.wire.chunks import CHUNK, in_chunks, span_of, spread, tools
from diloco_cli.wire.codecs.protocol import Foldable, raw
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


@dataclass(frozen=True)
class MergedDelta:
    """Many deltas as one: what lies between two edges is still to be multiplied by its factor."""

    values: np.ndarray
    edges: list[int]
    factors: list[float]


def combine(
    rule: MergeRule,
    fragment: Fragment,
    members: Sequence[tuple[float, Frame]],
    squares: Sequence[np.ndarray] = (),
    *,
    scales: Sequence[float] = (),
    threads: int | None = None,
) -> MergedDelta:
    """Merges (weight, frame) pairs, in the order given; the frames are not needed afterwards.

    `squares` is what `Frame.squares` gave for each member's pieces, if that is known; it
    spares the first sweep. `scales` is what each member's values are multiplied with before
    the rule sees them; 1 if not given. Raises MemberUnfit for a frame that does not decode.
    """
    if not members:
        raise ValueError(f"fragment {fragment.number}: no members to merge")
    frames, scale = [frame for _, frame in members], np.array(scales or [1.0] * len(members))
    # A member alone is its own merge, bit for bit.
    if len(members) == 1:
        values = merge(rule, fragment, _decoded(members, np.ones(1), threads))
        values = np.require(values, np.float32, ["C", "A", "W"])
        return MergedDelta(values, [0, fragment.size], [float(scale[0])])
    if is_by_column(rule):
        values = fresh(fragment.size)
        list(in_chunks(_Columns(rule, frames, scale, values).chunk, fragment.size, threads))
    elif is_weighted_sum(rule):
        return _weighted_sum(rule, fragment, members, squares, scale, threads)
    else:
        values = merge(rule, fragment, _decoded(members, scale, threads))
        values = np.require(values, np.float32, ["C", "A", "W"])
    return MergedDelta(values, [0, fragment.size], [1.0])


def _decoded(
    members: Sequence[tuple[float, Frame]], scales: np.ndarray, threads: int | None
) -> Iterator[tuple[float, np.ndarray]]:
    for number, (weight, frame) in enumerate(members):
        with _naming(number):
            values = frame.values(threads=threads)
        yield weight, values if scales[number] == 1 else values * np.float32(scales[number])
        del values  # Decoded vectors are large: only the current one is kept.


@contextmanager
def _naming(member: int) -> Iterator[None]:
    """Turns a WireError into one that says whose frame it is."""
    try:
        yield
    except WireError as error:
        raise MemberUnfit(member, error) from error


def _weighted_sum(
    rule: WeightedSum,
    fragment: Fragment,
    members: Sequence[tuple[float, Frame]],
    squares: Sequence[np.ndarray],
    scales: np.ndarray,
    threads: int | None,
) -> MergedDelta:
    edges, merged = edges_of(fragment), fresh(fragment.size)
    bodies = _Bodies([frame for _, frame in members], fragment.size)

    @cache
    def all_squares() -> np.ndarray:
        known = len(squares) == len(members)
        found = np.array(squares) if known else _squares(bodies, edges, threads)
        return found * np.square(scales)[:, None]

    weights = np.array([weight for weight, _ in members])
    known = MergeMembers(fragment, weights, all_squares)
    # The rule speaks of scaled values and the sums are over values as they came.
    weighted = weights * scales
    counts = np.array(rule.counts(known), np.float64) * scales[:, None]
    fold = _Fold(edges, bodies, weighted, counts, 1 / known.weight, merged)
    sums = reduce(np.add, in_chunks(fold.chunk, fragment.size, threads))
    factors = rule.factors(known, PieceSums(weighted=sums[0], counted=sums[1]))
    plain = [number for number, factor in enumerate(factors) if factor.weighted]
    if plain:
        counts[:, plain] = weighted[:, None]
        fold.only = frozenset(plain)
        list(in_chunks(fold.chunk, fragment.size, threads))
    return MergedDelta(merged, edges, [factor.factor for factor in factors])


class _Bodies:
    """Decompresses the members' chunks, and keeps them for a second time if they are small."""

    def __init__(self, frames: list[Frame], size: int) -> None:
        self.frames = frames
        self.codec = frames[0].codec
        self.size = size
        alike = all(frame.codec == self.codec for frame in frames)
        together = alike and isinstance(self.codec, Foldable) and len(frames) <= TOGETHER
        self.foldable = self.codec if together and isinstance(self.codec, Foldable) else None
        """The codec, if it folds all members of a chunk at once."""
        small = len(frames) * self.codec.body_size(size) <= KEPT_BYTES * size
        self._kept: dict[int, np.ndarray] | None = {} if together and small else None

    def prepare(self) -> None:
        """Makes room, so that threads fill what is there and nothing else."""
        if self._kept is not None:
            for place in range(-(-self.size // CHUNK)):
                self._kept[place] = np.empty((len(self.frames), self.length(place)), np.uint8)

    def length(self, place: int) -> int:
        span = span_of(place, self.size)
        return self.codec.body_size(span.stop - span.start)

    def body(self, member: int, place: int) -> bytes:
        with _naming(member):
            return self.frames[member].body(place)

    def measure(self, member: int, place: int, edges: list[int]) -> np.ndarray:
        """Sums the squares of one member's chunk; keeps its body."""
        body = self.body(member, place)
        if self._kept is not None:
            self._kept[place][member] = raw(body, self.length(place))
        with _naming(member):
            return self.frames[member].chunk_squares(place, edges, body)

    def all(self, place: int) -> np.ndarray:
        """Gives the bodies of all members of a chunk; valid until the next call in a thread."""
        if self._kept:
            return self._kept[place]
        length = self.length(place)
        bodies = tools.scratch("bodies", len(self.frames) * length, np.uint8)
        bodies = bodies.reshape(len(self.frames), length)
        for member in range(len(self.frames)):
            bodies[member] = raw(self.body(member, place), length)
        return bodies

    def values(self, member: int, place: int, count: int) -> np.ndarray:
        """Decodes one member's chunk; valid until the next call in a thread."""
        values = tools.scratch("values", count, np.float32)
        with _naming(member):
            self.frames[member].read(place, values)
        return values


def _squares(bodies: _Bodies, edges: list[int], threads: int | None) -> np.ndarray:
    """The squared length of every member's every piece; all members' chunks in one queue."""
    members, chunks = len(bodies.frames), -(-edges[-1] // CHUNK)
    squares = np.zeros((members, len(edges) - 1))
    bodies.prepare()
    parts = spread(
        lambda n: bodies.measure(n // chunks, n % chunks, edges), members * chunks, threads
    )
    for place, part in enumerate(parts):
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
            fold = self._fold_bodies if self.bodies.foldable else self._fold_values
            fold(place, span, parts, squares)
        return squares

    def _fold_bodies(self, place: int, span: slice, parts: Parts, squares: np.ndarray) -> None:
        codec, count = cast(Foldable, self.bodies.foldable), span.stop - span.start
        bodies, lengths = self.bodies.all(place), np.empty(2)
        for number, part in parts:
            counts = np.ascontiguousarray(self.counts[:, number])
            wrong = codec.fold(
                *(bodies, count, part.start - span.start, self.weights, counts),
                *(self.factor, self.merged[part], lengths),
            )
            if wrong >= 0:
                self.bodies.values(wrong, place, count)  # Raises what is wrong with it.
                raise AssertionError(f"{codec} folds member {wrong} otherwise than it reads it")
            squares[:, number] = lengths

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
    scales: np.ndarray
    merged: np.ndarray

    def chunk(self, place: int, span: slice) -> None:
        count = span.stop - span.start
        rows = tools.scratch("rows", len(self.frames) * count, np.float32)
        rows = rows.reshape(len(self.frames), count)
        for member, frame in enumerate(self.frames):
            with _naming(member):
                frame.read(place, rows[member])
            if self.scales[member] != 1:
                rows[member] *= np.float32(self.scales[member])
        for start in range(0, count, STRIP):
            strip = slice(start, min(start + STRIP, count))
            inside = slice(span.start + strip.start, span.start + strip.stop)
            self.merged[inside] = self.rule.combine(rows[:, strip])


def edges_of(fragment: Fragment) -> list[int]:
    """Where pieces begin, and where the last one ends."""
    return [*(piece.offset for piece in fragment.pieces), fragment.size]


def stretches(edges: Sequence[int], span: slice) -> Parts:
    """Which pieces a chunk holds, and which of the fragment's values those are."""
    parts = (
        (number, slice(max(start, span.start), min(stop, span.stop)))
        for number, (start, stop) in enumerate(pairwise(edges))
    )
    return [(number, part) for number, part in parts if part.start < part.stop]
