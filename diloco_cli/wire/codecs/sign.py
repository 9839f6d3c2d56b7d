"""One bit a number: which way, and for the whole block how far on average.

The mean magnitude is the one length that brings signs closest to the values. A block in
which nothing moved has the scale zero and stays silent.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from diloco_cli.errors import WireError
from diloco_cli.wire.codecs.block import Block, refuse_answer, refuse_block
from diloco_cli.wire.codecs.plain import InPlace, codecs


@codecs.register("sign")
@dataclass(frozen=True)
class Sign(InPlace):
    """Signs and a block's mean magnitude: 1.0 bits a parameter, error 65 %."""

    block: Block = 1024
    """Values that share one magnitude: a power of two from 32 to 65536."""

    def body_size(self, size: int) -> int:
        return -(-size // self.block) * (self.block // 8 + 2)

    def write(self, values: np.ndarray, body: np.ndarray) -> None:
        from diloco_cli.wire.kernels import block as kernels

        block = self.block
        full, rows = values.size // block, -(-values.size // block)
        even = values[: full * block]
        refuse_block(values, kernels.encode_sign(even, body, block, 0, rows, block), block)
        if full < rows:
            rest = values.size - full * block
            padded = np.zeros(block, np.float32)
            padded[:rest] = values[full * block :]
            refuse_block(values, kernels.encode_sign(padded, body, block, full, rows, rest), block)

    def read(self, body: np.ndarray, values: np.ndarray) -> None:
        from diloco_cli.wire.kernels import block as kernels

        block = self.block
        full, rows = values.size // block, -(-values.size // block)
        scales_at = rows * block // 8
        found = kernels.decode_sign(body, values[: full * block], block, 0, rows)
        self._refuse(found, body, scales_at)
        if full < rows:
            rest = values.size - full * block
            padded = np.empty(block, np.float32)
            self._refuse(kernels.decode_sign(body, padded, block, full, rows), body, scales_at)
            if np.signbit(padded[rest:]).any():
                raise WireError("The padding after the last value holds signs.")
            values[full * block :] = padded[:rest]

    def _refuse(self, found: int, body: np.ndarray, scales_at: int) -> None:
        if found < -1:
            raise WireError("A silent block holds signs.")
        refuse_answer(found, body, scales_at, code=0)
