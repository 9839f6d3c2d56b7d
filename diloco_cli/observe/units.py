"""Numbers as people read them, the same in the terminal and on the page.

None is always `–`: a figure that is not known is never shown as zero.
"""

from __future__ import annotations

import math
from typing import TypeGuard

UNKNOWN = "–"

Number = float | int | None


def amount(value: Number) -> str:
    """Counts things: 950, 12.3k, 4.00M."""
    if not _known(value):
        return UNKNOWN
    for size, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            scaled = value / (1e3 if letter == "k" else size)
            return f"{scaled:.2f}{letter}" if letter != "k" else f"{scaled:.1f}k"
    return f"{value:.0f}"


def bytes_(value: Number) -> str:
    """Says a size: 512 B, 3.2 kB, 1.5 GB (powers of ten, as links are rated)."""
    if not _known(value):
        return UNKNOWN
    for size, unit in ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if value >= size:
            return f"{value / size:.1f} {unit}"
    return f"{value:.0f} B"


def seconds(value: Number) -> str:
    """Says a time in its two largest units: 8 s, 3 min 20 s, 2 h 5 min."""
    if not _known(value):
        return UNKNOWN
    whole = round(max(0, value))
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 86_400:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // 86_400} d {whole % 86_400 // 3600} h"


def loss(value: Number) -> str:
    return f"{value:.3f}" if _known(value) else UNKNOWN


def bits(value: Number) -> str:
    return f"{value:.2f}" if _known(value) else UNKNOWN


def percent(value: Number) -> str:
    return f"{100 * value:.0f}%" if _known(value) else UNKNOWN


def _known(value: Number) -> TypeGuard[float]:
    return value is not None and math.isfinite(value)
