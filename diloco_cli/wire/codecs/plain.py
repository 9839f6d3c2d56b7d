"""Codecs without blocks: all 32 bits of each value, or the upper 16, as byte planes."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from diloco_cli.wire.codecs.protocol import InPlace, codecs, refuse_non_finite


@codecs.register("fp32")
@dataclass(frozen=True)
class Fp32(InPlace):
    """32 bits, bit for bit: 25 per parameter after compression."""

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
    """16 bits, rounded to nearest even: 11.5 per parameter after compression, error 0.2 %."""

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
