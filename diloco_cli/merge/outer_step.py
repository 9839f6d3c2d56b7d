"""A closed round becomes the next version in three sweeps over its frames, on all cores.

    1  every member, chunk by chunk   squares of each piece      → lengths
    2  every chunk, all members       Σ weight·delta, Σ weight·direction, and their lengths
    3  every chunk                    merged → outer step → delta frame → published weights

The merged delta waits in the memory of the weights it becomes. Frames stay compressed but
for the chunks at hand, or while all of them together are no larger than two copies of the
fragment. So memory does not grow with the number of members beyond that.

Numbers are added up in float64 and in one order: members by name, chunks from first to
last. So the result does not depend on the number of threads, and a server that computes
it again gets the same bits.

`core/merge.py` and `core/outer.py` say what is computed here; `fusible` says for which
merge rules the first two sweeps exist. Any other rule is folded as `core/merge.py` has it,
one decoded member after another; the third sweep is the same for all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from diloco_cli.core.fragments import Fragment
from diloco_cli.errors import WireError
from diloco_cli.merge.combine import MemberUnfit, edges_of, merge_into, stretches
from diloco_cli.merge.outer_optimizers import Nesterov, OuterOptimiser, Sgd
from diloco_cli.merge.robust import ByColumn, Clipped
from diloco_cli.merge.rules import Mean, MergeRule, Radial, merge
from diloco_cli.wire.buffers import fresh
from diloco_cli.wire.chunks import body_of, in_chunks, read_into, span_of, tools
from diloco_cli.wire.codecs.protocol import Codec, vector
from diloco_cli.wire.digest import VectorHash
from diloco_cli.wire.frame import Frame

__all__ = [
    "Diverged",
    "MemberUnfit",
    "MergePlan",
    "MergedDelta",
    "NextWeights",
    "advance",
    "combine",
    "fuse",
    "fusible",
]

INFINITY = 0x7F800000


class Diverged(Exception):
    """The next version would hold a number that is not finite."""


@dataclass(frozen=True)
class NextWeights:
    """The next version of a fragment, and the chunks of the delta frame that leads to it."""

    theta: np.ndarray
    momentum: np.ndarray
    published: np.ndarray
    chunks: list[bytes]
    names: tuple[str, str, str]
    """Digests of the three vectors."""

    @property
    def digest(self) -> str:
        """Of the published vector."""
        return self.names[2]


@dataclass(frozen=True)
class MergedDelta:
    """Many deltas as one: what lies between two edges is still to be multiplied by its factor."""

    values: np.ndarray
    edges: list[int]
    factors: list[float]


@dataclass(frozen=True)
class MergePlan:
    """How a round becomes a version."""

    rule: MergeRule
    optimiser: OuterOptimiser
    down: Codec
    level: int = 1
    drain: bool = False
    threads: int | None = None


def fusible(rule: MergeRule) -> bool:
    """Says whether this merge rule can be computed here."""
    return type(rule) in (Mean, Radial, Clipped) or isinstance(rule, ByColumn)


def fuse(
    method: MergePlan,
    fragment: Fragment,
    members: Sequence[tuple[float, Frame]],
    state: tuple[np.ndarray, np.ndarray, np.ndarray],
    squares: Sequence[np.ndarray | None] = (),
) -> NextWeights:
    """Merges (weight, frame) pairs, in the order given, into theta, momentum, published.

    That is `combine` and then `advance`.
    """
    return advance(method, combine(method, fragment, members, squares), state)


def combine(
    method: MergePlan,
    fragment: Fragment,
    members: Sequence[tuple[float, Frame]],
    squares: Sequence[np.ndarray | None] = (),
) -> MergedDelta:
    """Merges (weight, frame) pairs, in the order given; the frames are not needed any more then.

    `squares` may say what `Frame.squares` found between the pieces of each member; if it
    knows all of them, the first sweep is spared.
    Raises MemberUnfit for a frame that does not decode.
    """
    if not members:
        raise ValueError(f"fragment {fragment.number}: no members to merge")
    if len(members) > 1 and fusible(method.rule):
        values = fresh(fragment.size)
        factors = merge_into(
            *(values, method.rule, fragment, members), squares=squares, threads=method.threads
        )
        return MergedDelta(values, edges_of(fragment), factors)
    # A member alone is its own merge, bit for bit.
    found = merge(method.rule, fragment, _decoded(members, method.threads))
    return MergedDelta(np.require(found, np.float32, ["C", "A", "W"]), [0, fragment.size], [1.0])


def advance(
    method: MergePlan, merged: MergedDelta, state: tuple[np.ndarray, np.ndarray, np.ndarray]
) -> NextWeights:
    """Makes the next version of theta, momentum, published, in the memory of what is merged.

    Raises Diverged where the result is not finite. The arrays of `state` stay as they are.
    """
    theta, momentum, published = map(vector, state)
    step = _Step(method, merged.edges, merged.factors, (theta, momentum, published))
    return step.take(merged.values)


def _decoded(
    members: Sequence[tuple[float, Frame]], threads: int | None
) -> Iterator[tuple[float, np.ndarray]]:
    for number, (weight, frame) in enumerate(members):
        try:
            values = frame.values(threads=threads)
        except WireError as error:
            raise MemberUnfit(number, error) from error
        yield weight, values
        del values  # Decoded vectors are large: only the current one is kept.


@dataclass(frozen=True)
class _Step:
    """Makes the next version of a fragment out of what is merged."""

    method: MergePlan
    edges: list[int]
    factors: list[float]
    state: tuple[np.ndarray, np.ndarray, np.ndarray]

    def take(self, merged: np.ndarray) -> NextWeights:
        """Takes the outer step, encodes what it changes, and applies what regions decode."""
        _, momentum, published = self.state
        new = merged, fresh(momentum.size), fresh(published.size)

        def chunk(place: int, span: slice) -> bytes:
            with np.errstate(over="ignore", invalid="ignore"):  # Looked for, and then named.
                return self._chunk(span, new)

        chunks, names = [], (VectorHash(), VectorHash(), VectorHash())
        for place, compressed in enumerate(in_chunks(chunk, merged.size, self.method.threads)):
            chunks.append(compressed)
            # While the helpers are at the next chunks, and this one is in the cache.
            span = span_of(place, merged.size)
            for name, values in zip(names, new, strict=True):
                name.update(values[span])
        theta, momentum, published = (name.hexdigest() for name in names)
        return NextWeights(*new, chunks, (theta, momentum, published))

    def _chunk(self, span: slice, new: tuple[np.ndarray, np.ndarray, np.ndarray]) -> bytes:
        from diloco_cli.merge.kernels import add_values

        change = tools.scratch("change", span.stop - span.start, np.float32)
        for number, part in stretches(self.edges, span):
            inside = change[part.start - span.start : part.stop - span.start]
            _refuse_infinite(self._stepped(part, self.factors[number], new, inside))
        body = body_of(self.method.down, change)
        read_into(self.method.down, body, change)  # What regions will read takes its place.
        _refuse_infinite(add_values(self.state[2][span], change, new[2][span]))
        return tools.compressor(self.method.level).compress(body)

    def _stepped(
        self,
        part: slice,
        factor: float,
        new: tuple[np.ndarray, np.ndarray, np.ndarray],
        change: np.ndarray,
    ) -> int:
        """Steps from merged values, which lie where the new weights will; gives largest bits."""
        from diloco_cli.merge import kernels as kernels
        from diloco_cli.wire.kernels.sums import largest_bits

        theta, momentum, published = (vector[part] for vector in self.state)
        new_theta, new_momentum, _ = (vector[part] for vector in new)
        optimiser, drain = self.method.optimiser, self.method.drain
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


def _refuse_infinite(largest: int) -> None:
    if largest >= INFINITY:
        raise Diverged("merged, it makes weights that are not finite")
