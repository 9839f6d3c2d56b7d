"""How much of what a region claims counts?

A region says itself how many steps and tokens its frames hold. Its weight in a round, its
share and what it takes from the budget rest on these numbers, so they count only as far as
a credit goes that time alone fills, for each region and fragment:

    credit = first credit + rate × time − what was counted
    rate   = the less of 1.25 × the region's pace on record and 8 × the median of the others',
             or 100 steps per second where there are no others

More is not refused: an honest region that is misjudged loses weight, not work. The pace on
record is learnt once and never grows by itself, since whoever lies about steps lies about
speed as well. What was decided is on record with what is left of the credit, so no replay
ever judges again.

Time is the allowance clock: seconds that the run has been served, which go on over a restart
of the server by what the wall clock says has passed, within reason.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from statistics import fmean
from typing import Any

from diloco_cli.core.rounds import Receipt
from diloco_cli.core.unmerged_work import Work

Seconds = float

SLACK = 1.25
"""Times its pace on record at which a region's credit grows: steps become faster, a little."""

CEILING = 8.0
"""Times the median pace of the others beyond which no region's word is taken for its own."""

FIRST_CREDIT = 1000.0
"""Steps that count whatever the others' pace: in a run's first minute that says nothing. One region
compiles while another trains, and a short run is over before anything is known. In a long run
they are next to nothing, and a round's weight has its own cap."""

ALONE = 100.0
"""Steps per second that are believed of a region with which no other can be compared."""

ENOUGH = 8
"""Accepted frames in a row that show a pace."""

LEARNING: Seconds = 600.0
"""A pace is put on record no sooner after the first frame."""

SOFT: Seconds = 60.0
"""Added to the time of a region without a pace: its first frames show none."""

GENEROSITY = 8
"""Times the tokens of a step in the server's spec that a region may claim: it may train
with larger batches than the server knows of. In a round they count no more than those."""

LONGEST_GAP: Seconds = 7 * 86400.0
"""What a restart may add to the allowance clock, however far the wall clock was moved."""


@dataclass(frozen=True, slots=True)
class AllowanceClock:
    """Where the allowance clock stood when it was last put on record."""

    at: Seconds = 0.0
    time: Seconds | None = None
    """By the wall clock."""

    def restarted(self, wall: Seconds) -> Seconds:
        """Where it stands when a server starts, at this moment of the wall clock.

        A clock that was set back costs honest regions so much counting, once; one that was
        set forward gives every region a week, at most.
        """
        passed = wall - self.time if self.time is not None else 0.0
        return self.at + min(max(0.0, passed), LONGEST_GAP)


@dataclass(frozen=True, slots=True)
class PaceRecord:
    """What is on record of a region's pace."""

    since: Seconds
    """It joined then, or its pace is learnt anew since."""
    steps_per_second: float = 0.0
    """0 before it is learnt."""


@dataclass(frozen=True, slots=True)
class ClaimAccount:
    """What one region has claimed of one fragment, and what of that counted."""

    at: Seconds
    """When its last frame was accepted."""
    credit: float
    """Steps that were left then."""
    claimed: float = 0.0
    counted: float = 0.0
    """Since it joined, or since its pace is learnt anew."""
    said: float = 0.0
    """Steps per second that its last frame claimed, if not all of it counted."""
    began: Seconds | None = None
    """Its pace is learnt from the frames after this moment; None before the first."""
    marks: tuple[tuple[Seconds, float], ...] = ()
    """Of its latest frames while its pace is learnt: when, and steps claimed by then."""
    best: float = 0.0
    """The most steps per second that it claimed over `ENOUGH` frames."""

    def after(
        self, receipt: Receipt, *, at: Seconds, credit: float, learning: bool
    ) -> ClaimAccount:
        """The account after a frame was accepted."""
        short = receipt.worth.steps < receipt.steps
        account = replace(
            self,
            at=at,
            credit=credit,
            claimed=self.claimed + receipt.steps,
            counted=self.counted + receipt.worth.steps,
            said=receipt.steps / max(1.0, at - self.at) if short else 0.0,
        )
        if not learning:
            return replace(account, began=None, marks=(), best=0.0)
        marks, best = (*self.marks, (at, account.claimed))[-ENOUGH - 1 :], self.best
        if len(marks) > ENOUGH:
            first, claimed = marks[0]
            # Frames that waited for each other may be accepted in one moment.
            best = max(best, (account.claimed - claimed) / max(1.0, at - first))
        # From the first frame on: what came before it was compiling, and says nothing.
        began = at if self.began is None else self.began
        return replace(account, began=began, marks=marks, best=best)

    def paced(self, most: float | None) -> ClaimAccount:
        """The account once its region's pace is on record.

        Of the credit that the others' pace gave it before, at most so many steps are left.
        """
        credit = self.credit if most is None else min(self.credit, most)
        return replace(self, credit=credit, began=None, marks=(), best=0.0)

    def unpaced(self) -> ClaimAccount:
        """The account once its region's pace is to be learnt anew.

        What counted before says nothing of the pace since then, by which others are judged.
        """
        return replace(self, counted=0.0, began=None, marks=(), best=0.0)

    @classmethod
    def of(cls, entry: Mapping[str, Any]) -> ClaimAccount:
        """An account as a snapshot has it."""
        marks = tuple((at, claimed) for at, claimed in entry["marks"])
        return cls(**{**entry, "marks": marks})


@dataclass(frozen=True, slots=True)
class ClaimTerms:
    """What claims are held against, beside the records."""

    steps_cap: float
    """The most in one frame's weight."""
    step_tokens: Callable[[str], float]
    """Tokens per step that the spec gives a region."""
    declared: Mapping[str, float] = field(default_factory=dict)
    """Steps per second that the spec gives a region: then nothing is learnt or compared."""
    reported: Mapping[str, float] = field(default_factory=dict)
    """Steps per second that regions say they make; only ever used to judge others."""

    @property
    def first_credit(self) -> float:
        """Steps that count before anything is known of a region."""
        return max(self.steps_cap, FIRST_CREDIT)


@dataclass(frozen=True, slots=True)
class ClaimVerdict:
    """What of a frame's claim counts."""

    counted: Work
    credit: float
    """Steps that are left."""


class Allowance:
    """What every region may claim at one moment; figures are worked out when asked for."""

    def __init__(
        self,
        accounts: Sequence[Mapping[str, ClaimAccount]],
        paces: Mapping[str, PaceRecord],
        terms: ClaimTerms,
        *,
        at: Seconds,
    ) -> None:
        """`accounts` of each fragment, by region."""
        self.accounts, self.paces, self.terms, self.at = accounts, paces, terms, at
        self._rates: dict[str, float] = {}

    def rate(self, region: str) -> float:
        """Steps per second by which the region's credit grows."""
        if region not in self._rates:
            self._rates[region] = self._rate(region)
        return self._rates[region]

    def _rate(self, region: str) -> float:
        if declared := self.terms.declared.get(region):
            return SLACK * declared
        top, pace = self.ceiling(region), self._on_record(region)
        return min(SLACK * pace, top) if pace else top

    def ceiling(self, region: str) -> float:
        """The most that the other regions' paces make believable."""
        ranked, own = self._ranked, self._known.get(region)
        own_place = len(ranked) if own is None else bisect_left(ranked, own)
        others = len(ranked) - (own is not None)
        if not others:
            return ALONE
        middle = {(others - 1) // 2, others // 2}
        return CEILING * fmean(ranked[place + (place >= own_place)] for place in middle)

    @cached_property
    def _known(self) -> dict[str, float]:
        """Steps per second of every region of which something is known."""
        paces = {region: self._seen_pace(region) for region in self.paces}
        return {region: pace for region, pace in paces.items() if pace > 0}

    @cached_property
    def _ranked(self) -> list[float]:
        return sorted(self._known.values())

    def _on_record(self, region: str) -> float:
        record = self.paces.get(region)
        return record.steps_per_second if record else 0.0

    def _seen_pace(self, region: str) -> float:
        """What others are compared with: the pace on record, or else what there is so far."""
        known = self.terms.declared.get(region) or self._on_record(region)
        if known:
            return known
        own = [each[region] for each in self.accounts if region in each]
        counted = [account.counted for account in own]
        # Up to its last frame: one that fell silent was as fast as it was.
        last = max((account.at for account in own), default=self.at)
        passed = max(0.0, last - self.paces[region].since) + SOFT
        # A region that has just begun has counted little, though it says how fast it is.
        return max(max(counted, default=0.0) / passed, self.terms.reported.get(region, 0.0))

    def credit(self, region: str, fragment: int) -> float:
        """Steps of a fragment that would count if the region claimed them now."""
        rate, account = self.rate(region), self.accounts[fragment].get(region)
        if account is None:
            since = self.paces[region].since if region in self.paces else self.at
            return self.terms.first_credit + rate * max(0.0, self.at - since)
        return account.credit + rate * max(0.0, self.at - account.at)

    def judge(self, receipt: Receipt) -> ClaimVerdict:
        """Says what of an acceptable frame counts."""
        region, fragment = receipt.region, receipt.fragment
        credit = self.credit(region, fragment)
        steps = min(receipt.steps, credit)
        tokens = min(
            receipt.tokens * (steps / receipt.steps), steps * self.terms.step_tokens(region)
        )
        return ClaimVerdict(Work(tokens, steps), credit - steps)

    def believable(self, receipt: Receipt) -> float:
        """Steps that may excuse how long a frame's vector is, whatever it claims."""
        credit = self.credit(receipt.region, receipt.fragment)
        return min(receipt.steps, max(credit, self.terms.steps_cap))

    def most_steps(self, region: str) -> float:
        """Steps that the region can have made since the run began, were it there all the time."""
        return self.terms.first_credit + self.rate(region) * self.at

    def learnt(self, region: str) -> float | None:
        """The pace to put on record for a region now; None if there is none to learn."""
        if self.terms.declared.get(region) or self._on_record(region):
            return None
        shown = [
            account.best
            for each in self.accounts
            if (account := each.get(region)) and account.began is not None
            if account.best > 0 and self.at - account.began >= LEARNING
        ]
        return min(max(shown), self.ceiling(region)) if shown else None

    def overclaim(self, region: str) -> str:
        """Says what of a region's latest claims did not count, and why; empty if all did."""
        said = max((each[region].said for each in self.accounts if region in each), default=0.0)
        if not said:
            return ""
        pace, rate = self.terms.declared.get(region) or self._on_record(region), self.rate(region)
        if not pace:
            return "claims more steps than the pace of the others makes believable"
        return f"claims {said / pace:.1f} × its pace on record; counted at {rate / pace:.2f} ×"
