"""What a codec does, and the registry of all kinds.

A codec turns a 1-D float32 vector into the body of one chunk, and back:

    values ──encode──▶ body (exactly `body_size(n)` bytes) ──zstd, in chunks.py──▶ wire

Bodies are laid out so that zstd finds something to do: bytes of the same meaning lie
side by side, and every block of values can be handled without its neighbours. The
exact layouts are in docs/reference/wire-format.md. Nothing that is not a finite number
enters a body, and no body that an encoder could not have written is decoded.

Three levels, each faster than the one before:

    Codec     encode, decode, body_size                  all that a codec needs
    InPlace   write, read, add, plus                     works in memory that is already there
    Foldable  squares, fold                              computes with packed bodies

The frames and the merge ask for these protocols and for no class by name, so a codec of
your own is as fast as ours if it has the same methods.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

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


class InPlace(ABC):
    """A codec that fills arrays it is given: contiguous float32 values, uint8 bodies."""

    @abstractmethod
    def body_size(self, size: int) -> int: ...

    @abstractmethod
    def write(self, values: np.ndarray, body: np.ndarray) -> None:
        """Fills the body; raises NotFinite at the first NaN or infinity."""

    @abstractmethod
    def read(self, body: np.ndarray, values: np.ndarray) -> None:
        """Fills the values; raises WireError on a body no encoder writes."""

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


@runtime_checkable
class Foldable(Protocol):
    """A codec that computes with packed bodies, without laying their values out."""

    def squares(self, body: np.ndarray, size: int, edges: Sequence[int]) -> np.ndarray:
        """Sums the squares of decoded values between each edge and the next, in float64."""
        ...

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
        """Adds up many bodies of `size` values each, from value `begin` on, with two weights each.

        Fills `merged` with `factor` · Σ count · value, and `squares` with the squared lengths
        of Σ weight · value and Σ count · value. Sums are float64, bodies are added in their
        order. Returns −1, or the number of a body that no encoder writes.
        """
        ...


def vector(values: np.ndarray) -> np.ndarray:
    """Returns the values as a contiguous float32 vector, without copying one."""
    if values.ndim != 1 or values.dtype != np.float32:
        raise ValueError(f"codecs take 1-D float32, not {values.ndim}-D {values.dtype}")
    # Aligned as well: safetensors maps files at any byte.
    return np.require(values, "<f4", ["C", "A"])


def raw(body: Body, expected: int) -> np.ndarray:
    """Returns the body's bytes, or refuses a body that is too long or too short."""
    data = np.frombuffer(body, np.uint8)
    if data.size != expected:
        raise WireError(
            f"A chunk's body has {data.size} bytes where its codec writes {expected}.",
            hint="Sender and receiver disagree about the codec; compare their versions.",
        )
    return data


def refuse_non_finite(part: np.ndarray, start: int) -> None:
    """Raises NotFinite for the first value that is no number; `start` is the place of part[0]."""
    finite = np.isfinite(part)
    if not finite.all():
        place = int(np.argmin(finite))
        raise NotFinite(float(part[place]), start + place)
