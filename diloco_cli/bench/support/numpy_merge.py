"""The same merge twice: as anybody would write it in numpy, and as the server does it.

The plain one is what the other is measured against. It lives here and not in the server
because nobody should use it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import zstandard

from diloco_cli.core.fragments import Fragment, Piece
from diloco_cli.merge.optimizers import Nesterov
from diloco_cli.merge.outer_step import MergePlan, NextWeights, next_weights
from diloco_cli.merge.rules import Radial, merge
from diloco_cli.wire.chunks import CHUNK, spread
from diloco_cli.wire.codecs import codecs
from diloco_cli.wire.digest import vector_digest
from diloco_cli.wire.frame import Frame, open_frame

PIECES = 16
BLOCK = 512


@dataclass(frozen=True)
class MergeRound:
    """Frames of one fragment, in int4, and the weights they are merged into."""

    frames: list[bytes]
    theta: np.ndarray
    momentum: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "momentum", np.zeros_like(self.theta))

    @property
    def fragment(self) -> Fragment:
        step = -(-self.theta.size // PIECES)
        starts = range(0, self.theta.size, step)
        sizes = [min(step, self.theta.size - start) for start in starts]
        pieces = [
            Piece(f"w{start}", 0, size, (size,), start)
            for start, size in zip(starts, sizes, strict=True)
        ]
        return Fragment(0, tuple(pieces))


def fused_merge(given: MergeRound) -> NextWeights:
    """Merges as the server does; published weights are those before the round."""
    frames = spread(lambda n: open_frame(given.frames[n]), len(given.frames))
    members = [(1.0 + n, frame) for n, frame in enumerate(frames)]
    method = MergePlan(Radial(), Nesterov(), codecs.build({"kind": "int8", "block": BLOCK}))
    state = (given.theta, given.momentum, given.theta)
    return next_weights(method, given.fragment, members, state)


def plain_merge(given: MergeRound) -> tuple[np.ndarray, np.ndarray, list[bytes], str]:
    """Merges with numpy; gives theta, momentum, the chunks down, and what is published."""
    members = ((1.0 + n, decoded(open_frame(data))) for n, data in enumerate(given.frames))
    merged = merge(Radial(), given.fragment, members)
    theta, momentum = Nesterov().step(given.theta, given.momentum, merged, drain=False)
    change = theta - given.theta
    chunks, published = [], np.empty_like(theta)
    compressor = zstandard.ZstdCompressor(1, write_checksum=True, write_content_size=True)
    for start in range(0, change.size, CHUNK):
        part = slice(start, start + CHUNK)
        codes, scales = quantised(change[part])
        chunks.append(compressor.compress(codes.tobytes() + scales.tobytes()))
        published[part] = given.theta[part] + (codes * scales).reshape(-1)[: change[part].size]
    return theta, momentum, chunks, vector_digest(published)


def decoded(frame: Frame) -> np.ndarray:
    """Decodes int4 with numpy."""
    return np.concatenate(list(_chunks(frame)))


def _chunks(frame: Frame) -> Iterator[np.ndarray]:
    left = frame.header.size
    for place in range(len(frame.lengths)):
        count = min(left, CHUNK)
        rows = -(-count // BLOCK)
        body = np.frombuffer(frame.body(place), np.int8)
        packed = body[: rows * BLOCK // 2].reshape(rows, BLOCK // 2)
        low, high = body[rows * BLOCK // 2 :].view(np.uint8).reshape(2, rows).astype(np.uint32)
        scales = ((low | high << 8) << 16).view(np.float32)[:, None]
        codes = np.concatenate([(packed << 4) >> 4, packed >> 4], axis=1)
        yield (codes * scales).reshape(-1)[:count]
        left -= count


def quantised(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Quantises to int8 with numpy: codes (rows, block) and scales (rows, 1)."""
    rows = -(-values.size // BLOCK)
    blocks = np.pad(values, (0, rows * BLOCK - values.size)).reshape(rows, BLOCK)
    wanted = np.abs(blocks).max(axis=1, keepdims=True) * np.float32(1 / 127)
    bits = np.maximum((wanted.view(np.uint32) + 0xFFFF) >> 16, 0x0100) << 16
    scales = bits.view(np.float32)
    return np.rint(blocks * (np.float32(1) / scales)).astype(np.int8), scales
