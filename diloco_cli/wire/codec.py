"""How many bits does a number get?

A codec turns a 1-D float32 vector into the body of one chunk, and back:

    values ──encode──▶ body (exactly `body_size(n)` bytes) ──zstd, in frame.py──▶ wire

Bodies are laid out so that zstd finds something to do: bytes of the same meaning lie
side by side, and every block of values can be handled without its neighbours. The
exact layouts are in docs/reference/wire-format.md. Nothing that is not a finite number
enters a body, and no body that an encoder could not have written is decoded.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from diloco_cli.errors import WireError
from diloco_cli.registry import Registry

Body = bytes | bytearray | memoryview

SLAB = 1 << 16
"""Values handled in one go: scratch of this size stays in the processor's cache."""

BF16_INFINITY = 0x7F80


class Codec(Protocol):
    def encode(self, values: np.ndarray) -> bytes:
        """Writes the body of these values; raises NotFinite at the first NaN or infinity."""
        ...

    def decode(self, body: Body, size: int) -> np.ndarray:
        """Restores `size` float32 values; raises WireError on a body no encoder writes."""
        ...

    def body_size(self, size: int) -> int:
        """Says how long the body of `size` values is, to the byte."""
        ...


codecs: Registry[Codec] = Registry("codec")


class NotFinite(WireError):
    """A value that is no number; `index` is its place in the vector, so callers name the tensor."""

    def __init__(self, value: float, index: int) -> None:
        super().__init__(
            f"Value {index} is {value}; only finite numbers travel.",
            hint="A loss that diverged shows up like this: lower the learning rate or clip harder.",
        )
        self.value = value
        self.index = index


@codecs.register("fp32")
@dataclass(frozen=True)
class Fp32:
    """32 bits, bit for bit: about 24 after compression."""

    def encode(self, values: np.ndarray) -> bytes:
        source = vector(values)
        planes = np.empty((4, source.size), np.uint8)
        for start in range(0, source.size, SLAB):
            part = source[start : start + SLAB]
            refuse_non_finite(part, start)
            planes[:, start : start + SLAB] = part.view(np.uint8).reshape(-1, 4).T
        return planes.tobytes()

    def decode(self, body: Body, size: int) -> np.ndarray:
        planes = raw(body, self.body_size(size)).reshape(4, size)
        values = np.empty(size, "<f4")
        for start in range(0, size, SLAB):
            part = values[start : start + SLAB]
            join_planes(planes[:, start : start + SLAB], into=part.view("<u4"))
            refuse_non_finite(part, start)
        return values

    def body_size(self, size: int) -> int:
        return 4 * size


@codecs.register("bf16")
@dataclass(frozen=True)
class Bf16:
    """16 bits, rounded to nearest even: about 11 after compression."""

    def encode(self, values: np.ndarray) -> bytes:
        source = vector(values)
        planes = np.empty((2, source.size), np.uint8)
        for start in range(0, source.size, SLAB):
            part = source[start : start + SLAB]
            refuse_non_finite(part, start)
            bits = part.view(np.uint32)
            half = ((bits + (0x7FFF + ((bits >> 16) & 1))) >> 16).astype("<u2")
            # The largest floats would round to infinity; they become the largest bf16.
            half -= (half & BF16_INFINITY) == BF16_INFINITY
            planes[:, start : start + SLAB] = half.view(np.uint8).reshape(-1, 2).T
        return planes.tobytes()

    def decode(self, body: Body, size: int) -> np.ndarray:
        planes = raw(body, self.body_size(size)).reshape(2, size)
        values = np.empty(size, "<f4")
        for start in range(0, size, SLAB):
            part = values[start : start + SLAB]
            bits = part.view("<u4")
            join_planes(planes[:, start : start + SLAB], into=bits)
            bits <<= 16
            refuse_non_finite(part, start)
        return values

    def body_size(self, size: int) -> int:
        return 2 * size


def vector(values: np.ndarray) -> np.ndarray:
    """Returns the values as a contiguous little-endian float32 vector, without copying one."""
    if values.ndim != 1 or values.dtype != np.float32:
        raise ValueError(f"codecs take 1-D float32, not {values.ndim}-D {values.dtype}")
    return np.ascontiguousarray(values, "<f4")


def raw(body: Body, expected: int) -> np.ndarray:
    """Returns the body's bytes, or refuses a body that is too long or too short."""
    found = np.frombuffer(body, np.uint8)
    if found.size != expected:
        raise WireError(
            f"A chunk's body has {found.size} bytes where its codec writes {expected}.",
            hint="Sender and receiver disagree about the codec; compare their versions.",
        )
    return found


def join_planes(planes: np.ndarray, *, into: np.ndarray) -> None:
    """Puts numbers together from their byte planes, the lowest byte's plane first."""
    into[:] = planes[-1]
    for plane in planes[-2::-1]:
        into <<= 8
        into |= plane


def refuse_non_finite(part: np.ndarray, start: int) -> None:
    finite = np.isfinite(part)
    if not finite.all():
        place = int(np.argmin(finite))
        raise NotFinite(float(part[place]), start + place)


# Last, because quant.py registers its codecs here: whoever sees the registry sees all of ours.
from diloco_cli.wire import quant as _quant  # noqa: E402, F401
