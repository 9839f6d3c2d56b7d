"""The aggregation server of the model: the real ledger and rules, a symbolic outer step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, assert_never

from diloco_cli.core import conductor, pace, rounds
from diloco_cli.core import ledger as ledgers
from diloco_cli.core.conductor import CallFragment, CloseRound, EndRun, FinishRun
from diloco_cli.core.journal_records import (
    FragmentCalled,
    FrameDecided,
    MemberDropped,
    Record,
    RegionJoined,
    RoundClosed,
    RunEnded,
    RunFinished,
    VersionPublished,
)
from diloco_cli.core.unmerged_work import Work
from tests.verify.model.audit import Audit
from tests.verify.model.seeded_run import LEASE
from tests.verify.model.symbols import TINY, Frame, News, State, outer_step, quantised
from tests.verify.model.virtual_time import Clockwork, Process, Violation

Reply = Callable[[Any], None]


@dataclass(frozen=True, slots=True)
class Fenced:
    pass


@dataclass(frozen=True, slots=True)
class Welcome:
    epoch: int
    high: int


@dataclass(frozen=True, slots=True)
class Beat:
    """A heartbeat."""

    reports: tuple[pace.Report, ...]
    empty: tuple[bool, ...]
    """By fragment: nothing is left to send."""
    drained: bool
    step_seconds: float


@dataclass(frozen=True, slots=True)
class Chain:
    """A fragment on its way down: whole when there is no base, else deltas to add."""

    version: int
    merged: str | None
    base: int | None
    values: tuple[float, ...]


class Server(Process):
    kind = "server"

    def __init__(self, world: Clockwork, audit: Audit) -> None:
        super().__init__(world)
        self.audit = audit
        self.sync = world.setting.sync
        self.journal: list[Record] = []
        self.payloads: dict[str, Frame] = {}
        sizes = range(1, self.sync.fragments + 1)
        self.terms = conductor.RunTerms(self.sync, sizes, world.setting.budget, LEASE)
        self.states = {(f, 0): State() for f in range(self.sync.fragments)}

    # Life

    def start(self) -> None:
        """Stands where the journal says; leases, timers and averages begin anew."""
        now = self.world.now
        self.up = True
        self.ledger = ledgers.Ledger.empty(self.sync.fragments)
        for number, record in enumerate(self.journal, 1):
            if not self._forgotten(record):
                self.ledger.apply(number, record)
        self.first = len(self.journal)
        self.table = conductor.RoundTable.reopened(self.ledger, self.sync, now=now)
        self.reports: dict[str, tuple[pace.Report, ...]] = {}
        self.signs = dict.fromkeys(self.ledger.regions, now)
        self.drained: set[str] = set()
        self.empty: dict[str, tuple[bool, ...]] = {}
        self.closed_at = [now] * self.sync.fragments
        self.timer = 0.0
        for f, slot in enumerate(self.ledger.slots):
            if slot.phase == "closing":
                self.later(0.5, partial(self._compute, f))
        self._beat()

    def _forgotten(self, record: Record) -> bool:
        lost = {"calls durable": FragmentCalled, "epochs durable": RegionJoined}
        return any(
            isinstance(record, kind) for rule, kind in lost.items() if rule in self.world.off
        )

    def _beat(self) -> None:
        self.tick()
        self.later(1.0, self._beat)

    def _append(self, record: Record) -> None:
        self.durable(lambda: self.journal.append(record))
        self.ledger.apply(len(self.journal), record)

    def live(self) -> set[str]:
        now = self.world.now
        return {region for region, sign in self.signs.items() if now < sign + LEASE}

    # Requests

    def join(self, region: str, owner: str, boot: int, reply: Reply) -> None:
        member = self.ledger.regions.get(region)
        left = self.signs.get(region, -LEASE) + LEASE - self.world.now
        answer = ledgers.admit_worker(member, owner, boot, lease_left=left)
        if isinstance(answer, ledgers.TurnedAway):
            reply((answer.code, bool(self.ledger.finished)))
            return
        if answer.new:
            self._append(RegionJoined(region, owner, boot, answer.epoch))
            self.drained.discard(region)
            self.reports.pop(region, None)
            self.empty.pop(region, None)
        self.signs[region] = self.world.now
        reply(Welcome(answer.epoch, self.ledger.high(region)))

    def heartbeat(self, region: str, owner: str, epoch: int, beat: Beat, reply: Reply) -> None:
        if epoch != self.ledger.region_record(region, 0).epoch:
            reply(Fenced())
            return
        self.audit.spoke(region, epoch, owner)
        self.signs[region] = self.world.now
        self.reports[region] = beat.reports
        self.table.averages = pace.stepped(self.table.averages, region, beat.step_seconds)
        self.empty[region] = beat.empty
        if self.ledger.end and beat.drained:
            self.drained.add(region)
        else:
            self.drained.discard(region)
        self.tick()
        reply(self._news(region))

    def _news(self, region: str) -> News:
        slots = self.ledger.slots
        fates = {
            f: (slot.decided[region].digest, slot.decided[region].fate)
            for f, slot in enumerate(slots)
            if region in slot.decided
        }
        forgetful = "calls durable" in self.world.off
        return News(
            self.ledger.news - self.first if forgetful else self.ledger.news,
            tuple(slot.version for slot in slots),
            self.ledger.calls(),
            fates,
            bool(self.ledger.end),
            bool(self.ledger.finished),
        )

    def get(self, region: str, f: int, held: int, whole: bool, reply: Reply) -> None:
        slot = self.ledger.slots[f]
        if held >= slot.version:
            return
        merged = slot.merged.get(region, "")
        if "cumulative map" in self.world.off:
            merged = slot.merged[region] if region in slot.members else None
        last = self.states[f, slot.version].published
        if held < 0 or whole:
            reply(Chain(slot.version, merged, None, (last,)))
        elif "exact chain" in self.world.off:
            jump = quantised(last - self.states[f, held].published)
            reply(Chain(slot.version, merged, held, (jump,)))
        else:
            links = (self.states[f, v].delta for v in range(held + 1, slot.version + 1))
            reply(Chain(slot.version, merged, held, tuple(links)))

    def put(self, owner: str, epoch: int, frame: Frame, reply: Reply) -> None:
        """Keeps the payload of a frame that may enter; decides once it is durable."""
        decide = partial(self._decide, owner, epoch, frame, reply)
        answer = self._admit(frame, epoch, unfit=None)
        if not isinstance(answer, rounds.Accept):
            decide(None)
            return
        self.durable(lambda: self.payloads.__setitem__(frame.digest, frame))
        early = answer if "decided when journaled" in self.world.off else None
        self.later(self.world.rng.uniform(0, 0.5), partial(decide, early))

    def _admit(self, frame: Frame, epoch: int, unfit: str | None) -> rounds.Answer:
        return rounds.admit(
            frame.receipt(),
            self.ledger.region_record(frame.region, frame.fragment),
            epoch=epoch,
            alpha=self.sync.alpha,
            staleness=self.sync.staleness,
            unfit=unfit,
        )

    def _decide(
        self, owner: str, epoch: int, frame: Frame, reply: Reply, early: rounds.Answer | None
    ) -> None:
        bad = not self.world.poisoned.isdisjoint(frame.tokens)
        answer = early or self._admit(frame, epoch, unfit="not finite" if bad else None)
        fates: dict[type[rounds.Answer], rounds.Fate] = {
            rounds.Accept: "pending",
            rounds.Returned: "returned",
            rounds.Refused: "refused",
            rounds.Foreign: "foreign",
        }
        if isinstance(answer, rounds.Ahead):
            raise Violation("e", f"a worker is ahead of the server: {answer.why}")
        if isinstance(answer, rounds.Fenced):
            reply(Fenced())
            return
        self.audit.spoke(frame.region, epoch, owner)
        recorded = isinstance(answer, rounds.Recorded)
        fate = answer.decision.fate if recorded else fates[type(answer)]
        if (
            not recorded
            and not isinstance(answer, rounds.Foreign)
            and getattr(answer, "sticky", True)
        ):
            if "journal before reply" in self.world.off:
                reply(fate)
            self._append(FrameDecided(frame.receipt(), fate))
        if isinstance(answer, rounds.Accept):
            self._entered(frame)
        reply(fate)
        self.tick()

    def _entered(self, frame: Frame) -> None:
        self.table.arrived(frame.fragment, frame.region, need=self.need, now=self.world.now)

    # Rounds

    @property
    def need(self) -> int:
        return conductor.need(self.ledger, self.sync)

    def tick(self) -> None:
        """Carries out what the core decides."""
        now = until = self.world.now
        if self.ledger.finished:
            return
        while until is not None and until <= now:
            look = conductor.tick(self.ledger, self.table, self._attendance(), self.terms, now=now)
            self._carry_out(look.actions)
            until = look.until
        if until is not None and until != self.timer:
            self.timer = until
            self.later(until - now + TINY, self.tick)

    def _carry_out(self, actions: list[conductor.Action]) -> None:
        for action in actions:
            if isinstance(action, CallFragment):
                self._append(FragmentCalled(action.fragment, action.version))
                self.table.rounds[action.fragment] = action.round
        closing = {action.fragment for action in actions if isinstance(action, CloseRound)}
        for f, slot in enumerate(self.ledger.slots):
            if slot.phase != "closing":
                self.audit.waits(self, f, f in closing)
        for action in actions:
            match action:
                case CloseRound(f, verdict):
                    self._close(f, verdict.members)
                case EndRun(why):
                    self._append(RunEnded(why))
                    self.table.ended_at = self.table.moved_at = self.world.now
                case FinishRun(why):
                    self._append(RunFinished(why))
                    self.audit.finished(self)
                case CallFragment():
                    pass  # First of all, above.
                case _:
                    assert_never(action)

    def _attendance(self) -> conductor.Attendance:
        ended = self.table.ended_at
        if ended is None:
            return conductor.Attendance(self.live(), self.reports)
        empty = [
            [region for region, fragments in self.empty.items() if fragments[f]]
            for f in range(self.sync.fragments)
        ]
        gone = [region for region in self.ledger.regions if region not in self.drained]
        awaited = [region for region in gone if self.world.now < self._awaited_until(region)]
        return conductor.Attendance(self.live(), self.reports, empty, awaited, gone)

    def _awaited_until(self, region: str) -> float:
        if "end waits for the lapsed" in self.world.off:
            return self.signs[region] + LEASE
        return max(self.ended_at, self.signs[region]) + 2 * LEASE

    @property
    def ended_at(self) -> float:
        assert self.table.ended_at is not None
        return self.table.ended_at

    def _close(self, f: int, members: tuple[str, ...]) -> None:
        slot = self.ledger.slots[f]
        self._append(RoundClosed(f, slot.version, members, drain=bool(self.ledger.end)))
        self.table.rounds[f] = rounds.Round()
        self.closed_at[f] = self.world.now
        self.later(self.world.rng.uniform(0.1, 1.0), partial(self._compute, f))

    def _compute(self, f: int) -> None:
        """Merges a closed round and publishes it; after a crash, does so again."""
        slot = self.ledger.slots[f]
        for region in sorted(slot.closing):
            if self.world.faulty and self.world.chance(self.world.setting.unreadable):
                self._drop(f, region)
        if slot.closing:
            version = slot.version + 1
            state = merged_state(self.states[f, slot.version], slot, self.payloads)
            self.audit.same_again(self.states.get((f, version)), state)
            self.durable(lambda: self.states.__setitem__((f, version), state))
            members = dict(slot.closing)
            record = VersionPublished(f, version, "x")
            self.durable(lambda: self._publish(record, members))
            self.ledger.apply(len(self.journal), record)
            self.table.moved_at = self.world.now
            self.table.averages = pace.published(
                self.table.averages, self.world.now - self.closed_at[f]
            )
        self.tick()

    def _publish(self, record: VersionPublished, members: dict[str, rounds.Receipt]) -> None:
        self.journal.append(record)
        frames = [self.payloads[receipt.digest] for receipt in members.values()]
        self.audit.published(self, record.fragment, record.version, frames)

    def _drop(self, f: int, region: str) -> None:
        fate = self.world.rng.choice(("returned", "refused"))
        self.audit.stats["dropped"] += 1
        self._append(MemberDropped(f, region, fate, "unreadable"))


def merged_state(state: State, slot: ledgers.FragmentState, payloads: dict[str, Frame]) -> State:
    """The next version: members in name order, so that any replay adds in one order."""
    members = [
        (Work(receipt.tokens, receipt.steps), payloads[receipt.digest].value)
        for _, receipt in sorted(slot.closing.items())
    ]
    return outer_step(state, members, drain=slot.drain)
