"""Is this pseudo-gradient fit to merge?

One bad contribution would spoil the weights of every region, and for ever: momentum
remembers. So each is looked at before it is accepted: every value finite, none absurd,
and a length in keeping with what this fragment has seen lately. The answer is None or a
reason with values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from diloco_cli.core.fragments import Fragment, Piece, norm, spans

WINDOW = 32
"""Norms remembered for each fragment."""

ENOUGH = 8
"""Norms that must be known before any is called too large."""

STRIKES = 3
"""Unfit contributions in a row after which a region's work is kept out."""

PAROLE = 8
"""Sound contributions in a row after which it is let in again; the last of them counts."""

LIMIT = 20.0
"""Times the usual norm from which on a contribution is refused."""

MOST_STEPS = 100.0
"""Times the usual number of steps that a longer contribution may be excused by: a region says
itself how many it made."""

CLEAR = 5.0
"""Standard deviations of chance above which agreement means something."""

NOT_FINITE = "not finite"
"""Words in every refusal of a value that is none: the sender then begins its optimiser anew."""

LARGEST = 1e15
"""No training moves one weight this far. Far enough from float32's limit (3e38) that sums
and momentum of what passes stay finite, also before any usual norm is known."""


@dataclass(frozen=True, slots=True)
class Norms:
    """The norms of one fragment's latest accepted contributions."""

    recent: tuple[float, ...] = ()
    steps: tuple[float, ...] = ()
    """Inner steps that each of them holds."""

    def seen(self, norm: float, steps: float = 1.0) -> Norms:
        """Adds the norm of an accepted contribution. A zero says nothing about the usual size."""
        if not norm > 0:
            return self
        return Norms((*self.recent, norm)[-WINDOW:], (*self.steps, steps)[-WINDOW:])

    @property
    def usual(self) -> float | None:
        """The median, once there is enough to tell."""
        return median(self.recent) if len(self.recent) >= ENOUGH else None

    def more(self, steps: float) -> float:
        """How many times the usual number of steps these are, within reason; at least 1."""
        usual = median(self.steps) if self.steps else steps
        return min(max(1.0, steps / usual), MOST_STEPS)


@dataclass(frozen=True, slots=True)
class GuardRecord:
    """What was found in one region's latest contributions.

    One that is unfit again and again is not waited for and not merged: in quarantine. It
    is still called, and what it sends is still looked at, so a region that was repaired
    comes back by itself.
    """

    strikes: int = 0
    """Unfit ones in a row."""
    sound: int = 0
    """Sound ones in a row since it is in quarantine."""
    quarantined: bool = False
    last: str = ""
    """Why the last unfit one was."""

    def found(self, unfit: str | None) -> GuardRecord:
        """Takes note of one more contribution: sound, or unfit for this reason."""
        if unfit is not None:
            strikes = self.strikes + 1
            return GuardRecord(strikes, 0, self.quarantined or strikes >= STRIKES, unfit)
        if not self.quarantined or self.sound + 1 >= PAROLE:
            return GuardRecord()
        return GuardRecord(0, self.sound + 1, True, self.last)

    @property
    def why(self) -> str:
        """Says what keeps the region out; empty if nothing does."""
        if not self.quarantined:
            return ""
        return (
            f"in quarantine after {STRIKES} unfit contributions in a row, the last: {self.last}; "
            f"{PAROLE} sound ones in a row end it, {self.sound} so far"
        )


def inspect(
    delta: np.ndarray,
    fragment: Fragment,
    norms: Norms,
    *,
    steps: float = 1.0,
    limit: float = LIMIT,
) -> str | None:
    """Says why a contribution must not be merged, or None if it may."""
    length = norm(delta)
    if not math.isfinite(length):
        return _not_finite(delta, fragment)
    if length > LARGEST and (absurd := _absurd(delta, fragment)):
        return absurd
    return unusual(length, norms, steps=steps, limit=limit)


def unusual(length: float, norms: Norms, *, steps: float = 1.0, limit: float = LIMIT) -> str | None:
    """Says why a contribution of this length must not be merged, or None if it may.

    Work that was held for long is longer, in proportion to its steps at most.
    """
    usual, more = norms.usual, norms.more(steps)
    if usual is not None and length > limit * usual * more:
        held = f" and it holds {more:.3g} times as many steps" if more > 1 else ""
        return (
            f"its norm is {length:.4g}, the usual one here is {usual:.4g}{held}; "
            f"more than {limit * more:.4g} times that is refused"
        )
    return None


def outlier(
    lengths: Sequence[float], steps: Sequence[float], *, limit: float = LIMIT
) -> tuple[int, str] | None:
    """Names the member of a round that is absurdly long beside the others, and says why.

    At the beginning of a run no usual norm is known, so the members are held against each
    other. More steps make a longer delta, though never more than in proportion: a member
    must be too long in both ways of counting. Of two, neither can be told to be wrong.
    """
    if len(lengths) < 3:
        return None
    number = max(range(len(lengths)), key=lambda one: lengths[one])
    for measured in (lengths, [length / n for length, n in zip(lengths, steps, strict=True)]):
        others = median(value for one, value in enumerate(measured) if one != number)
        if others == 0 or measured[number] <= limit * others:
            return None
    others = median(length for one, length in enumerate(lengths) if one != number)
    return number, (
        f"its norm is {lengths[number]:.4g}, that of the round's other members {others:.4g}; "
        f"more than {limit:g} times that is refused"
    )


def stranger(rows: np.ndarray, *, share: float) -> tuple[int, str] | None:
    """Names the member of a round whose direction the others do not know, and says why.

    `rows` are values of the members at the same places. Regions that learn from the same
    weights agree a little, and all about as much; noise, old work and work turned round do
    not. Three others at least must agree among themselves, clearly above what chance gives.
    """
    members, count = rows.shape
    if share <= 0 or members < 4:
        return None
    lengths = np.sqrt(np.einsum("ij,ij->i", rows, rows, dtype=np.float64))
    directions = rows / np.where(lengths > 0, lengths, 1.0)[:, None]
    products = directions.astype(np.float64) @ directions.astype(np.float64).T
    agreements = [_agreement(products, one) for one in range(members)]
    number = min(range(members), key=lambda one: agreements[one])
    others = median(value for one, value in enumerate(agreements) if one != number)
    if others * math.sqrt(count) < CLEAR or agreements[number] >= share * others:
        return None
    return number, (
        f"its direction agrees with the others' by {agreements[number]:.3f}, theirs among each "
        f"other by {others:.3f}; less than {share:g} times that is refused"
    )


def _agreement(products: np.ndarray, one: int) -> float:
    """The cosine between one member and the sum of the others."""
    others = np.arange(len(products)) != one
    length = math.sqrt(max(float(products[others][:, others].sum()), 0.0))
    return float(products[one, others].sum()) / length if length else 0.0


def _not_finite(delta: np.ndarray, fragment: Fragment) -> str:
    for piece in fragment.pieces:
        values = delta[piece.span]
        bad = sum(int(np.count_nonzero(~np.isfinite(values[span]))) for span in spans(values.size))
        if bad:
            return f"{bad} of {values.size} values of {_called(piece)} are {NOT_FINITE}"
    raise ValueError(f"fragment {fragment.number} has {fragment.size} values, not {delta.size}")


def _absurd(delta: np.ndarray, fragment: Fragment) -> str | None:
    for piece in fragment.pieces:
        values = delta[piece.span]
        largest = max(float(np.max(np.abs(values[span]))) for span in spans(values.size))
        if largest > LARGEST:
            return f"{_called(piece)} has a value of {largest:.4g}; above {LARGEST:g} is refused"
    return None


def _called(piece: Piece) -> str:
    return f"{piece.tensor} (rows {piece.start}:{piece.stop})"
