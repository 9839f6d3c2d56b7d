"""The server as time sees it: the same rounds, the same pace, no bytes.

Every decision is one of `core`: the ledger folds the same records as the journal, `admit`
answers contributions, `conductor.tick` calls fragments and closes rounds. What a live server
does with a disk and a thread takes a time here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import assert_never

from diloco_cli.core import conductor, pace, rounds
from diloco_cli.core.conductor import (
    Attendance,
    CallFragment,
    CloseRound,
    DealLanes,
    EndRun,
    FinishRun,
    ResumeRun,
    RetireRegion,
    RoundTable,
    RunTerms,
)
from diloco_cli.core.journal_records import (
    FragmentCalled,
    FrameDecided,
    Record,
    RegionJoined,
    RegionRetired,
    RoundClosed,
    VersionPublished,
)
from diloco_cli.core.ledger import Ledger
from diloco_cli.core.pace import Report
from diloco_cli.core.rounds import Accept, Close, Receipt, Refused, Returned, Round
from diloco_cli.sim.clock import EventQueue
from diloco_cli.sim.network import Lane
from diloco_cli.sim.scenario import Scenario

Seconds = float


class SimulatedServer:
    """What the coordinator and the intake of a live server do, on a virtual clock."""

    __slots__ = (
        *("_last", "_merge_free", "_tick_at", "_tick_number", "agenda", "down", "down_until"),
        *("ledger", "number", "on_call", "on_publish", "reports", "scenario", "seen", "sync"),
        *("table", "terms", "up"),
    )

    def __init__(self, scenario: Scenario, agenda: EventQueue) -> None:
        self.scenario, self.agenda, self.sync = scenario, agenda, scenario.sync
        self.ledger = Ledger.empty(len(scenario.sizes))
        self.table = RoundTable([Round() for _ in scenario.sizes])
        server = scenario.server
        self.terms = RunTerms(
            scenario.sync, scenario.sizes, lease=server.lease, forget=server.forget
        )
        self.reports: dict[str, list[Report]] = {}
        self.seen: dict[str, Seconds] = {}
        self.up, self.down = Lane(scenario.server.link), Lane(scenario.server.link)
        self.number = 0
        self.down_until: Seconds = 0.0
        self._merge_free: Seconds = 0.0
        self._last = self._tick_at = -1.0
        self._tick_number = 0
        self.on_call: Callable[[int, int], None]
        self.on_publish: Callable[[int, dict[str, Receipt]], None]
        for site in scenario.sites:
            self._join(site.name, now=0.0)

    def record(self, record: Record) -> None:
        self.number += 1
        self.ledger.apply(self.number, record)

    def _join(self, region: str, *, now: Seconds) -> int:
        """Hears of a member, or of a region that becomes one; gives its epoch."""
        self.seen[region] = now
        known = self.ledger.regions.get(region)
        if known is None or region in self.ledger.retired:
            epoch = known.epoch + 1 if known else 1
            self.record(RegionJoined(region, region, boot=epoch, epoch=epoch))
        return self.ledger.regions[region].epoch

    @property
    def is_down(self) -> bool:
        return self.agenda.now < self.down_until

    def live(self) -> set[str]:
        now, lease = self.agenda.now, self.scenario.server.lease
        return {region for region, seen in self.seen.items() if now < seen + lease}

    # What regions say

    def heard(self, region: str, reports: list[Report], step: Seconds) -> None:
        if self.is_down:
            return
        self._join(region, now=self.agenda.now)
        self.reports[region] = reports
        self.table.heard(region, step, live=self.live, sync=self.sync)
        self.wake()

    def arrived(self, receipt: Receipt, answer: Callable[[str], None]) -> None:
        """Takes a contribution; `answer` hears its fate."""
        now = self.agenda.now
        if self.is_down:
            self.agenda.at(self.down_until, self.arrived, receipt, answer)
            return
        epoch = self._join(receipt.region, now=self.seen[receipt.region])
        record = self.ledger.region_record(receipt.region, receipt.fragment)
        decision = rounds.admit(
            receipt, record, epoch=epoch, alpha=self.sync.alpha, staleness=self.sync.staleness
        )
        if isinstance(decision, Accept):
            size = self.scenario.sizes[receipt.fragment]
            self.record(FrameDecided(receipt, "pending", decision.why, values=size))
            self.seen[receipt.region] = now
            self.table.arrived(receipt.fragment, receipt.region, need=self.sync.quorum, now=now)
            self.wake()
            return
        if isinstance(decision, Refused | Returned):
            fate = "refused" if isinstance(decision, Refused) else "returned"
            self.record(FrameDecided(receipt, fate, decision.why))
        answer(type(decision).__name__.lower())

    # Rounds

    def wake(self, at: Seconds | None = None) -> None:
        """Looks at the rounds at a moment, or as soon as the last look is a glance away."""
        now = self.agenda.now
        wanted = max(now if at is None else at, self._last + self.scenario.glance, self.down_until)
        if now <= self._tick_at <= wanted and self._tick_at > self._last:
            return
        self._tick_at = wanted
        self._tick_number += 1
        self.agenda.at(wanted, self._tick, self._tick_number)

    def _tick(self, number: int) -> None:
        if number != self._tick_number or self.is_down:
            return
        now = self._last = self.agenda.now
        self._tick_at = -1.0
        over = now - self.scenario.server.lease
        silent = {region: now - seen for region, seen in self.seen.items() if seen <= over}
        seen = Attendance(self.live(), self.reports, silent=silent)
        look = conductor.tick(self.ledger, self.table, seen, self.terms, now=now)
        for action in look.actions:
            match action:
                case CallFragment(fragment, version, opened):
                    self.record(FragmentCalled(fragment, version))
                    self.table.rounds[fragment] = opened
                    self.on_call(fragment, version)
                case CloseRound(fragment, verdict):
                    self._close(fragment, verdict)
                case DealLanes():
                    pass  # Nobody here names a text.
                case RetireRegion(region, why):
                    self.record(RegionRetired(region, why))
                case EndRun() | FinishRun() | ResumeRun():
                    pass  # The simulator ends a run itself; its terms have no budget.
                case _:
                    assert_never(action)
        leases = (seen + self.scenario.server.lease for seen in self.seen.values())
        wakes = [end for end in leases if end > now]
        if look.until is not None:
            wakes.append(look.until)
        if wakes:
            self.wake(min(wakes))

    def _close(self, fragment: int, verdict: Close) -> None:
        version = self.ledger.slots[fragment].version
        closed = RoundClosed(fragment, version, verdict.members, drain=False, live=verdict.live)
        self.record(closed)
        self.table.closed(fragment)
        self._merge(fragment, self.agenda.now)

    def _merge(self, fragment: int, began: Seconds) -> None:
        site, slot = self.scenario.server, self.ledger.slots[fragment]
        work = self.scenario.sizes[fragment] * len(slot.closing) / site.merge_values
        begin = max(self.agenda.now, self._merge_free, self.down_until)
        self._merge_free = begin + work + site.commit
        self.agenda.at(self._merge_free, self._publish, fragment, began, self.down_until)

    def _publish(self, fragment: int, began: Seconds, crash: Seconds) -> None:
        if crash != self.down_until:  # It died meanwhile; the restarted server merges again.
            return
        slot = self.ledger.slots[fragment]
        members = dict(slot.closing)
        self.record(VersionPublished(fragment, slot.version + 1, published=""))
        self.table.averages = pace.published(self.table.averages, self.agenda.now - began)
        self.on_publish(fragment, members)
        self.wake()

    # Death

    def crash(self, seconds: Seconds) -> None:
        self.down_until = max(self.down_until, self.agenda.now + seconds)
        self.agenda.at(self.down_until, self._recover)

    def _recover(self) -> None:
        """Stands where the journal says; everybody who ever joined counts as alive."""
        now = self.agenda.now
        if self.is_down:
            return
        self.reports = {}
        self.table = RoundTable.reopened(self.ledger, self.sync, now=now)
        self.seen = dict.fromkeys(self.seen, now)
        self._last, self._merge_free = -1.0, now
        for fragment, slot in enumerate(self.ledger.slots):
            if slot.phase == "closing":
                self._merge(fragment, now)
        self.wake()
