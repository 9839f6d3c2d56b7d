"""Writes the frame-v1-*.frame that are not there yet: for a new kind, never to make a test pass.

python tests/wire/golden_frames.py
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from diloco_cli.wire.frame import Header, pack

FOLDER = Path(__file__).parents[1] / "golden"
SIZE = 1300
CODECS = {
    "fp32": {"kind": "fp32"},
    "bf16": {"kind": "bf16"},
    "int8": {"kind": "int8", "block": 512},
    "int4": {"kind": "int4", "block": 512},
    "int4-64": {"kind": "int4", "block": 64},
    "uniform": {"kind": "uniform", "block": 512, "step": 1.0},
    "sign": {"kind": "sign", "block": 512},
    "sparse": {"kind": "sparse", "block": 512, "density": 0.03},
}


def golden_values() -> np.ndarray:
    """Values that need no random generator and no transcendental function: exact everywhere."""
    mixed = np.arange(SIZE, dtype=np.uint64) * np.uint64(2654435761) % np.uint64(2**32)
    values = ((mixed.astype(np.float64) - 2.0**31) * 2.0**-40).astype(np.float32)
    values[512:600] = 0.0  # A whole block of 64 that is silent.
    values[700] = 1e-45
    values[1290:1294] = [3.4028235e38, -3.4028235e38, 1.0, -1.0]
    return values


def golden_header(name: str) -> Header:
    return Header.contribution(
        run="golden-1",
        layout="0123456789abcdef" * 4,
        fragment=2,
        size=SIZE,
        codec=CODECS[name],
        base=41,
        region="paris",
        clock=500,
        prev="fedcba9876543210" * 4,
        tokens=98304.0,
        steps=24.0,
        totals={"trained": 196608.0, "applied": 98304.0, "refused": 0.0, "discarded": 0.0},
        cursor={"epoch": 1, "offset": 4096, "file": "text"},
    )


def path(name: str) -> Path:
    return FOLDER / f"frame-v1-{name}.frame"


if __name__ == "__main__":
    for name in CODECS:
        if not path(name).exists():
            path(name).write_bytes(pack(golden_header(name), golden_values()))
