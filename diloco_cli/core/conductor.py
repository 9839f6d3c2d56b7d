"""What happens to the rounds now?

    tick ─▶ retire the silent ─▶ end? ─▶ deal lanes ─▶ call what is due ─▶ close what is ready
         ─▶ finished, or short of the budget?

`tick` looks at a run at one moment and changes nothing: it answers with actions and with the
moment of the next look. The live server, the simulator and the crash model ask it and carry
its actions out, each in its own way, so the same lines decide in all three.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from diloco_cli.core import budget, lanes, pace, rounds
from diloco_cli.core.claims import Allowance
from diloco_cli.core.lanes import LaneMove, LaneReason, Readers
from diloco_cli.core.ledger import Ledger
from diloco_cli.core.pace import Averages, Reports
from diloco_cli.core.rounds import Close, Round, Seconds
from diloco_cli.spec.schema import SyncSpec

PATIENCE = 12
"""Leases without any accepted or published work after which a drain, or waiting for the
goodbyes of a finished run, is given up. A trainer may restart and compile in that time."""


@dataclass(frozen=True, slots=True)
class RunTerms:
    """What the spec says about rounds and the end of the run."""

    sync: SyncSpec
    sizes: Sequence[int]
    """Parameters of each fragment."""
    budget: float = math.inf
    """Counted tokens that end the run."""
    lease: Seconds = 0.0
    forget: Seconds = math.inf
    """Silence after which a region is retired."""
    step_tokens: Callable[[str], float] = lambda region: math.inf
    """Tokens per step that the spec gives a region."""


@dataclass(frozen=True, slots=True)
class Attendance:
    """Which regions are there at one moment, and what they reported; members count, no others."""

    here: Collection[str]
    """Regions with a lease that are not leaving."""
    reports: Reports
    empty: Sequence[Collection[str]] = ()
    """By fragment: regions that train no more, after the end or before they leave for good, and
    have nothing of it to send."""
    undrained: Sequence[str] = ()
    """After the end: regions that may still hold work and are waited for."""
    gone: Sequence[str] = ()
    """After the end: regions that may still hold work, whether they are waited for or not."""
    readers: Mapping[str, Readers] | None = None
    """By order: who reads which text; None if that is as it was at the last look."""
    allowance: Allowance | None = None
    """What regions may claim; None where nobody judges claims, as in a simulation."""
    retiring: Collection[str] = ()
    """Regions that train no more and leave for good when what they hold is merged."""
    silent: Mapping[str, Seconds] = field(default_factory=dict)
    """How long regions without a lease have not been heard."""
    unsent: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """By live region and fragment: tokens held and in no frame here, as far as they count."""

    def of(self, members: Collection[str]) -> Attendance:
        """The same without those who are no members."""
        here = [region for region in self.here if region in members]
        empty = [[region for region in each if region in members] for each in self.empty]
        undrained = [region for region in self.undrained if region in members]
        gone = [region for region in self.gone if region in members]
        silent = {region: each for region, each in self.silent.items() if region in members}
        unsent = {region: each for region, each in self.unsent.items() if region in members}
        return replace(
            self,
            here=here,
            empty=empty,
            undrained=undrained,
            gone=gone,
            silent=silent,
            unsent=unsent,
        )


@dataclass(slots=True)
class RoundTable:
    """What a server knows of its rounds beside the ledger; a restarted one begins anew."""

    rounds: list[Round]
    averages: Averages = field(default_factory=Averages)
    ended_at: Seconds | None = None
    """When the end was called, or this server learnt of it."""
    moved_at: Seconds = 0.0
    """When work was last accepted or published."""
    unheard: set[tuple[int, str]] = field(default_factory=set)
    """Fragment and region of contributions whose region has not reported since."""

    @classmethod
    def reopened(cls, ledger: Ledger, sync: SyncSpec, *, now: Seconds) -> RoundTable:
        """The rounds as a restarted server sees them: those that were called are called now."""
        table = cls([], ended_at=now if ledger.end else None, moved_at=now)
        grace = pace.grace(table.averages, ledger.members, sync)
        for slot in ledger.slots:
            round = Round(members=tuple(sorted(slot.waiting)))
            if slot.phase == "called":
                round = rounds.called(
                    round, need=need(ledger, sync), usual=0.0, grace=grace, now=now
                )
            table.rounds.append(round)
        return table

    def arrived(self, fragment: int, region: str, *, need: int, now: Seconds) -> None:
        """Counts an accepted contribution, and how long it took."""
        before = self.rounds[fragment]
        self.rounds[fragment] = after = rounds.joined(before, region, need=need, now=now)
        # Late answers count as well: of the others alone a window would learn to be too short.
        since = before.asked_at if before.called_at is None else before.called_at
        if since is not None:
            self.averages = pace.answered(self.averages, region, now - since)
        if before.called_at is not None and before.met_at is None and after.met_at is not None:
            self.averages = pace.met(self.averages, now - before.called_at)
        self.moved_at = now
        self.unheard.add((fragment, region))

    def closed(self, fragment: int) -> None:
        """A round has its members; who arrives before the next call answers this one, late."""
        self.rounds[fragment] = Round(asked_at=self.rounds[fragment].called_at)

    def heard(
        self,
        region: str,
        step: Seconds,
        *,
        live: Callable[[], Collection[str]],
        sync: SyncSpec,
    ) -> None:
        """Takes note of a report; with the first step time open rounds learn how long they wait."""
        self.unheard = {each for each in self.unheard if each[1] != region}
        if not step:
            return
        self.averages = pace.stepped(self.averages, region, step)
        for number, round in enumerate(self.rounds):
            if round.grace is None:
                grace = pace.grace(self.averages, live(), sync)
                self.rounds[number] = replace(round, grace=grace)


@dataclass(frozen=True, slots=True)
class RetireRegion:
    """A region was silent for so long that it is no member any more. Look again at once."""

    region: str
    why: str


@dataclass(frozen=True, slots=True)
class EndRun:
    """All of the budget is spoken for: from now on regions drain. Look again at once."""

    why: str
    tokens: float


@dataclass(frozen=True, slots=True)
class CallFragment:
    fragment: int
    version: int
    round: Round
    """The opened round, for the table."""


@dataclass(frozen=True, slots=True)
class CloseRound:
    fragment: int
    verdict: Close


@dataclass(frozen=True, slots=True)
class FinishRun:
    why: str


@dataclass(frozen=True, slots=True)
class ResumeRun:
    """What was spoken for did not come: the run goes on. Look again at once."""

    why: str


@dataclass(frozen=True, slots=True)
class DealLanes:
    order: str
    why: LaneReason
    moves: tuple[LaneMove, ...] = ()
    count: int | None = None
    """split: cut the lanes into so many."""


Action = RetireRegion | EndRun | CallFragment | CloseRound | FinishRun | ResumeRun | DealLanes


@dataclass(frozen=True, slots=True)
class Look:
    """What one look at the rounds found."""

    actions: list[Action]
    waiting: dict[int, str] = field(default_factory=dict)
    """By fragment: what its open round waits for."""
    until: Seconds | None = None
    """When to look again; None if only an event matters."""
    asked: Mapping[str, tuple[int, ...]] | None = None
    """By region: lanes that it should give up; None if that is as before."""


def need(ledger: Ledger, sync: SyncSpec) -> int:
    """Contributions that a round needs now; after the end any single one is merged."""
    return 1 if ledger.end else sync.quorum


def tick(
    ledger: Ledger, table: RoundTable, seen: Attendance, terms: RunTerms, *, now: Seconds
) -> Look:
    """Says what is to be done now, in this order, and when to look again."""
    if ledger.retired:
        seen = seen.of(set(ledger.members))
    silent = seen.silent
    if over := sorted(region for region, silence in silent.items() if silence >= terms.forget):
        return Look([RetireRegion(r, f"silent for {_days(silent[r])}") for r in over], until=now)
    if not ledger.end and terms.budget < math.inf:
        spoken = budget.spoken(ledger.slots, terms.sizes, seen.unsent)
        if spoken >= terms.budget - budget.NEAR:
            why = f"{spoken:.0f} of {terms.budget} tokens are merged or held"
            return Look([EndRun(why, ledger.applied(terms.sizes))], until=now)
    dealing, asked = deal_lanes(ledger, seen)
    calls = list(_calls(ledger, table, seen, terms.sync, now))
    actions: list[Action] = [*dealing, *calls]
    opened = {call.fragment: call.round for call in calls}
    live = set(seen.here) - ledger.quarantined()
    waiting = {}
    wakes = [now + terms.forget - silence for silence in silent.values()]
    for fragment, slot in enumerate(ledger.slots):
        if slot.phase == "closing":
            continue
        round = opened.get(fragment, table.rounds[fragment])
        verdict = rounds.decide(
            round,
            live=live,
            need=need(ledger, terms.sync),
            drained=seen.empty[fragment] if seen.empty else (),
            ready=_ready(table, seen, fragment, terms.sync) if round.grace is None else (),
            now=now,
        )
        if isinstance(verdict, Close):
            actions.append(CloseRound(fragment, verdict))
            continue
        waiting[fragment] = verdict.why
        if verdict.until is not None:
            wakes.append(verdict.until)
    if not any(slot.waiting or slot.closing for slot in ledger.slots):
        finish = _finish(table, seen, terms, now)
        if isinstance(finish, FinishRun):
            if resume := _resume(ledger, seen, terms):
                return Look([*actions, resume], waiting, now, asked)
            actions.append(finish)
        else:
            wakes += finish
    until = min((wake for wake in wakes if now < wake < math.inf), default=None)
    return Look(actions, waiting, until, asked)


def deal_lanes(
    ledger: Ledger, seen: Attendance
) -> tuple[list[DealLanes], Mapping[str, tuple[int, ...]] | None]:
    """Lanes that change hands now, and those that regions should give up."""
    if seen.readers is None:
        return [], None
    actions: list[DealLanes] = []
    asked: dict[str, tuple[int, ...]] = {}
    # Nobody reads after the end.
    for order, readers in () if ledger.end else seen.readers.items():
        lane_table = ledger.orders[order]
        if (times := lanes.parts(lane_table, readers.count)) > 1:
            actions.append(DealLanes(order, "split", count=lane_table.count * times))
            continue
        dealing = lanes.deal(lane_table, readers)
        actions += [DealLanes(order, why, moves) for why, moves in dealing.moves.items()]
        asked |= dealing.asked
    return actions, asked


def _calls(
    ledger: Ledger, table: RoundTable, seen: Attendance, sync: SyncSpec, now: Seconds
) -> Iterator[CallFragment]:
    # A region in quarantine is called as well: its sound work is what ends that.
    due = (
        pace.due_at_end(ledger.slots, seen.reports, seen.here)
        if ledger.end
        else pace.due(
            ledger.slots,
            seen.reports,
            seen.here,
            sync,
            seen.allowance.credit if seen.allowance else None,
            seen.retiring,
        )
    )
    for fragment in due:
        opened = rounds.called(
            table.rounds[fragment],
            need=need(ledger, sync),
            usual=pace.usual_answer(
                table.averages, seen.here, need(ledger, sync), every=sync.every
            ),
            grace=pace.grace(table.averages, seen.here, sync),
            now=now,
        )
        yield CallFragment(fragment, ledger.slots[fragment].version, opened)


def _ready(table: RoundTable, seen: Attendance, fragment: int, sync: SyncSpec) -> list[str]:
    """Regions that have reported enough work for another round since they answered."""
    ready = pace.ready(seen.reports, fragment, sync.every)
    return [region for region in ready if (fragment, region) not in table.unheard]


def _finish(
    table: RoundTable, seen: Attendance, terms: RunTerms, now: Seconds
) -> FinishRun | list[Seconds]:
    """Declares a drained run finished, or says when that may change."""
    if table.ended_at is None:
        return []
    patience = PATIENCE * terms.lease
    limit = max(table.ended_at, table.moved_at) + patience
    if not seen.undrained:
        if seen.gone:
            missing = ", ".join(seen.gone)
            return FinishRun(f"token budget reached; not waited for: {missing}")
        return FinishRun("token budget reached")
    if now < limit:
        return [table.ended_at + 2 * terms.lease, limit]
    return FinishRun(f"{', '.join(seen.undrained)} gave nothing for {now - limit + patience:.0f} s")


def _resume(ledger: Ledger, seen: Attendance, terms: RunTerms) -> ResumeRun | None:
    """Lets a drained run go on that has a round or more of its budget left."""
    counted = ledger.applied(terms.sizes)
    members = seen.here or ledger.members
    round_tokens = terms.sync.every * sum(terms.step_tokens(region) for region in members)
    if not budget.is_short(budget=terms.budget, counted=counted, round_tokens=round_tokens):
        return None
    return ResumeRun(f"{counted:.0f} of {terms.budget} tokens came out of the drain")


def _days(silence: Seconds) -> str:
    for unit, length in (("days", 86_400), ("hours", 3_600), ("minutes", 60)):
        if silence >= 2 * length:
            return f"{silence / length:.3g} {unit}"
    return f"{silence:.0f} seconds"
