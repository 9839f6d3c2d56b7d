"""Where the stories are played: a server, some regions, and a clock that only we turn.

Nothing is lost or late here unless the story says so; the crash model is for the rest.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from diloco_cli.core import conductor, pace, rounds, unmerged_work
from diloco_cli.core.conductor import (
    Attendance,
    CallFragment,
    CloseRound,
    DealLanes,
    EndRun,
    FinishRun,
    RetireRegion,
    RoundTable,
    RunTerms,
)
from diloco_cli.core.journal_records import (
    FragmentCalled,
    FrameDecided,
    Record,
    RegionJoined,
    RoundClosed,
    RunEnded,
    VersionPublished,
)
from diloco_cli.core.ledger import Ledger
from diloco_cli.core.members import Admitted, TurnedAway, admit_worker
from diloco_cli.core.rounds import Answer, Receipt, Round
from diloco_cli.core.unmerged_work import Book, Posted
from diloco_cli.merge import rules
from diloco_cli.spec.schema import GraceSpec, SyncSpec

LEASE = 10.0


@dataclass
class Region:
    """A region's trainer: books for the only fragment, a checkpoint, an outbox."""

    name: str
    book: Book = field(default_factory=lambda: Book(version=0))
    clock: int = 0
    epoch: int = 1
    outbox: Posted | None = None
    saved: Book | None = None

    def receipt(self) -> Receipt:
        frame = self.outbox
        assert frame is not None, f"{self.name} has posted nothing"
        work = frame.work
        return Receipt(
            self.name, 0, frame.base, frame.clock, frame.digest, frame.prev, work.tokens, work.steps
        )


class Stage:
    def __init__(self, *names: str, budget: float = 1e9, **sync) -> None:
        grace = GraceSpec(kind="fixed", seconds=1.0)
        self.sync = SyncSpec(**{"fragments": 1, "every": 10, "grace": grace, **sync})
        self.now = 0.0
        self.journal: list[Record] = []
        self.ledger = Ledger.empty(1)
        self.table = RoundTable([Round()])
        self.terms = RunTerms(self.sync, [1], budget, LEASE)
        self.signs: dict[str, float] = {}
        self.reports: dict[str, list[pace.Report]] = {}
        self.weights: dict[str, float] = {}
        """Of the newest version, by member."""
        self.regions = {name: Region(name) for name in names}
        for name in names:
            self.join(name, owner=f"disk of {name}", boot=1)

    @property
    def slot(self):
        return self.ledger.slots[0]

    def live(self) -> set[str]:
        return {name for name, sign in self.signs.items() if self.now < sign + LEASE}

    def record(self, record: Record) -> None:
        self.journal.append(record)
        self.ledger.apply(len(self.journal), record)

    # What regions do

    def join(self, name: str, *, owner: str, boot: int) -> Admitted | TurnedAway:
        left = self.signs.get(name, -LEASE) + LEASE - self.now
        answer = admit_worker(self.ledger.regions.get(name), owner, boot, lease_left=left)
        if isinstance(answer, Admitted):
            if answer.new:
                self.record(RegionJoined(name, owner, boot, answer.epoch))
            self.signs[name] = self.now
        return answer

    def train(self, **steps: int) -> None:
        """Regions make inner steps of 100 tokens, and say so."""
        for name, count in steps.items():
            region = self.regions[name]
            for _ in range(count):
                region.book = unmerged_work.step(region.book, 100)
                region.clock += 1
        self.beat(*steps)

    def beat(self, *names: str) -> None:
        """Regions send a heartbeat; the server looks what is to do."""
        for name in names:
            book = self.regions[name].book
            self.signs[name] = self.now
            self.reports[name] = [pace.Report(book.version, book.fresh.steps)]
        self.tick()

    def post(self, name: str) -> bool:
        """The region answers the open call, if it may; the frame is durable, not yet sent."""
        region = self.regions[name]
        if not unmerged_work.may_answer(region.book, self.ledger.calls().get(0)):
            return False
        book, region.clock = unmerged_work.post(region.book, region.clock)
        region.book = book = unmerged_work.written(book, region.clock, f"{name}-{region.clock}")
        flight = book.flight
        assert flight is not None
        region.outbox = Posted(
            flight.clock, flight.base, flight.prev, flight.work, flight.digest, book.totals
        )
        return True

    def send(self, name: str) -> Answer:
        """What lies in the outbox arrives."""
        region = self.regions[name]
        receipt = region.receipt()
        answer = rounds.admit(
            receipt,
            self.ledger.region_record(name, 0),
            epoch=region.epoch,
            alpha=self.sync.alpha,
            staleness=self.sync.staleness,
        )
        if isinstance(answer, rounds.Accept):
            self.record(FrameDecided(receipt, "pending"))
            need = conductor.need(self.ledger, self.sync)
            self.table.arrived(0, name, need=need, now=self.now)
            self.tick()
        return answer

    def answer(self, *names: str) -> None:
        for name in names:
            assert self.post(name), f"{name} has nothing to answer with"
            self.send(name)

    def adopt(self, *names: str) -> None:
        """Regions take over the newest version and report from there."""
        for name in names:
            region, merged = self.regions[name], self.slot.merged.get(name, "")
            if region.book.version < self.slot.version:
                region.book, _ = unmerged_work.settle(
                    region.book, self.slot.version, merged, self.sync.alpha
                )
        self.beat(*names)

    def kill_trainer(self, name: str) -> None:
        """The trainer dies and comes back from what is on the disk."""
        region = self.regions[name]
        region.book, _ = unmerged_work.start(region.saved, region.outbox, self.sync.alpha)
        region.clock = max(region.book.posted, self.ledger.high(name))

    # What the server does

    def tick(self) -> None:
        here = sorted(self.live())
        seen = Attendance(here, self.reports, empty=[self.drained()])
        look = conductor.tick(self.ledger, self.table, seen, self.terms, now=self.now)
        for action in look.actions:
            match action:
                case EndRun():
                    self.record(RunEnded(action.why))
                    self.table.ended_at = self.now
                    self.tick()
                case CallFragment():
                    self.record(FragmentCalled(action.fragment, action.version))
                    self.table.rounds[action.fragment] = action.round
                case CloseRound():
                    self.close(action.verdict.members)
                case FinishRun() | RetireRegion() | DealLanes():
                    pass  # No story goes on so long.

    def drained(self) -> set[str]:
        books = {name: region.book for name, region in self.regions.items()}
        empty = {n for n, b in books.items() if b.flight is None and b.held.steps < 1}
        return empty if self.ledger.end else set()

    def close(self, members: tuple[str, ...]) -> None:
        cap = (self.sync.staleness + 1) * self.sync.every
        drain = bool(self.ledger.end)
        version = self.slot.version
        self.record(RoundClosed(0, version, members, drain))
        self.table.closed(0)
        self.table.rounds[0] = replace(self.table.rounds[0], members=tuple(self.slot.waiting))
        self.weights = {
            name: rules.weight(receipt.tokens, receipt.steps, steps_cap=cap)
            for name, receipt in self.slot.closing.items()
        }
        self.record(VersionPublished(0, version + 1, published=""))
        self.tick()

    def wait(self, seconds: float, *, hearing: tuple[str, ...] = ()) -> None:
        """Time passes, second by second; only the named regions are heard meanwhile."""
        for _ in range(int(seconds)):
            self.now += 1
            self.beat(*hearing)

    def restart_server(self) -> None:
        """Everything in memory is gone; the journal is read again and leases start anew."""
        self.ledger = Ledger.folded(1, enumerate(self.journal, 1))
        self.signs = dict.fromkeys(self.ledger.regions, self.now)
        self.reports = {}
        self.table = RoundTable.reopened(self.ledger, self.sync, now=self.now)

    @property
    def share(self) -> dict[str, float]:
        total = sum(self.weights.values())
        return {name: weight / total for name, weight in self.weights.items()}
