"""How many bits does a number get?

A codec turns a 1-D float32 vector into the body of one chunk, and back:

    values ──encode──▶ body (exactly `body_size(n)` bytes) ──zstd, in chunks.py──▶ wire

Bodies are laid out so that zstd finds something to do: bytes of the same meaning lie
side by side, and every block of values can be handled without its neighbours. The
exact layouts are in docs/reference/wire-format.md. Nothing that is not a finite number
enters a body, and no body that an encoder could not have written is decoded.

Bits and errors in the docstrings are those that `diloco bench wire` finds in pseudo-gradients
of the quickstart; the error is a share of the vector's length.

A codec of your own needs the three methods of `Codec`. Ours derive from `InPlace`: they
work in memory that is already there, which is where most of the speed is.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from diloco_cli.errors import WireError
from diloco_cli.registry import Registry

Body = bytes | bytearray | memoryview


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


class InPlace:
    """A codec that fills arrays it is given: contiguous float32 values, uint8 bodies."""

    def body_size(self, size: int) -> int:
        raise NotImplementedError

    def write(self, values: np.ndarray, body: np.ndarray) -> None:
        """Fills the body; raises NotFinite at the first NaN or infinity."""
        raise NotImplementedError

    def read(self, body: np.ndarray, values: np.ndarray) -> None:
        """Fills the values; raises WireError on a body no encoder writes."""
        raise NotImplementedError

    def add(self, body: np.ndarray, sums: np.ndarray, weight: float) -> None:
        """Adds `weight` times each decoded value to sums of float64 or float32.

        Each product and each sum is rounded to the type of the sums, as numpy does it.
        After a WireError the sums are worthless.
        """
        from diloco_cli.wire.kernels import sums as sum_kernels

        values = np.empty(sums.size, np.float32)
        self.read(body, values)
        if sums.dtype == np.float32:
            sum_kernels.add_scaled_single(values, sums, weight)
        else:
            sum_kernels.add_scaled(values, sums, weight)

    def plus(self, body: np.ndarray, base: np.ndarray, sums: np.ndarray) -> None:
        """Fills the sums with base + decoded values, all of them float32, as numpy adds them.

        After a WireError the sums are worthless.
        """
        self.read(body, sums)
        np.add(base, sums, out=sums)

    def encode(self, values: np.ndarray) -> bytes:
        source = vector(values)
        body = np.empty(self.body_size(source.size), np.uint8)
        self.write(source, body)
        return body.tobytes()

    def decode(self, body: Body, size: int) -> np.ndarray:
        values = np.empty(size, np.float32)
        self.read(raw(body, self.body_size(size)), values)
        return values


@codecs.register("fp32")
@dataclass(frozen=True)
class Fp32(InPlace):
    """32 bits, bit for bit: 25 a parameter after compression."""

    def body_size(self, size: int) -> int:
        return 4 * size

    def write(self, values: np.ndarray, body: np.ndarray) -> None:
        from diloco_cli.wire.kernels import planes

        if planes.split_fp32(values, body) >= 0:
            refuse_non_finite(values, 0)

    def read(self, body: np.ndarray, values: np.ndarray) -> None:
        from diloco_cli.wire.kernels import planes

        if planes.join_fp32(body, values) >= 0:
            refuse_non_finite(values, 0)


@codecs.register("bf16")
@dataclass(frozen=True)
class Bf16(InPlace):
    """16 bits, rounded to nearest even: 11.5 a parameter after compression, error 0.2 %."""

    def body_size(self, size: int) -> int:
        return 2 * size

    def write(self, values: np.ndarray, body: np.ndarray) -> None:
        from diloco_cli.wire.kernels import planes

        if planes.split_bf16(values, body) >= 0:
            refuse_non_finite(values, 0)

    def read(self, body: np.ndarray, values: np.ndarray) -> None:
        from diloco_cli.wire.kernels import planes

        if planes.join_bf16(body, values) >= 0:
            refuse_non_finite(values, 0)


def vector(values: np.ndarray) -> np.ndarray:
    """Returns the values as a contiguous float32 vector, without copying one."""
    if values.ndim != 1 or values.dtype != np.float32:
        raise ValueError(f"codecs take 1-D float32, not {values.ndim}-D {values.dtype}")
    # Aligned as well: safetensors maps files at any byte.
    return np.require(values, "<f4", ["C", "A"])


def raw(body: Body, expected: int) -> np.ndarray:
    """Returns the body's bytes, or refuses a body that is too long or too short."""
    found = np.frombuffer(body, np.uint8)
    if found.size != expected:
        raise WireError(
            f"A chunk's body has {found.size} bytes where its codec writes {expected}.",
            hint="Sender and receiver disagree about the codec; compare their versions.",
        )
    return found


def refuse_non_finite(part: np.ndarray, start: int) -> None:
    """Raises NotFinite for the first value that is no number; `start` is the place of part[0]."""
    finite = np.isfinite(part)
    if not finite.all():
        place = int(np.argmin(finite))
        raise NotFinite(float(part[place]), start + place)
