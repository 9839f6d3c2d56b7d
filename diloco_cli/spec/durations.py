"""How long is `7d`? Durations as a spec writes them: a number and its unit."""

from __future__ import annotations

import re

UNITS = {"s": 1.0, "m": 60.0, "h": 3_600.0, "d": 86_400.0}
HINT = "Write a number with its unit, s, m, h or d: for example 12h or 7d."

_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([smhd])")


def seconds_of(text: str) -> float | None:
    """Reads a duration such as 90s, 30m, 12h or 7d; None if it is none."""
    found = _DURATION.fullmatch(text.strip())
    seconds = float(found[1]) * UNITS[found[2]] if found else 0.0
    return seconds if 0 < seconds < float("inf") else None
