"""The state of a run, in one place: what is durable, what is only remembered.

    durable, by the journal     ledger (decides), totals (count)
    memory, rebuilt at start    leases, reports, timers of open rounds, averages

Everything here belongs to one event loop. Between two awaits nothing else runs, so a
decision, its record and its effect are one act, and no lock is needed.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Literal, TypeVar

from diloco_cli.core import conductor
from diloco_cli.core.claims import GENEROSITY, Allowance, ClaimTerms
from diloco_cli.core.conductor import Attendance, RoundTable, RunTerms
from diloco_cli.core.journal_records import (
    Record,
    RegionRetired,
    Snapshot,
    TermsAmended,
    encode,
)
from diloco_cli.core.ledger import Ledger
from diloco_cli.server.rounds.budget import BudgetRooms
from diloco_cli.server.rounds.lanes import LaneReports
from diloco_cli.server.rounds.leases import Leases
from diloco_cli.server.rounds.token_totals import RunTotals
from diloco_cli.server.settings import ServerSettings
from diloco_cli.server.store.group_commit import GroupCommit
from diloco_cli.server.store.run_store import RunStore
from diloco_cli.server.terms import TermsHistory
from diloco_cli.server.versions.newest import PublishedVersions
from diloco_cli.server.versions.next_version import Seen
from diloco_cli.spec.schema import RunSpec, SyncSpec
from diloco_cli.system.failpoints import reach
from diloco_cli.system.files import DiskFull
from diloco_cli.wire.messages import Divergence

Seconds = float
log = logging.getLogger(__name__)

T = TypeVar("T")
Written = Literal["journal", "version", "upload"]

UPLOAD_TROUBLE_SECONDS = 60.0


@dataclass
class FailedRounds:
    """Of a region, in a row: nothing came of them."""

    since: Seconds
    step: int
    """The region's, then."""
    times: int = 0
    tokens: float = 0.0
    why: str = ""

    def report(self, *, now: Seconds) -> Divergence:
        return Divergence(
            times=self.times,
            tokens=self.tokens,
            step=self.step,
            seconds=max(0.0, now - self.since),
            published=False,
            why=self.why,
        )


class State:
    """Everything a server knows about its run, and the one way to change it: `record`."""

    def __init__(
        self,
        history: TermsHistory,
        store: RunStore,
        ledger: Ledger,
        totals: RunTotals,
        weights: PublishedVersions,
        *,
        clock: Callable[[], Seconds] = time.monotonic,
        wall: Callable[[], Seconds] = time.time,
        note: Callable[..., None] = lambda kind, **fields: None,
    ) -> None:
        self.history, self.store, self.weights = history, store, weights
        self.ledger, self.totals = ledger, totals
        self.clock, self.wall, self.note = clock, wall, note
        self.began = now = clock()
        self.served_before = totals.seconds
        self.allowance_before = ledger.allowance.restarted(wall())
        silences = {
            region: max(0.0, ledger.seconds - ledger.regions[region].heard)
            for region in ledger.members
        }
        self.leases = Leases(silences, self.spec.server.lease, now=now)
        self.leases.end = ledger.ended
        self.rooms = BudgetRooms()
        self.table = RoundTable.reopened(ledger, self.sync, now=now)
        self.lanes = LaneReports(began=now)
        self.seen: dict[str, Seen] = {}
        """What is known of payloads that wait, by digest: spares a merge another look."""
        self.waiting = dict.fromkeys(range(len(ledger.slots)), "not called yet")
        """By fragment: what its round waits for."""
        self.finished_at: Seconds | None = now if ledger.finished else None
        self.stopping = ""
        self.failed_rounds: dict[tuple[int | None, str], FailedRounds] = {}
        """By fragment, or None for all of them together, and region: rounds in a row that it was
        in and whose outer step was not finite."""
        self.hopeless = ""
        """Why the run was stopped by itself: nothing more would have come of it."""
        self.everyone = False
        """Regions are to stop as well; otherwise only this server does."""
        self._full: dict[str, tuple[Seconds, str]] = {}
        """What the disk had no room for, by what was to be written: when and in which words."""
        self.credential_trouble: Callable[[str], str] = lambda region: ""
        """Says why a region's credential opens nothing, where the server asks for one."""
        self.failure: BaseException | None = None
        self.closed = False
        self.wake = asyncio.Event()
        """Set when something happened that a tick should look at."""
        self._changed = asyncio.Event()
        self.commit = GroupCommit(store.journal)
        self.commit.on_durable = self.announce
        self.commit.on_failure = self.fail

    @property
    def settings(self) -> ServerSettings:
        """Those of the newest terms."""
        return self.history.newest

    @property
    def spec(self) -> RunSpec:
        """That of the newest terms."""
        return self.history.newest.spec

    @property
    def sync(self) -> SyncSpec:
        return self.spec.sync

    @property
    def terms(self) -> RunTerms:
        spec, server = self.spec, self.spec.server
        return RunTerms(
            spec.sync,
            self.settings.sizes,
            spec.budget.tokens,
            server.lease,
            server.forget_seconds,
            self.settings.step_tokens,
        )

    @property
    def need(self) -> int:
        """Contributions that a round needs now."""
        return conductor.need(self.ledger, self.sync)

    @property
    def phase(self) -> str:
        """waiting, training, finished or stopped."""
        if self.ledger.finished:
            return "finished"
        if self.stopping:
            return "stopped"
        return "training" if len(self.live()) >= self.need else "waiting"

    @property
    def seconds(self) -> Seconds:
        """How long the run has been served, all starts together."""
        return self.served_before + self.clock() - self.began

    @property
    def allowance_clock(self) -> Seconds:
        """The time by which claims are judged; see `core/claims.py`."""
        return round(self.allowance_before + self.clock() - self.began, 3)

    def allowance(self) -> Allowance:
        """What every region may claim now."""
        settings, ledger = self.settings, self.ledger
        terms = ClaimTerms(
            settings.steps_cap, settings.step_tokens, settings.paces, self.leases.paces()
        )
        accounts = [slot.claims for slot in ledger.slots]
        paces = {region: ledger.paces[region] for region in ledger.members}
        return Allowance(accounts, paces, terms, at=self.allowance_clock)

    def most_windows(self, region: str) -> float:
        """Windows that a region can have read since the run began, with the largest batches."""
        tokens = GENEROSITY * self.history.most_step_tokens(region)
        sequence = min(settings.spec.inner_of(region).sequence for settings in self.history)
        return self.allowance().most_steps(region) * tokens / sequence

    def live(self) -> set[str]:
        """Regions that hold a lease, are not about to leave and not in quarantine."""
        return self.leases.here(now=self.clock()) - self.ledger.quarantined()

    def attendance(self, now: Seconds) -> Attendance:
        """Who is there now, as far as a look at the rounds needs to know."""
        leases, slots, since = self.leases, self.ledger.slots, self.table.ended_at
        here = leases.here(now=now)
        # Most looks are for other reasons, and reports of many regions are long.
        needed = any(slot.phase == "idle" for slot in slots)
        needed = needed or any(round.grace is None for round in self.table.rounds)
        reports = leases.reports() if needed else {}
        allowance, silent = self.allowance(), leases.silences(now=now)
        if since is None:
            readers = self.lanes.readers(self.ledger, leases, self.spec, now=now)
            going = leases.retiring()
            empty = [leases.drained(f) & going for f in range(len(slots))] if going else ()
            return Attendance(
                here,
                reports,
                empty,
                retiring=going,
                silent=silent,
                readers=readers,
                allowance=allowance,
                unsent=self.rooms.unsent(self, here),
            )
        return Attendance(
            here,
            reports,
            [leases.drained(fragment) for fragment in range(len(slots))],
            leases.undrained(since=since, now=now),
            leases.not_drained(),
            silent=silent,
            allowance=allowance,
        )

    def record(self, record: Record) -> None:
        """Journals a decision and lets it take effect; durable only after `commit.durable`."""
        record = replace(record, time=round(self.wall(), 3))
        number = self.commit.append(encode(record))
        self.ledger.apply(number, record)
        if isinstance(record, RegionRetired | TermsAmended):
            self.weights.keep_merged([slot.merged for slot in self.ledger.slots])
        self.history.apply(self.ledger, record)
        self.totals.apply(record)
        self.leases.end = self.ledger.ended

    def snapshot(self) -> int:
        """Journals all that the journal amounts to; gives the record's number.

        It changes nothing here, so it is not applied: others hold parts of the ledger.
        """
        now = round(self.wall(), 3)
        snapshot = Snapshot(self.ledger.snapshot(), self.totals.snapshot(), time=now)
        number = self.commit.append(encode(snapshot))
        reach("snapshot.recorded")
        return number

    async def answer_when_durable(self, build: Callable[[], T]) -> T:
        """Builds an answer, and lets it out once everything it rests on is on the disk."""
        answer = build()
        await self.commit.durable()
        return answer

    async def until(self, ready: Callable[[], bool], wait: Seconds) -> None:
        """Waits for `ready`, at most `wait` seconds, looking whenever something became durable."""
        with suppress(TimeoutError):
            async with asyncio.timeout(wait):
                while not ready() and not self.closed:
                    await self._changed.wait()

    @property
    def trouble(self) -> str:
        """What keeps the rounds from going on, in words; empty while nothing does."""
        # An upload is tried again within seconds. If it is not, its sender is gone.
        oldest = self.clock() - UPLOAD_TROUBLE_SECONDS
        for what, (when, why) in self._full.items():
            if what != "upload" or when > oldest:
                return why
        return ""

    def disk_full(self, what: Written, error: DiskFull) -> None:
        """Remembers that the disk refused something, so that people hear of it."""
        why = f"{error.message} {error.hint or ''}".strip()
        if not self.trouble:
            self.note("note", why=why)
            log.warning(why)
        self._full[what] = (self.clock(), why)

    def disk_has_room(self, what: Written) -> None:
        """Forgets the trouble with something that could be written now."""
        if self._full.pop(what, None) and not self.trouble:
            log.info("what had no room could be written")

    def announce(self) -> None:
        """Lets everyone who waits look again."""
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def fail(self, error: BaseException) -> None:
        """Ends the server: what it would say next could not be trusted."""
        self.failure = self.failure or error
        self.close()

    def close(self) -> None:
        """Ends all waiting."""
        self.closed = True
        self.announce()
        self.wake.set()
