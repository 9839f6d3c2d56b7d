"""What has the server decided so far?

The ledger is a fold over the journal: `apply` takes one record after another and does
nothing else, so a restarted server, a replay and a simulated server all stand exactly
where the journal says.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal, assert_never

from diloco_cli.core.claims import AllowanceClock, ClaimAccount, PaceRecord
from diloco_cli.core.guard import GuardRecord, Norms
from diloco_cli.core.journal_records import (
    Entry,
    FragmentCalled,
    FrameDecided,
    LanesDealt,
    MemberDropped,
    Record,
    RegionJoined,
    RegionPaced,
    RegionRetired,
    RoundClosed,
    RunBegun,
    RunEnded,
    RunFinished,
    RunRebuilt,
    RunResumed,
    Snapshot,
    TermsAmended,
    VersionPublished,
    VersionStored,
    WeightsEvaluated,
)
from diloco_cli.core.lanes import LaneTable
from diloco_cli.core.members import MOST_RETIRED, OTHERS, RegionOwner, Retirement
from diloco_cli.core.rounds import Decision, Receipt, RegionRecord

MOST_EVALUATIONS = 512
"""Evaluations remembered: the first, the best and the newest ones."""

NEWS = (
    FragmentCalled,
    MemberDropped,
    VersionPublished,
    RunEnded,
    RunFinished,
    RunResumed,
    TermsAmended,
    LanesDealt,
    RegionRetired,
)
"""Kinds that regions care about; the number of the last one is what they wait after."""


@dataclass(slots=True)
class MadeVersion:
    """What a version was made of: with the version before, enough to make it again."""

    version: int
    state: str
    """Digest of everything the server keeps of it."""
    receipts: dict[str, Receipt]
    drain: bool = False
    stored: bool = True
    """All of it is on the disk; otherwise it is made again from its contributions."""
    terms: int = 0
    """By which it was made."""
    live: int = 0
    """Regions that could have been members."""

    @classmethod
    def of(cls, record: Entry) -> MadeVersion:
        receipts = {key: Receipt.of(it) for key, it in record["receipts"].items()}
        return cls(**{**record, "receipts": receipts})


@dataclass(slots=True)
class FragmentState:
    """One fragment, as the server sees it."""

    version: int = 0
    phase: Literal["idle", "called", "closing"] = "idle"
    waiting: dict[str, Receipt] = field(default_factory=dict)
    """Accepted, for the round that is idle or called."""
    closing: dict[str, Receipt] = field(default_factory=dict)
    """Members of a closed round whose version is not published yet."""
    drain: bool = False
    terms: int = 0
    """By which the closing round is merged."""
    live: int = 0
    """Regions that could have been members of it."""
    merged: dict[str, str] = field(default_factory=dict)
    """Cumulative: digest of each region's last merged frame."""
    decided: dict[str, Decision] = field(default_factory=dict)
    applied: dict[str, float] = field(default_factory=dict)
    """Tokens merged and counted, by region."""
    claims: dict[str, ClaimAccount] = field(default_factory=dict)
    published: str = ""
    state: str = ""
    """Digest of everything the server keeps of the newest version; empty before the first."""
    made: list[MadeVersion] = field(default_factory=list)
    """The versions after the last stored one, or up to it if that is the newest."""
    first: int = 0
    """The version that the run began with."""
    first_state: str = ""
    """Digest of everything the server keeps of that one, if it is on record."""
    norms: Norms = field(default_factory=Norms)
    """Of the latest accepted contributions."""

    @property
    def members(self) -> tuple[str, ...]:
        """Of the newest version, for display."""
        return tuple(sorted(self.made[-1].receipts)) if self.made else ()

    @property
    def base(self) -> int:
        """The newest version that is on the disk as a whole."""
        return self.version - len(self.unstored)

    @property
    def unstored(self) -> list[MadeVersion]:
        """What must be made again if this server dies, oldest first."""
        return [] if not self.made or self.made[-1].stored else self.made

    @classmethod
    def of(cls, record: Entry) -> FragmentState:
        """A slot as a snapshot has it."""
        slot = cls(**record)
        for name in ("waiting", "closing"):
            setattr(slot, name, {key: Receipt.of(it) for key, it in getattr(slot, name).items()})
        slot.made = [MadeVersion.of(each) for each in record["made"]]
        slot.decided = {key: Decision(**it) for key, it in record["decided"].items()}
        slot.claims = {key: ClaimAccount.of(it) for key, it in record["claims"].items()}
        slot.norms = Norms(**{key: tuple(seen) for key, seen in record["norms"].items()})
        return slot


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The held-out loss of some published versions."""

    versions: tuple[int, ...]
    loss: float
    region: str


@dataclass(frozen=True, slots=True)
class Resumption:
    """A run that was drained and short of its budget went on."""

    at: float
    """On the allowance clock."""
    trained: Mapping[str, float]
    """By region: tokens that it had trained then."""


@dataclass(slots=True)
class Ledger:
    slots: list[FragmentState]
    regions: dict[str, RegionOwner] = field(default_factory=dict)
    """Every name that ever joined."""
    retired: dict[str, Retirement] = field(default_factory=dict)
    """Names that are no members, though they have joined or were removed."""
    news: int = 0
    end: str = ""
    ended: int = 0
    """Number of the record that called the end; 0 while none stands."""
    resumed: Resumption | None = None
    """The last time that the run went on after a drain."""
    finished: str = ""
    outer_steps: int = 0
    begun: RunBegun | None = None
    """Which weights version 0 is, unless the seed made them."""
    continues: list[str] = field(default_factory=list)
    """Ids of the runs that this one goes on from, oldest first, if it was rebuilt."""
    evaluations: list[Evaluation] = field(default_factory=list)
    ema_evaluations: list[Evaluation] = field(default_factory=list)
    """The same of the average of the published weights, where the run keeps one."""
    amendments: list[TermsAmended] = field(default_factory=list)
    """In order: the n-th leads to terms n."""
    refused: dict[str, int] = field(default_factory=dict)
    """Contributions refused or returned, by region."""
    conduct: dict[str, GuardRecord] = field(default_factory=dict)
    """What was found in each region's latest contributions."""
    orders: dict[str, LaneTable] = field(default_factory=dict)
    """Who reads which lane, for every order in which a text was ever read."""
    seconds: float = 0.0
    """That the run had been served when the newest version was published."""
    paces: dict[str, PaceRecord] = field(default_factory=dict)
    allowance: AllowanceClock = field(default_factory=AllowanceClock)
    bytes_up: int = 0
    values_up: int = 0
    """Parameters that the accepted frames carried: bytes_up × 8 ÷ this = bits per parameter."""

    @classmethod
    def empty(cls, fragments: int) -> Ledger:
        return cls([FragmentState() for _ in range(fragments)])

    @classmethod
    def folded(cls, fragments: int, records: Iterable[tuple[int, Record]]) -> Ledger:
        """What numbered records amount to."""
        ledger = cls.empty(fragments)
        for number, record in records:
            ledger.apply(number, record)
        return ledger

    @property
    def terms(self) -> int:
        """Number of the newest terms."""
        return len(self.amendments)

    @property
    def members(self) -> tuple[str, ...]:
        """Names that have joined and are not retired."""
        return tuple(region for region in self.regions if region not in self.retired)

    def region_record(self, region: str, fragment: int) -> RegionRecord:
        slot, member = self.slots[fragment], self.regions.get(region)
        retired = self.retired.get(region)
        return RegionRecord(
            epoch=member.epoch if member else 0,
            high=member.high if member else -1,
            retired=(retired.why or "removed") if retired else "",
            version=slot.version,
            merged=slot.merged.get(region, ""),
            known=slot.decided.get(region),
            finished=bool(self.finished),
        )

    def quarantined(self) -> set[str]:
        """Regions whose work is kept out for now."""
        return {region for region, conduct in self.conduct.items() if conduct.quarantined}

    def high(self, region: str) -> int:
        """The largest clock ever decided for a region, so that a new disk starts above it."""
        decided = [slot.decided[region].clock for slot in self.slots if region in slot.decided]
        member = self.regions.get(region)
        return max([*decided, member.high if member else -1])

    def calls(self) -> dict[int, int]:
        if self.finished:
            return {}  # A round without an answer stays open; it asks for nothing any more.
        return {f: slot.version for f, slot in enumerate(self.slots) if slot.phase == "called"}

    def applied(self, sizes: Sequence[int]) -> float:
        """Counted tokens that are merged: per fragment, averaged with the fragments' sizes."""
        weighted = sum(
            size * sum(slot.applied.values()) for size, slot in zip(sizes, self.slots, strict=True)
        )
        return weighted / sum(sizes)

    def snapshot(self) -> dict[str, Any]:
        """Everything here as plain data, for a record of kind `snapshot`."""
        return json.loads(json.dumps(asdict(self)))

    @classmethod
    def of(cls, entry: Entry) -> Ledger:
        """The ledger of a snapshot."""
        ledger = cls([])
        ledger.restore(entry)
        return ledger

    def restore(self, entry: Entry) -> None:
        """Stands where a snapshot stood."""
        for each in fields(self):
            setattr(self, each.name, entry[each.name])
        self.slots = [FragmentState.of(slot) for slot in entry["slots"]]
        self.regions = {name: RegionOwner(**member) for name, member in entry["regions"].items()}
        if begun := entry["begun"]:
            self.begun = RunBegun(**{**begun, "states": tuple(begun["states"])})
        self.retired = {name: Retirement(**gone) for name, gone in entry["retired"].items()}
        self.evaluations = _evaluations(entry["evaluations"])
        self.ema_evaluations = _evaluations(entry["ema_evaluations"])
        self.amendments = [
            TermsAmended(
                **{**each, **{key: tuple(each[key]) for key in ("add", "remove", "repace")}}
            )
            for each in entry["amendments"]
        ]
        self.orders = {name: LaneTable.of(table) for name, table in entry["orders"].items()}
        self.refused = dict(entry["refused"])
        self.conduct = {name: GuardRecord(**found) for name, found in entry["conduct"].items()}
        self.paces = {name: PaceRecord(**known) for name, known in entry["paces"].items()}
        self.allowance = AllowanceClock(**entry["allowance"])
        self.resumed = Resumption(**entry["resumed"]) if entry["resumed"] else None

    def apply(self, number: int, record: Record) -> None:
        if isinstance(record, NEWS):
            self.news = number
        match record:
            case RunBegun():
                self.begun = record
                for slot, state in zip(self.slots, record.states, strict=True):
                    slot.first_state = state
            case RegionJoined():
                self._joined(record)
            case RegionRetired():
                gone = Retirement(record.why, time=record.time, record=number)
                self._retire(record.region, gone)
            case FragmentCalled():
                self.slots[record.fragment].phase = "called"
            case FrameDecided():
                self._decided(record)
            case RoundClosed():
                slot = self.slots[record.fragment]
                slot.closing = {region: slot.waiting.pop(region) for region in record.members}
                slot.drain, slot.terms, slot.live = record.drain, record.terms, record.live
                slot.phase = "closing"
            case MemberDropped():
                self._dropped(record)
            case VersionPublished():
                self._published(record)
            case VersionStored():
                self.slots[record.fragment].made[-1].stored = True
            case RunEnded():
                self.end, self.ended = record.why, number
            case RunResumed():
                self.end, self.ended = "", 0
                self.resumed = Resumption(record.at, dict(record.trained))
            case RunFinished():
                self.finished = record.why
            case WeightsEvaluated():
                known = self.ema_evaluations if record.ema else self.evaluations
                _evaluated(known, Evaluation(record.versions, record.loss, record.region))
            case TermsAmended():
                self.amendments.append(record)
                self.amend_members(number, record)
                self._forget_paces(record)
                if record.reopens:
                    self.end, self.ended, self.finished = "", 0, ""
            case LanesDealt():
                table = self.orders[record.order]
                if record.count is None:
                    table.dealt(number, record.moves, record.why)
                else:
                    table.split(record.count // table.count)
            case RegionPaced():
                self._paced(record)
            case Snapshot():
                self.restore(record.ledger)
            case RunRebuilt():
                self.restore(record.ledger)
                self.continues = list(record.was)
                for slot, state in zip(self.slots, record.states, strict=True):
                    slot.first, slot.first_state, slot.state = slot.version, state, state
                self.news = number
            case _:
                assert_never(record)

    def _joined(self, record: RegionJoined) -> None:
        known, order = self.regions.get(record.region), record.order
        name = order.digest if order else known.order if known else ""
        if order:
            self.orders.setdefault(order.digest, LaneTable(order, order.lanes))
        self.retired.pop(record.region, None)
        if self.resumed and known and known.owner != record.owner:
            # Another folder begins its books anew.
            before = {**self.resumed.trained, record.region: 0.0}
            self.resumed = Resumption(self.resumed.at, before)
        self.regions[record.region] = RegionOwner(
            record.owner,
            record.boot,
            record.epoch,
            order=name,
            key=record.key or (known.key if known else ""),
            heard=self.seconds,
            high=known.high if known else -1,
        )
        self.paces.setdefault(record.region, PaceRecord(record.at))
        self._clocked(record.at, record.time)

    def amend_members(self, number: int, record: TermsAmended) -> None:
        """Ends the memberships that an amendment ends, and lets in whom it adds."""
        gone = Retirement(record.why, record.by, record.time, barred=True, record=number)
        for name in record.remove:
            self._retire(name, gone)
        for name in (region["name"] for region in record.add):
            if name in self.regions:
                self.regions[name].key = ""
            if (ended := self.retired.get(name)) and name in self.regions:
                self.retired[name] = replace(ended, barred=False)
            else:
                self.retired.pop(name, None)

    def _retire(self, region: str, retirement: Retirement) -> None:
        """Ends a membership; what was accepted of it stays and is merged as it would have been."""
        self.retired[region] = retirement
        kept = [name for name in self.retired if name in self.regions and self.regions[name].owner]
        # By record and name, not by their order here: a snapshot sorts them.
        kept.sort(key=lambda name: (self.retired[name].record, name))
        for name in kept[: max(0, len(kept) - MOST_RETIRED)]:
            busy = any(name in slot.waiting or name in slot.closing for slot in self.slots)
            if not busy:
                self._forget(name)

    def _forget(self, region: str) -> None:
        """Keeps of a retired name what is needed so that none of its work is merged twice."""
        known = self.regions[region]
        high = self.high(region)
        self.regions[region] = RegionOwner("", 0, known.epoch, key=known.key, high=high)
        for slot in self.slots:
            slot.merged.pop(region, None)
            slot.decided.pop(region, None)
            slot.claims.pop(region, None)
            if applied := slot.applied.pop(region, 0.0):
                slot.applied[OTHERS] = slot.applied.get(OTHERS, 0.0) + applied
        self.paces.pop(region, None)
        self.refused.pop(region, None)
        self.conduct.pop(region, None)

    def _decided(self, record: FrameDecided) -> None:
        receipt, region = record.receipt, record.receipt.region
        slot = self.slots[receipt.fragment]
        if region in self.regions:
            self.regions[region].heard = self.seconds
        slot.decided[region] = Decision(receipt.clock, receipt.digest, record.fate, record.why)
        guard = self.conduct.get(region, GuardRecord())
        if record.sound or (record.fate == "pending" and guard.quarantined):
            self.conduct[region] = guard.found(None)
        elif record.fate == "refused":
            self.conduct[region] = guard.found(record.why)
        # What is accepted may still be found unfit beside the others of its round.
        if record.fate == "pending":
            receipt = replace(receipt, counted=record.counted)
            slot.norms = slot.norms.seen(record.norm or 0.0, max(1.0, receipt.worth.steps))
            slot.waiting[region] = receipt
            self._claimed(record, receipt)
            self.bytes_up += receipt.bytes
            self.values_up += record.values or 0
            for table in self.orders.values():  # A grant is one of a single order.
                table.accepted(region, record.lanes or {})
        else:
            self.refused[region] = self.refused.get(region, 0) + 1

    def _claimed(self, record: FrameDecided, receipt: Receipt) -> None:
        if record.at is None or record.credit is None:
            return  # Nobody judges claims in a simulation.
        slot, region = self.slots[receipt.fragment], receipt.region
        pace = self.paces[region]
        account = slot.claims.get(region) or ClaimAccount(pace.since, record.credit)
        slot.claims[region] = account.after(
            receipt, at=record.at, credit=record.credit, learning=not pace.steps_per_second
        )
        self._clocked(record.at, record.time)

    def _paced(self, record: RegionPaced) -> None:
        region, pace = record.region, record.steps_per_second
        known = self.paces.get(region)
        self.paces[region] = PaceRecord(known.since if known else record.at, pace)
        for slot in self.slots:
            if region in slot.claims:
                slot.claims[region] = slot.claims[region].paced(record.credit)
        self._clocked(record.at, record.time)

    def _forget_paces(self, record: TermsAmended) -> None:
        if record.at is None:
            return
        for region in record.repace:
            self.paces[region] = PaceRecord(record.at)
            for slot in self.slots:
                if region in slot.claims:
                    slot.claims[region] = slot.claims[region].unpaced()
        self._clocked(record.at, record.time)

    def _clocked(self, at: float, time: float | None) -> None:
        self.allowance = AllowanceClock(max(self.allowance.at, at), time)

    def _dropped(self, record: MemberDropped) -> None:
        slot, region = self.slots[record.fragment], record.region
        receipt = slot.closing.pop(region)
        slot.decided[region] = Decision(receipt.clock, receipt.digest, record.fate, record.why)
        self.refused[region] = self.refused.get(region, 0) + 1
        if record.alone:
            self.conduct[region] = self.conduct.get(region, GuardRecord()).found(record.why)
        if not slot.closing:
            slot.phase = "idle"

    def _published(self, record: VersionPublished) -> None:
        slot = self.slots[record.fragment]
        for region, receipt in slot.closing.items():
            slot.merged[region] = receipt.digest
            slot.decided[region] = Decision(receipt.clock, receipt.digest, "merged")
            slot.applied[region] = slot.applied.get(region, 0.0) + receipt.worth.tokens
            self.conduct[region] = self.conduct.get(region, GuardRecord()).found(None)
        slot.version, slot.phase = record.version, "idle"
        slot.published, slot.state = record.published, record.state
        how = slot.drain, record.stored, slot.terms, slot.live
        made = MadeVersion(slot.version, slot.state, slot.closing, *how)
        slot.made, slot.closing = [*slot.unstored, made], {}
        self.outer_steps += 1
        self.seconds = max(self.seconds, record.seconds)


def _evaluated(known: list[Evaluation], evaluation: Evaluation) -> None:
    known.append(evaluation)
    if len(known) > MOST_EVALUATIONS:
        best = min(known, key=lambda each: each.loss)
        del known[2 if known[1] is best else 1]


def _evaluations(entries: Iterable[Entry]) -> list[Evaluation]:
    return [Evaluation(tuple(each["versions"]), each["loss"], each["region"]) for each in entries]
