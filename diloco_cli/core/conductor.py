"""What happens to the rounds now?

    tick ─▶ end? ─▶ call what is due ─▶ close what is ready ─▶ finished?

`tick` looks at a run at one moment and changes nothing: it answers with actions and with the
moment of the next look. The live server, the simulator and the crash model ask it and carry
its actions out, each in its own way, so the same lines decide in all three.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

from diloco_cli.core import pace, rounds
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
    """Merged tokens that end the run."""
    lease: Seconds = 0.0


@dataclass(frozen=True, slots=True)
class Attendance:
    """Which regions are there at one moment, and what they reported."""

    here: Collection[str]
    """Regions with a lease that are not leaving."""
    reports: Reports
    empty: Sequence[Collection[str]] = ()
    """By fragment, after the end: regions that have nothing of it to send any more."""
    undrained: Sequence[str] = ()
    """After the end: regions that may still hold work and are waited for."""
    gone: Sequence[str] = ()
    """After the end: regions that may still hold work, whether they are waited for or not."""


@dataclass(slots=True)
class RoundTable:
    """What a server knows of its rounds beside the ledger; a restarted one begins anew."""

    rounds: list[Round]
    averages: Averages = field(default_factory=Averages)
    ended_at: Seconds | None = None
    """When the end was called, or this server learnt of it."""
    moved_at: Seconds = 0.0
    """When work was last accepted or published."""

    @classmethod
    def reopened(cls, ledger: Ledger, sync: SyncSpec, *, now: Seconds) -> RoundTable:
        """The rounds as a restarted server sees them: those that were called are called now."""
        table = cls([], ended_at=now if ledger.end else None, moved_at=now)
        grace = pace.grace(table.averages, ledger.regions, sync)
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
        if before.called_at is not None:
            waited = now - before.called_at
            self.averages = pace.answered(self.averages, region, waited)
            if before.met_at is None and after.met_at is not None:
                self.averages = pace.met(self.averages, waited)
        self.moved_at = now


@dataclass(frozen=True, slots=True)
class EndRun:
    """The budget is merged: from now on regions drain. Look again at once."""

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


Action = EndRun | CallFragment | CloseRound | FinishRun


@dataclass(frozen=True, slots=True)
class Look:
    """What one look at the rounds found."""

    actions: list[Action]
    waiting: dict[int, str] = field(default_factory=dict)
    """By fragment: what its open round waits for."""
    until: Seconds | None = None
    """When to look again; None if only an event matters."""


def need(ledger: Ledger, sync: SyncSpec) -> int:
    """Contributions that a round needs now; after the end any single one is merged."""
    return 1 if ledger.end else sync.quorum


def tick(
    ledger: Ledger, table: RoundTable, seen: Attendance, terms: RunTerms, *, now: Seconds
) -> Look:
    """Says what is to be done now, in this order, and when to look again."""
    if not ledger.end and terms.budget < math.inf:
        applied = ledger.applied(terms.sizes)
        if applied >= terms.budget:
            why = f"{applied:.0f} of {terms.budget} tokens are merged"
            return Look([EndRun(why, applied)], until=now)
    calls = list(_calls(ledger, table, seen, terms.sync, now))
    actions: list[Action] = [*calls]
    opened = {call.fragment: call.round for call in calls}
    live = set(seen.here) - ledger.quarantined()
    waiting, wakes = {}, []
    for fragment, slot in enumerate(ledger.slots):
        if slot.phase == "closing":
            continue
        verdict = rounds.decide(
            opened.get(fragment, table.rounds[fragment]),
            live=live,
            need=need(ledger, terms.sync),
            drained=seen.empty[fragment] if ledger.end else (),
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
            actions.append(finish)
        else:
            wakes += finish
    return Look(actions, waiting, min((wake for wake in wakes if wake > now), default=None))


def _calls(
    ledger: Ledger, table: RoundTable, seen: Attendance, sync: SyncSpec, now: Seconds
) -> Iterator[CallFragment]:
    # A region in quarantine is called as well: its sound work is what ends that.
    due = (
        pace.due_at_end(ledger.slots, seen.reports, seen.here)
        if ledger.end
        else pace.due(ledger.slots, seen.reports, seen.here, sync)
    )
    for fragment in due:
        opened = rounds.called(
            table.rounds[fragment],
            need=need(ledger, sync),
            usual=pace.usual_answer(table.averages, seen.here, need(ledger, sync)),
            grace=pace.grace(table.averages, seen.here, sync),
            now=now,
        )
        yield CallFragment(fragment, ledger.slots[fragment].version, opened)


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
