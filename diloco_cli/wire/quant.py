"""Few bits a number: one scale per block, one small whole number per value.

    block of values ──largest magnitude──▶ scale (bf16, rounded up)
          │                                   │
          └──── × 1/scale, round half even ───┴──▶ codes −top … top

`code × scale` is exact in float32 (a code has at most 7 bits, a scale 8), so every
decoder gives the same bits, and the error of a value is at most half a scale. What the
rounding leaves out is not lost: a region keeps it and sends it with the next frame.

Every operation is spelled out in single float32 steps without a division by a constant
and without a sum, so that other implementations (numba, XLA) can match it to the bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from pydantic import AfterValidator, Field

from diloco_cli.errors import WireError
from diloco_cli.wire.codec import (
    SLAB,
    Body,
    codecs,
    join_planes,
    raw,
    refuse_non_finite,
    vector,
)

SCALE_FLOOR = 0x0100
"""2**-125 as bf16. Under it every subnormal rounds to zero, on hardware that flushes them too."""


def _power_of_two(block: int) -> int:
    if block & (block - 1):
        raise ValueError("must be a power of two")
    return block


Block = Annotated[int, Field(strict=True, ge=32, le=SLAB), AfterValidator(_power_of_two)]


@codecs.register("int8")
@dataclass(frozen=True)
class Int8:
    """8 bits and a scale per block: about 7.2 after compression, error below 1 %."""

    block: Block = 512
    """Values that share one scale: a power of two from 32 to 65536."""

    def encode(self, values: np.ndarray) -> bytes:
        source = vector(values)
        codes = np.empty(source.size, np.int8)
        scales = np.empty(_rows(source.size, self.block), "<u2")
        for start, found, bits in _quantised(source, self.block, top=127):
            part = codes[start : start + SLAB]
            part[:] = found.reshape(-1)[: part.size]
            scales[start // self.block :][: bits.size] = bits
        return codes.tobytes() + _planes(scales)

    def decode(self, body: Body, size: int) -> np.ndarray:
        rows = _rows(size, self.block)
        found = raw(body, self.body_size(size))
        codes = found[:size].view(np.int8)
        _refuse_code(codes.min(initial=0) == -128, -128)
        scales = _scales(found[size:].reshape(2, rows), top=127)
        whole = size // self.block
        values = np.empty(size, "<f4")
        _restore(
            values[: whole * self.block].reshape(whole, self.block),
            codes[: whole * self.block].reshape(whole, self.block),
            scales[:whole],
        )
        if whole < rows:
            values[whole * self.block :] = codes[whole * self.block :] * scales[whole]
        return values

    def body_size(self, size: int) -> int:
        return size + 2 * _rows(size, self.block)


@codecs.register("int4")
@dataclass(frozen=True)
class Int4:
    """4 bits and a scale per block: about 3.2 after compression, error about 14 %."""

    block: Block = 512
    """Values that share one scale: a power of two from 32 to 65536."""

    def encode(self, values: np.ndarray) -> bytes:
        source = vector(values)
        half = self.block // 2
        rows = _rows(source.size, self.block)
        packed = np.empty((rows, half), np.uint8)
        scales = np.empty(rows, "<u2")
        for start, found, bits in _quantised(source, self.block, top=7):
            row = start // self.block
            part = packed[row : row + bits.size]
            codes = found.view(np.uint8)
            # Planar inside the block: both halves are plain shifts, which vectorises.
            np.left_shift(codes[:, half:], 4, out=part)
            part |= codes[:, :half] & 0x0F
            scales[row : row + bits.size] = bits
        return packed.tobytes() + _planes(scales)

    def decode(self, body: Body, size: int) -> np.ndarray:
        half = self.block // 2
        rows = _rows(size, self.block)
        found = raw(body, self.body_size(size))
        packed = found[: rows * half].view(np.int8).reshape(rows, half)
        scales = _scales(found[rows * half :].reshape(2, rows), top=7)
        values = np.empty((rows, self.block), "<f4")
        step = SLAB // self.block
        for row in range(0, rows, step):
            part, scale = packed[row : row + step], scales[row : row + step]
            high = part >> 4
            low = (part << 4) >> 4
            _refuse_code(min(low.min(), high.min()) == -8, -8)
            _restore(values[row : row + step, :half], low, scale)
            _restore(values[row : row + step, half:], high, scale)
        flat = values.reshape(-1)
        if flat[size:].any():
            raise WireError("The padding after the last value holds codes other than zero.")
        return flat[:size]

    def body_size(self, size: int) -> int:
        return _rows(size, self.block) * (self.block // 2 + 2)


def largest_scale(top: int) -> int:
    """Says the largest bf16 scale, as bits, for which `top × scale` is still a finite float32."""
    return int(np.float32(np.finfo(np.float32).max / top).view(np.uint32) >> 16)


def _quantised(
    source: np.ndarray, block: int, *, top: int
) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
    """Yields (place of the first value, codes (rows, block), scale bits) slab by slab.

    The codes live in scratch memory: use them before asking for the next slab.
    """
    work = np.empty(SLAB, "<f4")
    codes = np.empty(SLAB, np.int8)
    for start in range(0, source.size, SLAB):
        part = source[start : start + SLAB]
        rows = _rows(part.size, block)
        padded = np.pad(part, (0, rows * block - part.size)) if part.size % block else part
        blocks = padded.reshape(rows, block)
        scaled = work[: rows * block].reshape(rows, block)
        largest = np.abs(blocks, out=scaled).max(axis=1)
        if not np.isfinite(largest).all():
            refuse_non_finite(part, start)
        bits = _scale_bits(largest, top)
        inverse = np.float32(1) / _widen(bits)
        np.rint(np.multiply(blocks, inverse[:, None], out=scaled), out=scaled)
        found = codes[: rows * block].reshape(rows, block)
        np.copyto(found, scaled, casting="unsafe")
        yield start, found, bits


def _scale_bits(largest: np.ndarray, top: int) -> np.ndarray:
    """Chooses each block's scale: largest/top, rounded up to bf16 and kept within bounds.

    Up, because a scale that is too small would push the largest value past `top`, and a
    code past `top` wraps around into one of the opposite sign.
    """
    wanted = largest * (np.float32(1) / np.float32(top))
    bits = (wanted.view(np.uint32) + 0xFFFF) >> 16
    return np.clip(bits, SCALE_FLOOR, largest_scale(top)).astype("<u2")


def _scales(planes: np.ndarray, *, top: int) -> np.ndarray:
    """Returns the scales of a received body, refusing those an encoder never writes."""
    bits = np.empty(planes.shape[1], "<u2")
    join_planes(planes, into=bits)
    # Positive floats sort like their bits; zero, subnormal, negative, infinite and NaN
    # scales, and those that could overflow, all lie outside of this one range.
    wrong = (bits < SCALE_FLOOR) | (bits > largest_scale(top))
    if wrong.any():
        place = int(np.argmax(wrong))
        raise WireError(
            f"The scale of block {place} is {_widen(bits)[place]:g}; no encoder writes that."
        )
    return _widen(bits)


def _restore(into: np.ndarray, codes: np.ndarray, scales: np.ndarray) -> None:
    np.multiply(codes, scales[:, None], out=into)


def _refuse_code(found: bool | np.bool_, code: int) -> None:
    if found:
        raise WireError(f"A code is {code}; encoders write {code + 1} to {-code - 1}.")


def _rows(size: int, block: int) -> int:
    return -(-size // block)


def _widen(bits: np.ndarray) -> np.ndarray:
    return (bits.astype("<u4") << 16).view("<f4")


def _planes(scales: np.ndarray) -> bytes:
    """Low bytes, then high bytes: the high ones hardly differ, which zstd likes."""
    return scales.view(np.uint8).reshape(-1, 2).T.tobytes()
