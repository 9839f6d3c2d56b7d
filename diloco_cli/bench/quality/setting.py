"""What people may say about the model and the budget of all cells; defaults are those of the
published table."""

from __future__ import annotations

import re
from dataclasses import dataclass

from diloco_cli.errors import SpecError

MODEL, BATCH, SEQUENCE, RATE = "1x32", 64, 32, 8e-3


@dataclass(frozen=True)
class QualitySetting:
    """As it was said on the command line."""

    model: str = MODEL
    batch: int = BATCH
    sequence: int = SEQUENCE
    tokens: int | None = None
    tokens_per_parameter: float | None = None
    lr: float = RATE
    lr_regions: float | None = None


def shape_of(words: str) -> dict[str, int]:
    """Reads 2x64: layers and width; a head for every 32 of the width."""
    match = re.fullmatch(r"([1-9][0-9]{0,2})x([1-9][0-9]{0,4})", words)
    if match is None or int(match[2]) % 16:
        raise SpecError(
            f"--model {words!r}: write layers and width, as in 2x64; a width is a multiple of 16."
        )
    layers, width = int(match[1]), int(match[2])
    return {"layers": layers, "width": width, "heads": max(1, width // 32)}
