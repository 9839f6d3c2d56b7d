"""A closed round becomes the next version in three sweeps over its frames, on all cores.

    1  every member, chunk by chunk   squares of each piece      → lengths
    2  every chunk, all members       Σ weight·delta, Σ weight·direction, and their lengths
    3  every chunk                    merged → outer step → delta frame → published weights

Frames stay compressed but for the chunks at hand, and the merged delta waits in the memory
of the weights it becomes. So no more is needed than the next version itself and a few
chunks for each core, whatever the number of members.

Numbers are added up in float64 and in one order: members by name, chunks from first to
last. So the result does not depend on the number of threads, and a server that computes
it again gets the same bits.

`core/merge.py` and `core/outer.py` say what is computed here; `fusible` says for which
merge rules this way of computing it exists.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from diloco_cli.core.fragments import Fragment
from diloco_cli.core.merge import Mean, MergeRule, Radial, radial_factor
from diloco_cli.core.outer import Nesterov, OuterOptimiser, Sgd
from diloco_cli.errors import WireError
from diloco_cli.wire.chunks import (
    CHUNK,
    body_of,
    in_chunks,
    read_into,
    span_of,
    spread,
    tools,
)
from diloco_cli.wire.codec import Codec, raw
from diloco_cli.wire.frame import Frame
from diloco_cli.wire.quant import Nibbles

TOGETHER = 32
"""Members whose chunks are decompressed at the same time: half a megabyte each in int4."""

INFINITY = 0x7F800000

Parts = list[tuple[int, slice]]
"""Pieces by number, and which of the fragment's values are meant."""


class MemberUnfit(Exception):
    """A member's frame cannot be decoded; `number` is its place among the members."""

    def __init__(self, number: int, error: WireError) -> None:
        super().__init__(error.message)
        self.number = number
        self.error = error


class Diverged(Exception):
    """The next version would hold a number that is not finite."""


@dataclass(frozen=True)
class Outcome:
    """The next version of a fragment, and the chunks of the delta frame that leads to it."""

    theta: np.ndarray
    momentum: np.ndarray
    published: np.ndarray
    chunks: list[bytes]
    digest: str
    """Of the published vector."""


@dataclass(frozen=True)
class Recipe:
    """How a round becomes a version."""

    rule: MergeRule
    optimiser: OuterOptimiser
    down: Codec
    level: int = 1
    drain: bool = False
    threads: int | None = None


def fusible(rule: MergeRule) -> bool:
    """Says whether this merge rule can be computed here."""
    return type(rule) in (Mean, Radial)


def fuse(
    recipe: Recipe,
    fragment: Fragment,
    members: Sequence[tuple[float, Frame]],
    state: tuple[np.ndarray, np.ndarray, np.ndarray],
) -> Outcome:
    """Merges (weight, frame) pairs, in the order given, into theta, momentum, published.

    Raises MemberUnfit for a frame that does not decode, Diverged where the result is not
    finite. The arrays of `state` stay as they are.
    """
    if not members:
        raise ValueError(f"fragment {fragment.number}: no members to merge")
    merged = np.empty(fragment.size, np.float32)
    if len(members) == 1:  # A member alone is its own merge, bit for bit.
        edges, factors = [0, fragment.size], [1.0]
        _read_alone(members[0][1], merged, recipe.threads)
    else:
        edges = [*(piece.offset for piece in fragment.pieces), fragment.size]
        factors = _merge(recipe, fragment, members, edges, merged)
    return _Step(recipe, edges, factors, state).take(merged)


def _read_alone(frame: Frame, into: np.ndarray, threads: int | None) -> None:
    try:
        list(in_chunks(lambda place, span: frame.read(place, into[span]), into.size, threads))
    except WireError as error:
        raise MemberUnfit(0, error) from error


def _merge(
    recipe: Recipe,
    fragment: Fragment,
    members: Sequence[tuple[float, Frame]],
    edges: list[int],
    merged: np.ndarray,
) -> list[float]:
    """Writes what is merged; says with what each piece is still to be multiplied."""
    weights = np.array([weight for weight, _ in members])
    frames = [frame for _, frame in members]
    radial = np.array([type(recipe.rule) is Radial and not p.embedding for p in fragment.pieces])
    # What a delta counts with: its weight, or where directions are added up, its weight by
    # its length; a delta without a length has no direction.
    counts = np.where(radial, 0.0, weights[:, None])
    lengths = np.zeros_like(counts)
    if radial.any():
        lengths = _lengths(frames, edges, recipe.threads) * radial
        np.divide(weights[:, None], lengths, out=counts, where=lengths > 0)
    weight = _in_order(weights)
    fold = _Fold(edges, frames, weights, counts, 1 / weight, merged)
    squares = sum(in_chunks(fold.chunk, fragment.size, recipe.threads), start=np.zeros(1))
    factors, cancelled = [1.0] * len(radial), []
    for number in np.flatnonzero(radial).tolist():
        mean = _in_order(weights * lengths[:, number]) / weight
        straight, agreement = (math.sqrt(square) for square in squares[:, number])
        by_direction, factor = radial_factor(len(frames), weight, mean, straight, agreement)
        factors[number] = factor * weight
        if not by_direction:
            cancelled.append(number)
    if cancelled:  # Rare. There the deltas are added up after all.
        counts[:, cancelled] = weights[:, None]
        fold.only = frozenset(cancelled)
        list(in_chunks(fold.chunk, fragment.size, recipe.threads))
    return factors


def _in_order(numbers: np.ndarray) -> float:
    return float(sum(numbers.tolist()))


def _lengths(frames: list[Frame], edges: list[int], threads: int | None) -> np.ndarray:
    """The length of every member's every piece; all members' chunks in one queue."""
    chunks = -(-edges[-1] // CHUNK)

    def look(place: int) -> np.ndarray:
        member, chunk = divmod(place, chunks)
        try:
            return frames[member].chunk_squares(chunk, edges)
        except WireError as error:
            raise MemberUnfit(member, error) from error

    squares = np.zeros((len(frames), len(edges) - 1))
    for place, found in enumerate(spread(look, len(frames) * chunks, threads)):
        squares[place // chunks] += found
    return np.sqrt(squares)


@dataclass
class _Fold:
    """Adds up all members, one chunk at a time."""

    edges: list[int]
    frames: list[Frame]
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
        codec = self.frames[0].codec
        alike = all(frame.codec == codec for frame in self.frames)
        if not parts:
            pass
        elif alike and isinstance(codec, Nibbles) and len(self.frames) <= TOGETHER:
            self._fold_nibbles(codec, place, span, parts, squares)
        else:
            self._fold_values(place, span, parts, squares)
        return squares

    def _fold_nibbles(
        self, codec: Nibbles, place: int, span: slice, parts: Parts, squares: np.ndarray
    ) -> None:
        from diloco_cli.wire.merge_kernels import FINE, LANES, fold_int4

        count, block = span.stop - span.start, codec.block
        length = codec.body_size(count)
        bodies = tools.scratch("bodies", len(self.frames) * length, np.uint8)
        bodies = bodies.reshape(len(self.frames), length)
        for member in range(len(self.frames)):
            bodies[member] = raw(self._body(member, place), length)
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
                self._values(wrong, place, count)  # Says what is wrong with it.
                raise AssertionError(f"member {wrong} is read in two ways")
            squares[:, number] = found

    def _fold_values(self, place: int, span: slice, parts: Parts, squares: np.ndarray) -> None:
        from diloco_cli.wire.sum_kernels import LANES, add_twice, put_scaled, square_sum_double

        count = span.stop - span.start
        straight, along = tools.scratch("sums", 2 * count, np.float64).reshape(2, count)
        straight[:] = along[:] = 0.0
        for member in range(len(self.frames)):
            values, weight = self._values(member, place, count), float(self.weights[member])
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

    def _values(self, member: int, place: int, count: int) -> np.ndarray:
        values = tools.scratch("values", count, np.float32)
        try:
            self.frames[member].read(place, values)
        except WireError as error:
            raise MemberUnfit(member, error) from error
        return values

    def _body(self, member: int, place: int) -> bytes:
        try:
            return self.frames[member].body(place)
        except WireError as error:
            raise MemberUnfit(member, error) from error


@dataclass(frozen=True)
class _Step:
    """Makes the next version of a fragment out of what is merged."""

    recipe: Recipe
    edges: list[int]
    factors: list[float]
    state: tuple[np.ndarray, np.ndarray, np.ndarray]

    def take(self, merged: np.ndarray) -> Outcome:
        """Takes the outer step, encodes what it changes, and applies what regions decode."""
        _, momentum, published = self.state
        new = merged, np.empty_like(momentum), np.empty_like(published)

        def chunk(place: int, span: slice) -> bytes:
            with np.errstate(over="ignore", invalid="ignore"):  # Looked for, and then named.
                return self._chunk(span, new)

        chunks, digest = [], hashlib.sha256()
        for place, compressed in enumerate(in_chunks(chunk, merged.size, self.recipe.threads)):
            chunks.append(compressed)
            # While the helpers are at the next chunks.
            digest.update(new[2][span_of(place, merged.size)].data)
        return Outcome(*new, chunks, digest.hexdigest())

    def _chunk(self, span: slice, new: tuple[np.ndarray, np.ndarray, np.ndarray]) -> bytes:
        from diloco_cli.wire.merge_kernels import add_values

        change = tools.scratch("change", span.stop - span.start, np.float32)
        for number, part in stretches(self.edges, span):
            inside = change[part.start - span.start : part.stop - span.start]
            _refuse_infinite(self._stepped(part, self.factors[number], new, inside))
        body = body_of(self.recipe.down, change)
        decoded = tools.scratch("values", change.size, np.float32)
        read_into(self.recipe.down, body, decoded)
        _refuse_infinite(add_values(self.state[2][span], decoded, new[2][span]))
        return tools.compressor(self.recipe.level).compress(body)

    def _stepped(
        self,
        part: slice,
        factor: float,
        new: tuple[np.ndarray, np.ndarray, np.ndarray],
        change: np.ndarray,
    ) -> int:
        """Steps from merged values, which lie where the new weights will; gives largest bits."""
        from diloco_cli.wire import merge_kernels as kernels
        from diloco_cli.wire.sum_kernels import largest_bits

        theta, momentum, published = (vector[part] for vector in self.state)
        new_theta, new_momentum, _ = (vector[part] for vector in new)
        optimiser, drain = self.recipe.optimiser, self.recipe.drain
        if type(optimiser) is Nesterov and not drain:
            lr, mu = optimiser.lr, optimiser.momentum
            return kernels.nesterov(
                *(new_theta, factor, theta, momentum, published, lr, mu),
                *(new_theta, new_momentum, change),
            )
        if type(optimiser) is Nesterov or type(optimiser) is Sgd:
            new_momentum[:] = momentum
            lr = optimiser.lr
            return kernels.descend(new_theta, factor, theta, published, lr, new_theta, change)
        merged = np.multiply(new_theta, factor, dtype=np.float64).astype(np.float32)
        new_theta[:], new_momentum[:] = optimiser.step(theta, momentum, merged, drain=drain)
        np.subtract(new_theta, published, out=change)
        return max(map(largest_bits, (new_momentum, change)))


def stretches(edges: Sequence[int], span: slice) -> Parts:
    """Which pieces a chunk holds, and which of the fragment's values those are."""
    found = [
        (number, slice(max(start, span.start), min(stop, span.stop)))
        for number, (start, stop) in enumerate(pairwise(edges))
    ]
    return [(number, part) for number, part in found if part.start < part.stop]


def _refuse_infinite(largest: int) -> None:
    if largest >= INFINITY:
        raise Diverged("merged, it makes weights that are not finite")
