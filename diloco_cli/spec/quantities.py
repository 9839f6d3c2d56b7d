"""Numbers with their units, as people write them: `7d`, `10Mbit`, `80GB`.

Options and the spec read them here and nowhere else, so what is no number, has no end, is not above
zero, or is larger than anything it could be meant for is refused everywhere, with the reason.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

from diloco_cli.errors import SpecError

_NUMBER = r"[+-]?(?:(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?|infinity|inf|nan)"
_WORDS = re.compile(rf"({_NUMBER})\s*([a-z]*)", re.IGNORECASE)


class NoQuantity(SpecError):
    """What was written is no such number; `why` says so, if more is known than that."""

    def __init__(self, words: str, noun: str, why: str, hint: str) -> None:
        super().__init__(f"{words!r} is no {noun}{why and ': '}{why}.", hint=hint)
        self.why = why


@dataclass(frozen=True, slots=True)
class Quantity:
    """A kind of number: what it is called, its units, and how small and large it may be."""

    noun: str
    units: Mapping[str, float]
    """From small to large, each with what it counts."""
    least: float
    """Of those that are not 0."""
    most: float
    hint: str
    zero: bool = False
    """Whether it may be 0."""

    def read(self, words: str) -> float:
        """Gives the number in units of 1, or says why there is none."""
        found = _WORDS.fullmatch(words.strip())
        if found is None:
            raise self._none(words, "")
        number, unit = float(found[1]), found[2]
        # The number first: whoever writes -5 is not helped by a list of units.
        if math.isnan(number) or "inf" in found[1].lower():
            raise self._none(words, "it must be a finite number")
        if number < 0 or (number == 0 and not self.zero):
            raise self._none(words, "it must be 0 or more" if self.zero else "it must be above 0")
        if unit not in self.units:
            known = ", ".join(each for each in self.units if each)
            raise self._none(words, f"its unit must be one of {known}" if known else "")
        value = number * self.units[unit]
        if value > self.most:
            raise self._none(words, f"it must be at most {self.most:g}{self._plain}")
        if 0 < value < self.least or (value == 0 and not self.zero):
            raise self._none(words, f"it must be at least {self.least:g}{self._plain}")
        return value

    @property
    def _plain(self) -> str:
        """The unit that counts 1."""
        return next((f" {each}" for each, size in self.units.items() if size == 1 and each), "")

    def _none(self, words: str, why: str) -> NoQuantity:
        return NoQuantity(words, self.noun, why, self.hint)


MOST_SECONDS = 1e12
"""Thirty thousand years: more than any time was meant to be."""

DURATION = Quantity(
    noun="duration",
    units={"s": 1.0, "m": 60.0, "h": 3_600.0, "d": 86_400.0},
    least=1e-9,
    most=MOST_SECONDS,
    hint="Write a number with its unit, s, m, h or d: for example 12h or 7d.",
)
"""As a spec writes it."""

SPAN = Quantity(
    noun="time",
    units={"": 1.0, "ms": 1e-3, "min": 60.0, **DURATION.units},
    least=1e-9,
    most=MOST_SECONDS,
    hint="Write for example 90s, 15m, 6h or 3d.",
)
"""As options write it, where seconds need no unit."""

LINKS = "Write for example 10Mbit/50ms, or 1Gbit/50ms/reset=2s"
RATE = Quantity(
    noun="rate",
    units={"bit": 1.0, "kbit": 1e3, "Mbit": 1e6, "Gbit": 1e9, "Tbit": 1e12},
    least=1.0,
    most=1e18,
    hint=LINKS,
)
"""Bits a second."""

DELAY = Quantity("time", {"us": 1e-6, "ms": 1e-3, "s": 1.0}, 1e-9, MOST_SECONDS, LINKS, zero=True)
"""On a link; there may be none."""

SIZE = Quantity(
    "number of bytes", {"B": 1.0, "kB": 1e3, "MB": 1e6, "GB": 1e9}, 1.0, 1e18, LINKS, zero=True
)

MEMORY = Quantity(
    noun="size of a device",
    units={"GB": 1e9, "GiB": 2.0**30, "gb": 1e9, "gib": 2.0**30},
    least=1.0,
    most=1e18,
    hint="Say how much memory it has, as in 80GB.",
)

FLOPS = Quantity("number of flop/s", {"": 1.0}, 1.0, 1e30, "Write for example 4e13.")


def seconds_of(text: str) -> float | None:
    """Reads a duration such as 90s, 30m, 12h or 7d; None if it is none."""
    return _or_none(DURATION, text)


def rate_of(text: str) -> float | None:
    """Reads bits per second, such as 50Mbit or 1.5Gbit/s; None if it is no rate."""
    return _or_none(RATE, text.strip().removesuffix("/s"))


def why_not(quantity: Quantity, text: str) -> str:
    """Says why this is no such number, in brackets; nothing where nothing more is known."""
    try:
        quantity.read(text)
    except NoQuantity as error:
        return f" ({error.why})" if error.why else ""
    return ""


def _or_none(quantity: Quantity, text: str) -> float | None:
    try:
        return quantity.read(text)
    except NoQuantity:
        return None
