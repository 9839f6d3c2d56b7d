"""What a data-parallel job achieved: which steps count, and which were lost again.

A step counts for those who took part in it, from the moment every region had made its
first. A job that goes back to a checkpoint loses the steps after it: they were trained,
and are not applied.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from diloco_cli.bench.baselines.messages import Words
from diloco_cli.chaos.report import GoodputShares

Seconds = float


@dataclass(frozen=True, slots=True)
class CompletedStep:
    """One step of the whole job."""

    members: tuple[str, ...]
    at: Seconds
    """When the mean was complete, on the clock that starts with the first step of all."""


@dataclass
class StepAccounts:
    tokens: Mapping[str, int]
    """Tokens of one step, by region."""

    made: list[CompletedStep] = field(default_factory=list)
    """The steps the weights consist of, in order; the first was made before the clock started."""

    trained: int = 0
    lengths: list[Seconds] = field(default_factory=list)
    """What steps of everybody took, one after the other."""

    lost: int = 0
    """Steps thrown away."""

    def commit(self, members: tuple[str, ...], at: Seconds, *, undisturbed: bool) -> None:
        if self.made:
            self.trained += self.size(members)
            if undisturbed and len(members) == len(self.tokens):
                self.lengths.append(at - self.made[-1].at)
        self.made.append(CompletedStep(members, at))

    def back_to(self, step: int) -> None:
        """Forgets what came after a checkpoint."""
        self.lost += max(0, len(self.made) - step)
        del self.made[step:]

    def size(self, members: Sequence[str]) -> int:
        return sum(self.tokens[name] for name in members)

    @property
    def counted(self) -> list[CompletedStep]:
        return self.made[1:]

    @property
    def applied(self) -> int:
        return sum(self.size(step.members) for step in self.counted)


@dataclass(frozen=True)
class MeasuredAgainst:
    """What the job is measured against."""

    seconds: Seconds
    paces: Mapping[str, Seconds]
    """What one step takes in each region when nothing is in its way; 0 where nobody said."""


def goodput(accounts: StepAccounts, terms: MeasuredAgainst) -> tuple[float, GoodputShares]:
    """Gives the fault-free tokens and the three goodputs; each is defined in docs/results."""
    own = _own_steps(accounts, terms)
    regions = len(accounts.tokens)
    fault_free = sum(size / own[name] * terms.seconds for name, size in accounts.tokens.items())
    spent = sum(own[name] for step in accounts.counted for name in step.members)
    present = [len(step.members) / regions for step in accounts.counted]
    return fault_free, {
        "time": spent / (regions * terms.seconds),
        "tokens": accounts.applied / fault_free,
        "participation": statistics.fmean(present) if present else 0.0,
    }


def _own_steps(accounts: StepAccounts, terms: MeasuredAgainst) -> dict[str, Seconds]:
    """What a step takes where nobody is in the way: as paced, else as everybody's usually took."""
    usual = statistics.median(accounts.lengths) if accounts.lengths else terms.seconds
    return {name: terms.paces.get(name) or usual for name in accounts.tokens}


News = tuple[Seconds, str, str, Words]
"""Moment, what, region, more."""


def recovery(
    news: Sequence[News], region: str, killed: Seconds, until: Seconds = math.inf
) -> dict[str, float] | None:
    """Takes apart how a region came back from a kill; None if it was struck again before."""
    own = [each for each in news if each[2] == region and killed <= each[0] <= until]
    lost, hello = _first(own, "lost"), _first(own, "hello")
    if hello is None:
        return None
    loaded = _first([each for each in own if each[0] >= hello[0]], "loaded")
    stepped = _first([each for each in own if each[0] >= hello[0]], "stepped")
    if stepped is None or loaded is None:
        return None
    noticed = lost[0] - killed if lost and lost[0] < hello[0] else 0.0
    return {
        "detect": noticed,
        "start": hello[3]["start"],
        "compile": hello[3]["compile"],
        "fetch": loaded[3].get("seconds", 0.0),
        "total": stepped[0] - killed,
    }


def _first(news: Sequence[News], what: str) -> News | None:
    return next((each for each in news if each[1] == what), None)
