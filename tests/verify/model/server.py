"""The aggregation server of the model: the real ledger and rules, a symbolic outer step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from types import SimpleNamespace
from typing import Any, assert_never, cast

from diloco_cli.core import conductor, members, pace, rounds, terms
from diloco_cli.core import ledger as ledgers
from diloco_cli.core.conductor import (
    CallFragment,
    CloseRound,
    DealLanes,
    EndRun,
    FinishRun,
    ResumeRun,
    RetireRegion,
)
from diloco_cli.core.journal_records import (
    FragmentCalled,
    FrameDecided,
    LanesDealt,
    MemberDropped,
    Record,
    RegionJoined,
    RegionPaced,
    RegionRetired,
    RoundClosed,
    RunEnded,
    RunFinished,
    TermsAmended,
    VersionPublished,
)
from diloco_cli.core.lanes import Assignment, CorpusOrder, LanePosition, Positions, Readers
from diloco_cli.core.terms import AmendmentRequest
from diloco_cli.server.intake.examine import _unbalanced as unbalanced
from diloco_cli.spec.schema import SyncSpec
from tests.verify.model.accounts import Accounts
from tests.verify.model.amendments import ModelTerms, terms_after
from tests.verify.model.audit import Audit
from tests.verify.model.seeded_run import LEASE
from tests.verify.model.symbols import (
    TINY,
    Beat,
    Chain,
    Fenced,
    Frame,
    News,
    State,
    Welcome,
    outer_step,
    quantised,
)
from tests.verify.model.virtual_time import Clockwork, Process, Violation

Reply = Callable[[Any], None]
TEXT = "text"
WINDOWS = 10**6
"""Of an epoch: more than any run reads."""
SILENT = 3 * LEASE
"""After so long without a sign, others read the lanes of a region."""


class Server(Process):
    kind = "server"

    def __init__(self, world: Clockwork, audit: Audit) -> None:
        super().__init__(world)
        self.audit = audit
        self.journal: list[Record] = []
        self.payloads: dict[str, Frame] = {}
        self.fragments = world.setting.sync.fragments
        self.states = {(f, 0): State() for f in range(self.fragments)}

    @property
    def on_record(self) -> list[TermsAmended]:
        """The amendments in the journal, whether a server runs or not."""
        return [record for record in self.journal if isinstance(record, TermsAmended)]

    @property
    def sync(self) -> SyncSpec:
        return self.newest.sync

    @property
    def newest(self) -> ModelTerms:
        """What the amendments so far lead to."""
        if self._newest[0] != self.ledger.terms:
            amended = terms_after(self.world.setting, self.ledger.amendments)
            self._newest = self.ledger.terms, amended
        return self._newest[1]

    @property
    def terms(self) -> conductor.RunTerms:
        newest, forget = self.newest, self.world.setting.forget
        return conductor.RunTerms(
            newest.sync,
            range(1, self.fragments + 1),
            newest.budget,
            LEASE,
            forget,
            self.accounts.step_tokens,
        )

    # Life

    def start(self) -> None:
        """Stands where the journal says; leases, timers and averages begin anew."""
        now = self.world.now
        self.up = True
        self._newest = -1, terms_after(self.world.setting, ())
        self.ledger = ledgers.Ledger.empty(self.fragments)
        self.accounts = Accounts(self)
        for number, record in enumerate(self.journal, 1):
            if not self._forgotten(record):
                self.ledger.apply(number, record)
                self.accounts.apply(record)
        self.accounts.opened()
        self.first = len(self.journal)
        self.table = conductor.RoundTable.reopened(self.ledger, self.sync, now=now)
        self.reports: dict[str, tuple[pace.Report, ...]] = {}
        self.signs = dict.fromkeys(self.ledger.members, now)
        self.beats: dict[str, int] = {}
        """By region: number of the newest heartbeat since it joined."""
        self.said_ended: dict[str, int] = {}
        """By region: the end that it has answered."""
        self.empty: dict[str, tuple[bool, ...]] = {}
        self.closed_at = [now] * self.fragments
        self.timer = 0.0
        self.heard: dict[int, LanePosition] = {}
        self.released: dict[int, LanePosition] = {}
        self.asked: dict[str, tuple[int, ...]] = {}
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
        record = replace(record, time=self.accounts.wall)
        self.durable(lambda: self.journal.append(record))
        self.ledger.apply(len(self.journal), record)
        self.accounts.apply(record)

    def live(self) -> set[str]:
        now = self.world.now
        return {region for region, sign in self.signs.items() if now < sign + LEASE}

    # Amendments

    def amend(self, request: AmendmentRequest, reply: Callable[[str | int], None]) -> None:
        """Changes settings; whoever did not know the newest terms is told them first."""
        answer = terms.known(self.ledger.amendments, request)
        if isinstance(answer, terms.Overtaken):
            self.audit.stats["overtaken"] += 1
            reply(answer.newest)
            return
        if answer is None:
            record = self._amendment(self.ledger, request)
            self._append(record)
            self.audit.stats["amended"] += 1
            if record.reopens:
                self._opened_again()
            self.tick()
        reply("done")

    def amend_offline(self, request: AmendmentRequest) -> None:
        """What an operator does to the folder of a server that is down; no crash in between."""
        ledger = ledgers.Ledger.empty(self.fragments)
        for number, record in enumerate(self.journal, 1):
            ledger.apply(number, record)
        if terms.known(ledger.amendments, replace(request, after=None)) is None:
            self.journal.append(record := self._amendment(ledger, request))
            self.audit.stats["amended offline"] += 1
            if record.reopens:
                self.audit.opened_again()

    def _amendment(self, ledger: ledgers.Ledger, request: AmendmentRequest) -> TermsAmended:
        number = ledger.terms + 1
        record = TermsAmended(number, request.id, request.set)
        budget = terms_after(self.world.setting, [*ledger.amendments, record]).budget
        before = terms_after(self.world.setting, ledger.amendments).budget
        applied = ledger.applied(range(1, self.fragments + 1))
        reopens = bool(ledger.end) and budget > max(before, applied)
        return replace(record, reopens=reopens)

    def _opened_again(self) -> None:
        self.table.ended_at = None
        self.audit.opened_again()

    # Members

    def amend_members(self, **members: Any) -> None:
        """Removes or adds regions, as an operator does."""
        number = self.ledger.terms + 1
        record = TermsAmended(number, f"amendment-{number}", **members)
        for region in record.remove:
            self.audit.let_go(region, removed=True)
        self._append(record)
        for region in record.remove:
            self._let_go(region)

    def _retire(self, region: str, why: str) -> None:
        self.audit.let_go(region)
        self._append(RegionRetired(region, why))
        self._let_go(region)

    def _let_go(self, region: str) -> None:
        if "nobody waits for the retired" in self.world.off:
            return
        for known in (self.signs, self.beats, self.reports, self.empty, self.said_ended):
            known.pop(region, None)
        self.accounts.forget(region)

    # Requests

    def join(self, region: str, owner: str, boot: int, reply: Reply) -> None:
        member, gone = self.ledger.regions.get(region), self.ledger.retired.get(region)
        left = self.signs.get(region, -LEASE) + LEASE - self.world.now
        if gone and gone.barred and "the removed are barred" not in self.world.off:
            reply(("retired", bool(self.ledger.finished)))
            return
        answer = members.admit_worker(
            member, owner, boot, lease_left=left, retired=gone is not None
        )
        if isinstance(answer, members.TurnedAway):
            reply((answer.code, bool(self.ledger.finished)))
            return
        self.audit.welcomed(self, region)
        if answer.new:
            order = CorpusOrder(TEXT, TEXT, WINDOWS, WINDOWS, 1, self.world.setting.lanes)
            at = self.accounts.allowance_clock
            self._append(RegionJoined(region, owner, boot, answer.epoch, order, at=at))
            self.accounts.forget(region)
            for known in (self.reports, self.empty, self.said_ended):
                known.pop(region, None)
        self.signs[region] = self.world.now
        self.beats[region] = 0  # An older copy of the folder may have the same epoch.
        actions, self.asked = self._dealing()
        for action in actions:
            self._deal(action)
        news = self._news(region, until=self._until(region))
        reply(Welcome(answer.epoch, self.ledger.high(region), news))

    # Lanes

    def _dealing(self) -> tuple[list[DealLanes], dict[str, tuple[int, ...]]]:
        actions, asked = conductor.deal_lanes(self.ledger, self._attendance())
        return actions, dict(asked or {})

    def _deal(self, action: DealLanes) -> None:
        table = self.ledger.orders[TEXT]
        for move in action.moves:
            owner = table.owners.get(move.lane)
            if owner and action.why in ("silent", "removed"):
                self.audit.read_on(self, move.lane, owner, removed=action.why == "removed")
        self.audit.stats["grants"] += len(action.moves)
        self._append(LanesDealt(action.order, action.why, action.moves, action.count))

    def _readers(self) -> dict[str, Readers]:
        known, now = self.ledger.regions.keys(), self.world.now
        barred = {name for name, gone in self.ledger.retired.items() if gone.barred}
        long = {name for name, sign in self.signs.items() if now >= sign + SILENT}
        # Nobody is expected: whoever comes first gets all, and gives up what it has not begun.
        readers = Readers(
            known - barred,
            self.live(),
            long | (known - set(self.ledger.members)),
            heard=self.heard,
            released=self.released,
        )
        return {TEXT: readers} if TEXT in self.ledger.orders else {}

    def _hear(self, region: str, beat: Beat) -> None:
        owned = self.ledger.orders[TEXT].owned(region)
        for lane, at in {**beat.released, **beat.lanes}.items():
            if lane in owned and owned[lane].grant == at.grant:
                self.heard[lane] = max(at, self.heard.get(lane, at))
                self.audit.said(self, lane, at)
        for lane, at in beat.released.items():
            if lane in owned and owned[lane].grant == at.grant:
                self.released[lane] = at

    def _assignment(self, region: str) -> Assignment | None:
        table = self.ledger.orders.get(TEXT)
        if table is None:
            return None
        owned = table.owned(region)
        asked = tuple(lane for lane in self.asked.get(region, ()) if lane in owned)
        return Assignment(TEXT, table.count, owned, asked)

    def heartbeat(
        self, region: str, owner: str, epoch: int, n: int, beat: Beat, reply: Reply
    ) -> None:
        record = self.ledger.region_record(region, 0)
        if epoch != record.epoch or record.retired:
            reply(Fenced())
            return
        self.audit.spoke(region, epoch, owner)
        self.signs[region] = self.world.now
        if n < self.beats.get(region, 0):
            reply(self._news(region))  # Overtaken.
            return
        self.beats[region] = n
        self.reports[region] = beat.reports
        self.table.heard(region, beat.step_seconds, live=self.live, sync=self.sync)
        self.empty[region] = beat.empty
        self.accounts.hear(region, beat)
        self._hear(region, beat)
        self.said_ended[region] = beat.ended
        self.tick()
        reply(self._news(region, until=self._until(region)))

    def _until(self, region: str) -> float | None:
        stays = not self.ledger.end and region in self.ledger.members
        return self.accounts.tell(region) if stays else None

    def _news(self, region: str, *, until: float | None = None) -> News:
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
            self.ledger.ended,
            bool(self.ledger.finished),
            self.ledger.terms,
            self._assignment(region),
            until,
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
        answer = early or self._admit(frame, epoch, unfit=self._unfit(frame))
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
        if not recorded and not isinstance(answer, rounds.Foreign):
            if "journal before reply" in self.world.off:
                reply(fate)
            read = {**frame.cursor.released, **frame.cursor.lanes}
            lanes = self.ledger.orders[TEXT].relevant(frame.region, read)
            self._record(frame, fate, lanes if fate == "pending" else None)
        if isinstance(answer, rounds.Accept):
            self.audit.accepted(self, frame)
            self._entered(frame)
        if fate == "foreign" and not self.ledger.slots[frame.fragment].merged.get(frame.region):
            fate = "forgotten"  # Foreign, and nothing of the region is on record.
        reply(fate)
        self.tick()

    def _unfit(self, frame: Frame) -> str | None:
        if not self.world.poisoned.isdisjoint(frame.tokens):
            return "not finite"
        if "headers agree with their books" in self.world.off:
            return None
        merged = self.accounts.totals.account(frame.region).merged[frame.fragment]
        header = SimpleNamespace(tokens=frame.receipt().tokens, totals=asdict(frame.claimed_totals))
        return unbalanced(cast(Any, SimpleNamespace(header=header)), merged)

    def _record(self, frame: Frame, fate: rounds.Fate, lanes: Positions | None) -> None:
        """Records a decision; of what is accepted also what counts, and the pace that it shows."""
        receipt, allowance = frame.receipt(), self.accounts.allowance()
        totals = asdict(frame.claimed_totals)
        if fate != "pending":
            self._append(FrameDecided(receipt, fate, totals=totals))
            return
        verdict = allowance.judge(receipt)
        decided = FrameDecided(
            receipt,
            fate,
            totals=totals,
            lanes=lanes,
            at=allowance.at,
            counted=verdict.counted,
            credit=verdict.credit,
        )
        self._append(decided)
        after = self.accounts.allowance()
        if (known := after.learnt(receipt.region)) is not None:
            self.audit.stats["paced"] += 1
            self._append(RegionPaced(receipt.region, known, after.at, after.terms.steps_cap))
        self.audit.counted(self, frame, verdict.counted)

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
            self.asked = dict(look.asked or {})
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
        alone = any(isinstance(action, EndRun | RetireRegion) for action in actions)
        for f, slot in enumerate(self.ledger.slots):
            if slot.phase != "closing":
                self.audit.waits(self, f, f in closing, looked=not alone)
        for action in actions:
            match action:
                case CloseRound(f, verdict):
                    self._close(f, verdict.members)
                case EndRun(why):
                    self._append(RunEnded(why))
                    self.table.ended_at = self.table.moved_at = self.world.now
                case FinishRun(why):
                    self.audit.ends_short(self)
                    self._append(RunFinished(why))
                    self.audit.finished(self)
                case RetireRegion(region, why):
                    self._retire(region, why)
                case ResumeRun(why):
                    self._append(self.accounts.rooms.resumed(cast(Any, self.accounts), why))
                    self.table.ended_at = None
                    self.audit.resumed()
                case CallFragment():
                    pass  # First of all, above.
                case DealLanes():
                    self._deal(action)
                case _:
                    assert_never(action)

    def _attendance(self) -> conductor.Attendance:
        ended, now = self.table.ended_at, self.world.now
        silent = {region: now - sign for region, sign in self.signs.items() if now >= sign + LEASE}
        if ended is None:
            return conductor.Attendance(
                self.live(),
                self.reports,
                silent=silent,
                readers=self._readers(),
                allowance=self.accounts.allowance(),
                unsent=self.accounts.unsent(self.live() & set(self.ledger.members)),
            )
        empty = [
            [region for region, fragments in self.empty.items() if fragments[f]]
            for f in range(self.fragments)
        ]
        gone = [region for region in self.ledger.regions if not self._is_drained(region)]
        awaited = [region for region in gone if self.world.now < self._awaited_until(region)]
        return conductor.Attendance(self.live(), self.reports, empty, awaited, gone, silent=silent)

    def _is_drained(self, region: str) -> bool:
        return self.said_ended.get(region, 0) == self.ledger.ended

    def _awaited_until(self, region: str) -> float:
        if "end waits for the lapsed" in self.world.off:
            return self.signs.get(region, 0.0) + LEASE
        return max(self.ended_at, self.signs.get(region, 0.0)) + 2 * LEASE

    @property
    def ended_at(self) -> float:
        assert self.table.ended_at is not None
        return self.table.ended_at

    def _close(self, f: int, members: tuple[str, ...]) -> None:
        slot = self.ledger.slots[f]
        drain, number = bool(self.ledger.end), self.ledger.terms
        self._append(RoundClosed(f, slot.version, members, drain, number))
        self.table.closed(f)
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
            number = slot.terms
            if "terms in closed" in self.world.off:
                number = self.ledger.terms
            by = terms_after(self.world.setting, self.ledger.amendments[:number])
            state = merged_state(self.states[f, slot.version], slot, self.payloads, by)
            self.audit.same_again(self.states.get((f, version)), state)
            self.durable(lambda: self.states.__setitem__((f, version), state))
            members = dict(slot.closing)
            names = tuple(sorted(slot.closing))
            record = VersionPublished(f, version, "x", members=names, terms=slot.terms)
            self.durable(lambda: self._publish(record, members))
            self.ledger.apply(len(self.journal), record)
            self.accounts.apply(record)
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
        self.audit.unreadable.add(self.ledger.slots[f].closing[region].digest)
        self._append(MemberDropped(f, region, fate, "unreadable"))


def merged_state(
    state: State, slot: ledgers.FragmentState, payloads: dict[str, Frame], by: ModelTerms
) -> State:
    """The next version: members in name order, so that any replay adds in one order."""
    members = [
        (receipt.worth, payloads[receipt.digest].value)
        for _, receipt in sorted(slot.closing.items())
    ]
    return outer_step(state, members, drain=slot.drain, lr=by.lr, mu=by.momentum)
