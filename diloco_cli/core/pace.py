"""Which fragment is called when, and how long may a round wait for the slow?

The quorum-th fastest region sets the pace: a fragment is due when that region reports
`every` inner steps of unmerged work on the fragment's current version. Counting held
work, not steps since the last call, needs no baselines that a restart could lose, and
never calls for crumbs when the network is slower than the training.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice

from diloco_cli.core.ledger import FragmentState
from diloco_cli.spec.schema import SyncSpec

Seconds = float
MEMORY = 0.3
"""Weight of the newest observation in a moving average."""
SPREADS = 4
"""Mean deviations beyond its average that an answer is waited for, as TCP waits for one."""
SLOWEST = 4
"""Periods that an answer may usually take over slow lines; who takes longer was cut off."""


@dataclass(frozen=True, slots=True)
class Report:
    """What a region says about one fragment in a heartbeat."""

    version: int
    steps: float
    """Held, and not in the frame in flight."""


Reports = Mapping[str, Sequence[Report]]


Credit = Callable[[str, int], float]
"""Steps of a fragment that would count if a region claimed them now."""


def due(
    slots: Sequence[FragmentState],
    reports: Reports,
    live: Collection[str],
    sync: SyncSpec,
    credit: Credit | None = None,
    retiring: Collection[str] = (),
) -> list[int]:
    """Lists the fragments to call now, while the run goes on.

    A report counts as far as a claim would: whoever makes steps up sets no pace with them.
    `retiring` regions train no more: what they hold goes along when the others are ready.
    """
    if len(live) < sync.quorum:
        return []
    going = [region for region in live if region in retiring]
    training = [region for region in live if region not in retiring] if going else live

    def has_quorum(number: int, slot: FragmentState) -> bool:
        least = _threshold(number, slot, len(slots), sync.every)
        enough = (
            region
            for region in training
            if _held_of(reports, region, number, slot.version) >= least
            and (credit is None or credit(region, number) >= least)
        )
        ready = sum(1 for _ in islice(enough, sync.quorum))
        # One that trains no more is as far as it will ever be: it goes along when the first of
        # the others is ready, and at once where there are no others.
        held = (_held_of(reports, region, number, slot.version) for region in going)
        along = sum(steps >= 1 for steps in held) if ready or not training else 0
        return ready + along >= sync.quorum

    return [
        number
        for number, slot in enumerate(slots)
        if slot.phase == "idle" and (_is_unanswered(slot) or has_quorum(number, slot))
    ]


def due_at_end(
    slots: Sequence[FragmentState], reports: Reports, live: Collection[str]
) -> list[int]:
    """Lists the fragments to call after the end: whatever still waits or is still held."""
    return [
        number
        for number, slot in enumerate(slots)
        if slot.phase == "idle"
        and (slot.waiting or any(_held(reports, region, number) >= 1 for region in live))
    ]


def _is_unanswered(slot: FragmentState) -> bool:
    # A frame made on the current version waits although no region is called: its round lost
    # all its members when it closed. The call still stands; with overlap 0 the region even
    # makes no step, and so sets no pace, before a newer version comes.
    return any(receipt.base == slot.version for receipt in slot.waiting.values())


def _threshold(number: int, slot: FragmentState, fragments: int, every: int) -> float:
    # Staggered at first, so that later fragments do not all travel at once.
    return every * (number + 1) / fragments if slot.version == 0 else every


def _held_of(reports: Reports, region: str, number: int, version: int) -> float:
    """Steps held on a version; none by those who have not reported on it."""
    report = reports[region][number] if region in reports else None
    return report.steps if report and report.version == version else 0.0


def _held(reports: Reports, region: str, number: int) -> float:
    return reports[region][number].steps if region in reports else 0.0


@dataclass(frozen=True, slots=True)
class Averages:
    """Moving averages of how long things take, in seconds."""

    step: Mapping[str, Seconds] = field(default_factory=dict)
    """One inner step, by region."""
    answer: Mapping[str, Seconds] = field(default_factory=dict)
    """From a call to the region's frame, by region."""
    quorum: Seconds = 0.0
    """From a call to the quorum."""
    sync: Seconds = 0.0
    """From closing a round to its version being published."""
    spread: Mapping[str, Seconds] = field(default_factory=dict)
    """How far answers are from their average, by region: the mean deviation."""


def average(old: Seconds | None, new: Seconds) -> Seconds:
    return new if not old else old + MEMORY * (new - old)


def stepped(averages: Averages, region: str, seconds: Seconds) -> Averages:
    return replace(averages, step=_with(averages.step, region, seconds))


def answered(averages: Averages, region: str, seconds: Seconds) -> Averages:
    usual = averages.answer.get(region)
    # Of the first answer nothing is known but that another may be half as quick.
    away = seconds / 2 if usual is None else abs(seconds - usual)
    spread = _with(averages.spread, region, away)
    return replace(averages, answer=_with(averages.answer, region, seconds), spread=spread)


def met(averages: Averages, seconds: Seconds) -> Averages:
    return replace(averages, quorum=average(averages.quorum, seconds))


def published(averages: Averages, seconds: Seconds) -> Averages:
    return replace(averages, sync=average(averages.sync, seconds))


def _with(old: Mapping[str, Seconds], region: str, seconds: Seconds) -> dict[str, Seconds]:
    return {**old, region: average(old.get(region), seconds)}


def usual_answer(averages: Averages, live: Collection[str], quorum: int, *, every: int) -> Seconds:
    """When the quorum-th live region usually answers a call; 0 while that is unknown.

    A frame that came late for the last round is a member of this one from the start.
    Without this floor it would close the round before any fresh answer could arrive.
    It is a period at most, or what a quorum takes where lines are slow, within a few periods: one
    that was cut off answers hours after it was asked, and so does a quorum of such.
    """
    known = sorted(averages.answer[region] for region in live if region in averages.answer)
    if not known:
        return 0.0
    steps = [averages.step[region] for region in live if region in averages.step]
    period = every * min(steps, default=math.inf)
    longest = max(period, min(averages.quorum, SLOWEST * period))
    return min(known[min(quorum, len(known)) - 1], longest)


def ready(reports: Reports, number: int, every: int) -> list[str]:
    """Regions that have enough work of a fragment for another round, whatever its version."""
    return [region for region, each in reports.items() if each[number].steps >= every]


def grace(averages: Averages, live: Collection[str], sync: SyncSpec) -> Seconds | None:
    """How long a round that has its quorum waits for the other live regions.

    None as long as no live region has said how long its steps take.
    """
    if sync.grace.kind != "adaptive":
        return sync.grace.seconds if sync.grace.kind == "fixed" else 0.0
    steps = [averages.step[region] for region in live if region in averages.step]
    if not steps:
        return None
    margin = sync.grace.margin
    if sync.alpha < 1:
        # Work done past the overlap would be thrown away, so the window must fit into it.
        slack = sync.overlap * max(steps) - averages.quorum - averages.sync
        return margin * max(0.0, slack)
    # Under rebase no region idles and nothing is lost while a round is open, so the window
    # may cover the usual spread of the answers, bounded by a share of the period.
    longest = margin * sync.every * min(steps)
    if any(region not in averages.answer for region in live):
        return longest
    # An average alone would miss every other answer: the step under way ends sooner or later.
    latest = (averages.answer[r] + SPREADS * averages.spread.get(r, 0.0) for r in live)
    return min(max(latest), longest)
