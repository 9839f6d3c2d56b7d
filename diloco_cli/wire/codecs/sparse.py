"""Only the largest values travel: the rest waits, and grows, in the region's held work.

    block of values ──largest few──▶ places (gaps, a byte each)
                                   ▶ sign and one of two sizes (2 bits each)

What is not sent stays in `held`, because a region subtracts what its frame decodes to and
nothing else; the protocol needs no error feedback beside that.

The body has room for the longest gaps there can be, so its length follows from the number
of values alone; the unused end of that room is a run of zeros, which costs nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from pydantic import Field

from diloco_cli.errors import WireError
from diloco_cli.wire.codecs.block import Block
from diloco_cli.wire.codecs.protocol import InPlace, codecs, refuse_non_finite

FAR = 255
"""The longest distance one gap byte covers."""


@codecs.register("sparse")
@dataclass(frozen=True)
class Sparse(InPlace):
    """The largest few of each block, sign and one of two sizes: 0.3 bits, error 86 %."""

    density: Annotated[float, Field(ge=0.001, le=0.25)] = 0.03
    """Share of the values that travel: 0.001 to 0.25."""

    block: Block = 4096
    """Values of which the largest are picked: a power of two from 32 to 65536."""

    def body_size(self, size: int) -> int:
        return self._codes_at(size) + -(-self._most(size) // 4) + 6 * self._rows(size)

    def write(self, values: np.ndarray, body: np.ndarray) -> None:
        from diloco_cli.wire.kernels import sparse as kernels

        if not values.size:
            return
        body[:] = 0
        places, sizes = np.empty((2, self.block), np.int32)
        row = kernels.encode_sparse(
            values,
            body,
            self.block,
            self._keep(self.block),
            self._keep(self._last(values.size)),
            self._codes_at(values.size),
            np.empty(kernels.BINS, np.int32),
            places,
            sizes,
        )
        if row >= 0:
            start = row * self.block
            refuse_non_finite(values[start : start + self.block], start)

    def read(self, body: np.ndarray, values: np.ndarray) -> None:
        places, amounts = self._listed(body, values.size)
        values[:] = 0
        values[places] = amounts

    def add(self, body: np.ndarray, sums: np.ndarray, weight: float) -> None:
        places, amounts = self._listed(body, sums.size)
        sums[places] += np.multiply(amounts, weight, dtype=sums.dtype)

    def _listed(self, body: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
        """Gives the places that were picked, each once, and what lies there."""
        from diloco_cli.wire.kernels import sparse as kernels

        most = self._most(size)
        places, amounts = np.empty(most, np.int32), np.empty(most, np.float32)
        if not size:
            return places, amounts
        keep, last = self._keep(self.block), self._keep(self._last(size))
        at = self._codes_at(size)
        count = kernels.decode_sparse(body, size, self.block, keep, last, at, places, amounts)
        if count < 0:
            faults = {
                kernels.WRONG_COUNT: "more values than a block may send",
                kernels.WRONG_GAP: "a gap that leads out of its block",
                kernels.WRONG_SCALE: "a size that no encoder writes",
                kernels.WRONG_PADDING: "padding other than zero",
            }
            raise WireError(f"A sparse body has {faults[count]}.")
        return places[:count], amounts[:count]

    def _keep(self, count: int) -> int:
        """How many of `count` values may travel."""
        return math.ceil(self.density * count)

    def _rows(self, size: int) -> int:
        return -(-size // self.block)

    def _last(self, size: int) -> int:
        return size - (self._rows(size) - 1) * self.block

    def _most(self, size: int) -> int:
        """The most values of which any body of this size tells."""
        if not size:
            return 0
        return (self._rows(size) - 1) * self._keep(self.block) + self._keep(self._last(size))

    def _codes_at(self, size: int) -> int:
        """Bytes that the gaps may take: one for each value, and one for each full stretch."""
        if not size:
            return 0
        stretches = (self._rows(size) - 1) * ((self.block - 1) // FAR)
        return self._most(size) + stretches + (self._last(size) - 1) // FAR
