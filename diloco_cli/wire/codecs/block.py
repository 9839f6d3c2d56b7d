"""A few bits per value: one scale per block, one small whole number per value.

    block of values ──largest magnitude, or rms──▶ scale (bf16, rounded up)
          │                                           │
          └──────── × 1/scale, round half even ───────┴──▶ codes −top … top

`code × scale` is exact in float32 (a code has at most 7 bits, a scale 8), so every
decoder gives the same bits. What the rounding leaves out is not lost: a region keeps it
and sends it with the next frame.

Every operation is spelled out in single float32 steps without a division by a constant
and without a sum of floats, so that other implementations (numpy, XLA) can match it to
the bit.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Annotated

import numpy as np
from pydantic import AfterValidator, Field

from diloco_cli.errors import WireError
from diloco_cli.wire.codecs.protocol import InPlace, codecs, refuse_non_finite

if TYPE_CHECKING:
    from types import ModuleType

SCALE_FLOOR = 0x0100
"""2**-125 as bf16. Under it every subnormal rounds to zero, on hardware that flushes them too."""

MOST_BLOCK = 1 << 16


def _power_of_two(block: int) -> int:
    if block & (block - 1):
        raise ValueError("must be a power of two")
    return block


Block = Annotated[int, Field(strict=True, ge=32, le=MOST_BLOCK), AfterValidator(_power_of_two)]


@codecs.register("int8")
@dataclass(frozen=True)
class Int8(InPlace):
    """8 bits and a scale per block: 7.1 per parameter after compression, error 0.9 %."""

    block: Block = 512
    """Values that share one scale: a power of two from 32 to 65536."""

    def body_size(self, size: int) -> int:
        return size + 2 * -(-size // self.block)

    def write(self, values: np.ndarray, body: np.ndarray) -> None:
        row = _kernels().encode_int8(values, body, self.block)
        refuse_block(values, row, self.block)

    def read(self, body: np.ndarray, values: np.ndarray) -> None:
        status = _kernels().decode_int8(body, values, self.block)
        refuse_answer(status, body, values.size, code=-128)

    def add(self, body: np.ndarray, sums: np.ndarray, weight: float) -> None:
        if sums.dtype == np.float32:
            super().add(body, sums, weight)
            return
        status = _kernels().add_int8(body, sums, self.block, weight)
        refuse_answer(status, body, sums.size, code=-128)


@dataclass(frozen=True)
class Nibbles(InPlace):
    """What int4 and uniform share: everything but how a block gets its scale. Foldable."""

    block: Block = 512

    def body_size(self, size: int) -> int:
        return -(-size // self.block) * (self.block // 2 + 2)

    def write(self, values: np.ndarray, body: np.ndarray) -> None:
        full, rows = values.size // self.block, -(-values.size // self.block)
        even = values[: full * self.block]
        refuse_block(values, self._pack(even, body, 0, rows, self.block), self.block)
        if full < rows:
            rest = values.size - full * self.block
            padded = np.zeros(self.block, np.float32)
            padded[:rest] = values[full * self.block :]
            refuse_block(values, self._pack(padded, body, full, rows, rest), self.block)

    @abstractmethod
    def _pack(self, values: np.ndarray, body: np.ndarray, start: int, rows: int, count: int) -> int:
        """Writes whole blocks of `count` values each; answers as the kernels do."""

    def read(self, body: np.ndarray, values: np.ndarray) -> None:
        kernels, block = _kernels(), self.block
        full, rows = values.size // block, -(-values.size // block)
        status = kernels.decode_int4(body, values[: full * block], block, 0, rows)
        refuse_answer(status, body, rows * block // 2, code=-8)
        if full < rows:
            values[full * block :] = self._rest(body, full, values.size - full * block)

    def add(self, body: np.ndarray, sums: np.ndarray, weight: float) -> None:
        kernels, block = _kernels(), self.block
        full, rows = sums.size // block, -(-sums.size // block)
        add = kernels.add_int4_single if sums.dtype == np.float32 else kernels.add_int4
        status = add(body, sums[: full * block], block, 0, rows, weight)
        refuse_answer(status, body, rows * block // 2, code=-8)
        if full < rows:
            rest = self._rest(body, full, sums.size - full * block)
            sums[full * block :] += np.multiply(rest, weight, dtype=sums.dtype)

    def plus(self, body: np.ndarray, base: np.ndarray, sums: np.ndarray) -> None:
        kernels, block = _kernels(), self.block
        full, rows = sums.size // block, -(-sums.size // block)
        even = slice(0, full * block)
        status = kernels.plus_int4(body, base[even], sums[even], block, 0, rows)
        refuse_answer(status, body, rows * block // 2, code=-8)
        if full < rows:
            rest = self._rest(body, full, sums.size - full * block)
            np.add(base[full * block :], rest, out=sums[full * block :])

    def squares(self, body: np.ndarray, size: int, edges: Sequence[int]) -> np.ndarray:
        """Sums the squares of decoded values between each edge and the next, in float64."""
        square, block, rows = _kernels().square_int4, self.block, -(-size // self.block)
        sums = [square(body, block, rows, *pair) for pair in pairwise(edges)]
        if size % block:
            self._rest(body, rows - 1, size % block)
        if min(sums) < 0:
            self.read(body, np.empty(size, np.float32))  # Says what is wrong.
        return np.array(sums)

    def fold(
        self,
        bodies: np.ndarray,
        size: int,
        begin: int,
        weights: np.ndarray,
        counts: np.ndarray,
        factor: float,
        merged: np.ndarray,
        squares: np.ndarray,
    ) -> int:
        kernels, block = _kernels(), self.block
        decoded, lanes = np.empty(block, np.float32), np.empty(2 * kernels.LANES)
        near, far = np.empty((2, block))
        return kernels.fold_int4(
            *(bodies, block, -(-size // block), begin, weights, counts, factor),
            *(merged, squares, decoded, near, far, lanes),
        )

    def _rest(self, body: np.ndarray, row: int, count: int) -> np.ndarray:
        """Decodes a short last block."""
        padded = np.empty(self.block, np.float32)
        status = _kernels().decode_int4(body, padded, self.block, row, row + 1)
        refuse_answer(status, body, (row + 1) * self.block // 2, code=-8)
        if padded[count:].any():
            raise WireError("The padding after the last value holds codes other than zero.")
        return padded[:count]


@codecs.register("int4")
@dataclass(frozen=True)
class Int4(Nibbles):
    """4 bits and a scale per block: 3.0 per parameter after compression, error 17 %."""

    block: Block = 512
    """Values that share one scale: a power of two from 32 to 65536."""

    def _pack(self, values: np.ndarray, body: np.ndarray, start: int, rows: int, count: int) -> int:
        return _kernels().encode_int4(values, body, self.block, start, rows)


@codecs.register("uniform")
@dataclass(frozen=True)
class Uniform(Nibbles):
    """Steps of a block's root mean square: 2.2 bits per parameter after compression, error 29 %."""

    step: Annotated[float, Field(ge=0.25, le=4)] = 1.0
    """Width of a step in root mean squares: 0.25 to 4. Wider is smaller and coarser."""

    block: Block = 1024
    """Values that share one scale: a power of two from 32 to 65536."""

    def _pack(self, values: np.ndarray, body: np.ndarray, start: int, rows: int, count: int) -> int:
        step = np.float32(self.step)
        return _kernels().encode_uniform(values, body, self.block, start, rows, count, step)


@codecs.register("sign")
@dataclass(frozen=True)
class Sign(InPlace):
    """Signs and a block's mean magnitude: 1.0 bits per parameter, error 65 %."""

    block: Block = 1024
    """Values that share one magnitude: a power of two from 32 to 65536."""

    def body_size(self, size: int) -> int:
        return -(-size // self.block) * (self.block // 8 + 2)

    def write(self, values: np.ndarray, body: np.ndarray) -> None:
        kernels, block = _kernels(), self.block
        full, rows = values.size // block, -(-values.size // block)
        even = values[: full * block]
        refuse_block(values, kernels.encode_sign(even, body, block, 0, rows, block), block)
        if full < rows:
            rest = values.size - full * block
            padded = np.zeros(block, np.float32)
            padded[:rest] = values[full * block :]
            refuse_block(values, kernels.encode_sign(padded, body, block, full, rows, rest), block)

    def read(self, body: np.ndarray, values: np.ndarray) -> None:
        kernels, block = _kernels(), self.block
        full, rows = values.size // block, -(-values.size // block)
        scales_at = rows * block // 8
        status = kernels.decode_sign(body, values[: full * block], block, 0, rows)
        self._refuse(status, body, scales_at)
        if full < rows:
            rest = values.size - full * block
            padded = np.empty(block, np.float32)
            self._refuse(kernels.decode_sign(body, padded, block, full, rows), body, scales_at)
            if np.signbit(padded[rest:]).any():
                raise WireError("The padding after the last value holds signs.")
            values[full * block :] = padded[:rest]

    def _refuse(self, status: int, body: np.ndarray, scales_at: int) -> None:
        if status < -1:
            raise WireError("A silent block holds signs.")
        refuse_answer(status, body, scales_at, code=0)


def largest_scale(top: int) -> int:
    """Says the largest bf16 scale, as bits, for which `top × scale` is still a finite float32."""
    return int(np.float32(np.finfo(np.float32).max / top).view(np.uint32) >> 16)


def refuse_block(values: np.ndarray, row: int, block: int) -> None:
    """Raises NotFinite where an encoder stopped."""
    if row >= 0:
        refuse_non_finite(values[row * block : (row + 1) * block], row * block)


def refuse_answer(status: int, body: np.ndarray, scales_at: int, *, code: int) -> None:
    """Raises what a decoder found wrong."""
    if status >= 0:
        low, high = body[scales_at:].reshape(2, -1)[:, status]
        bits = np.array([int(low) | int(high) << 8], np.uint32) << 16
        scale = float(bits.view(np.float32)[0])
        raise WireError(f"The scale of block {status} is {scale:g}; no encoder writes that.")
    if status == _kernels().WRONG_CODE:
        raise WireError(f"A code is {code}; encoders write {code + 1} to {-code - 1}.")


def _kernels() -> ModuleType:
    """Imports numba, and only when there are numbers to move."""
    from diloco_cli.wire.kernels import block as kernels

    return kernels
