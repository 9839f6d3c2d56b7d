"""A merged delta becomes the next version: the last sweep of a round, on all cores.

    every chunk   merged → outer step → delta frame → published weights

Momentum has no value, one or several for every weight; those of a chunk's weights lie together.

The new weights take the memory of the merged delta. The result depends on no number of
threads, and a server that recomputes it gets the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from diloco_cli.core.fragments import Fragment
from diloco_cli.merge.combine import MergedDelta, combine, stretches
from diloco_cli.merge.protocols import MergeRule, OuterOptimizer, Vectors, is_fused
from diloco_cli.wire.buffers import fresh
from diloco_cli.wire.chunks import body_of, in_chunks, read_into, span_of, tools
from diloco_cli.wire.codecs.protocol import Codec, vector
from diloco_cli.wire.digest import VectorHash
from diloco_cli.wire.frame import Frame

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
    digests: tuple[str, str, str]
    """Of theta, momentum and published weights."""

    @property
    def digest(self) -> str:
        """Of the published weights."""
        return self.digests[2]


@dataclass(frozen=True)
class MergePlan:
    """How a round becomes a version."""

    rule: MergeRule
    optimizer: OuterOptimizer
    down: Codec
    level: int = 1
    drain: bool = False
    threads: int | None = None


def next_weights(
    plan: MergePlan,
    fragment: Fragment,
    members: Sequence[tuple[float, Frame]],
    state: Vectors,
    squares: Sequence[np.ndarray] = (),
) -> NextWeights:
    """Merges (weight, frame) pairs and takes the outer step: `combine`, then `outer_step`."""
    merged = combine(plan.rule, fragment, members, squares, threads=plan.threads)
    return outer_step(plan, merged, state)


def outer_step(plan: MergePlan, merged: MergedDelta, state: Vectors) -> NextWeights:
    """Takes the step from theta, momentum, published; encodes and applies what it changes.

    Raises Diverged where the result is not finite. The arrays of `state` stay as they are.
    """
    theta, momentum, published = map(vector, state)
    old, size = (theta, momentum, published), merged.values.size
    new = merged.values, fresh(momentum.size), fresh(published.size)

    def chunk(_: int, span: slice) -> bytes:
        with np.errstate(over="ignore", invalid="ignore"):  # `_refuse_infinite` reports it.
            return _step_chunk(plan, merged, span, old, new)

    chunks, hashes = [], (VectorHash(), VectorHash(), VectorHash())
    for place, compressed in enumerate(in_chunks(chunk, size, plan.threads)):
        chunks.append(compressed)
        # While the other threads are at the next chunks, and this one is in the cache.
        span = span_of(place, size)
        for vector_hash, values in zip(hashes, _parts(new, span), strict=True):
            vector_hash.update(values)
    first, second, third = (vector_hash.hexdigest() for vector_hash in hashes)
    return NextWeights(*new, chunks, (first, second, third))


def _step_chunk(
    plan: MergePlan, merged: MergedDelta, span: slice, old: Vectors, new: Vectors
) -> bytes:
    from diloco_cli.merge.kernels import add_values

    change = tools.scratch("change", span.stop - span.start, np.float32)
    for number, part in stretches(merged.edges, span):
        inside = change[part.start - span.start : part.stop - span.start]
        new_theta, new_momentum, _ = _parts(new, part)
        into, factor = (new_theta, new_momentum, inside), merged.factors[number]
        _refuse_infinite(_step(plan, factor, _parts(old, part), into))
    body = body_of(plan.down, change)
    read_into(plan.down, body, change)  # What regions will decode takes its place.
    _refuse_infinite(add_values(old[2][span], change, new[2][span]))
    return tools.compressor(plan.level).compress(body)


def _parts(vectors: Vectors, part: slice) -> Vectors:
    """Those of some weights."""
    theta, momentum, published = vectors
    each = momentum.size // theta.size
    kept = momentum[part.start * each : part.stop * each]
    return theta[part], kept, published[part]


def _step(plan: MergePlan, factor: float, old: Vectors, new: Vectors) -> int:
    """Steps along the merged values, which lie where the new theta will; gives largest bits."""
    from diloco_cli.wire.kernels.sums import largest_bits

    optimizer, (theta, momentum, published) = plan.optimizer, old
    new_theta, new_momentum, change = new
    if is_fused(optimizer):
        return optimizer.fused_step(new_theta, factor, old, new, drain=plan.drain)
    merged = np.multiply(new_theta, factor, dtype=np.float64).astype(np.float32)
    new_theta[:], new_momentum[:] = optimizer.step(theta, momentum, merged, drain=plan.drain)
    np.subtract(new_theta, published, out=change)
    return max(map(largest_bits, (new_momentum, change)))


def _refuse_infinite(largest: int) -> None:
    if largest >= INFINITY:
        raise Diverged("merged, it makes weights that are not finite")
