"""What has the server decided so far?

The ledger is a fold over the journal: `apply` takes one record after another and does
nothing else, so a restarted server, a replay and a simulated server all stand exactly
where the journal says.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, assert_never

from diloco_cli.core.guard import GuardRecord, Norms
from diloco_cli.core.journal_records import (
    Entry,
    FragmentCalled,
    FrameDecided,
    MemberDropped,
    Record,
    RegionJoined,
    RoundClosed,
    RunEnded,
    RunFinished,
    Snapshot,
    VersionPublished,
    VersionStored,
    WeightsEvaluated,
)
from diloco_cli.core.rounds import Decision, Receipt, RegionRecord

MOST_EVALUATIONS = 512
"""Evaluations remembered: the first, the best and the newest ones."""

NEWS = (FragmentCalled, MemberDropped, VersionPublished, RunEnded, RunFinished)
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

    @classmethod
    def of(cls, record: Entry) -> MadeVersion:
        receipts = {key: Receipt(**it) for key, it in record["receipts"].items()}
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
    merged: dict[str, str] = field(default_factory=dict)
    """Cumulative: digest of each region's last merged frame."""
    decided: dict[str, Decision] = field(default_factory=dict)
    applied: dict[str, float] = field(default_factory=dict)
    published: str = ""
    state: str = ""
    """Digest of everything the server keeps of the newest version; empty before the first."""
    made: list[MadeVersion] = field(default_factory=list)
    """The versions after the last stored one, or up to it if that is the newest."""
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
            setattr(slot, name, {key: Receipt(**it) for key, it in getattr(slot, name).items()})
        slot.made = [MadeVersion.of(each) for each in record["made"]]
        slot.decided = {key: Decision(**it) for key, it in record["decided"].items()}
        slot.norms = Norms(**{key: tuple(seen) for key, seen in record["norms"].items()})
        return slot


@dataclass(slots=True)
class RegionOwner:
    """Who may speak for a region."""

    owner: str
    boot: int
    epoch: int


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The held-out loss of some published versions."""

    versions: tuple[int, ...]
    loss: float
    region: str


@dataclass(slots=True)
class Ledger:
    slots: list[FragmentState]
    regions: dict[str, RegionOwner] = field(default_factory=dict)
    news: int = 0
    end: str = ""
    finished: str = ""
    outer_steps: int = 0
    evaluations: list[Evaluation] = field(default_factory=list)
    refused: dict[str, int] = field(default_factory=dict)
    """Contributions refused or returned, by region."""
    conduct: dict[str, GuardRecord] = field(default_factory=dict)
    """What was found in each region's latest contributions."""
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

    def region_record(self, region: str, fragment: int) -> RegionRecord:
        slot, member = self.slots[fragment], self.regions.get(region)
        return RegionRecord(
            epoch=member.epoch if member else 0,
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
        return max(decided, default=-1)

    def calls(self) -> dict[int, int]:
        if self.finished:
            return {}  # A round without an answer stays open; it asks for nothing any more.
        return {f: slot.version for f, slot in enumerate(self.slots) if slot.phase == "called"}

    def applied(self, sizes: Sequence[int]) -> float:
        """Merged tokens of the run: per fragment, averaged with the fragments' sizes."""
        weighted = sum(
            size * sum(slot.applied.values()) for size, slot in zip(sizes, self.slots, strict=True)
        )
        return weighted / sum(sizes)

    def snapshot(self) -> dict[str, Any]:
        """Everything here as plain data, for a record of kind `snapshot`."""
        return json.loads(json.dumps(asdict(self)))

    def restore(self, entry: Entry) -> None:
        """Stands where a snapshot stood."""
        for each in fields(self):
            setattr(self, each.name, entry[each.name])
        self.slots = [FragmentState.of(slot) for slot in entry["slots"]]
        self.regions = {name: RegionOwner(**member) for name, member in entry["regions"].items()}
        self.evaluations = [
            Evaluation(tuple(each["versions"]), each["loss"], each["region"])
            for each in entry["evaluations"]
        ]
        self.refused = dict(entry["refused"])
        self.conduct = {name: GuardRecord(**found) for name, found in entry["conduct"].items()}

    def apply(self, number: int, record: Record) -> None:
        if isinstance(record, NEWS):
            self.news = number
        match record:
            case RegionJoined():
                owner = RegionOwner(record.owner, record.boot, record.epoch)
                self.regions[record.region] = owner
            case FragmentCalled():
                self.slots[record.fragment].phase = "called"
            case FrameDecided():
                self._decided(record)
            case RoundClosed():
                slot = self.slots[record.fragment]
                slot.closing = {region: slot.waiting.pop(region) for region in record.members}
                slot.drain, slot.phase = record.drain, "closing"
            case MemberDropped():
                self._dropped(record)
            case VersionPublished():
                self._published(record)
            case VersionStored():
                self.slots[record.fragment].made[-1].stored = True
            case RunEnded():
                self.end = record.why
            case RunFinished():
                self.finished = record.why
            case WeightsEvaluated():
                self._evaluated(Evaluation(record.versions, record.loss, record.region))
            case Snapshot():
                self.restore(record.ledger)
            case _:
                assert_never(record)

    def _decided(self, record: FrameDecided) -> None:
        receipt, region = record.receipt, record.receipt.region
        slot = self.slots[receipt.fragment]
        slot.decided[region] = Decision(receipt.clock, receipt.digest, record.fate, record.why)
        guard = self.conduct.get(region, GuardRecord())
        if record.sound or (record.fate == "pending" and guard.quarantined):
            self.conduct[region] = guard.found(None)
        elif record.fate == "refused":
            self.conduct[region] = guard.found(record.why)
        # What is accepted may still be found unfit beside the others of its round.
        if record.fate == "pending":
            slot.norms = slot.norms.seen(record.norm or 0.0, receipt.steps)
            slot.waiting[region] = receipt
            self.bytes_up += receipt.bytes
            self.values_up += record.values or 0
        else:
            self.refused[region] = self.refused.get(region, 0) + 1

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
            slot.applied[region] = slot.applied.get(region, 0.0) + receipt.tokens
            self.conduct[region] = self.conduct.get(region, GuardRecord()).found(None)
        slot.version, slot.phase = record.version, "idle"
        slot.published, slot.state = record.published, record.state
        made = MadeVersion(slot.version, slot.state, slot.closing, slot.drain, record.stored)
        slot.made, slot.closing = [*slot.unstored, made], {}
        self.outer_steps += 1

    def _evaluated(self, evaluation: Evaluation) -> None:
        known = self.evaluations
        known.append(evaluation)
        if len(known) > MOST_EVALUATIONS:
            best = min(known, key=lambda each: each.loss)
            del known[2 if known[1] is best else 1]


@dataclass(frozen=True, slots=True)
class Admitted:
    """The join is granted; `new` says that it must be journaled first."""

    epoch: int
    new: bool


@dataclass(frozen=True, slots=True)
class TurnedAway:
    code: Literal["held", "older-copy"]
    why: str


def admit_worker(
    member: RegionOwner | None, owner: str, boot: int, *, lease_left: float
) -> Admitted | TurnedAway:
    """Says whether a worker may speak for a region.

    A retried join gets the same epoch again, so a lost reply fences no worker. A second
    worker waits while the first one's lease lives, so two workers never fence each other
    in turn.
    """
    if member is None:
        return Admitted(1, new=True)
    if member.owner != owner:
        if lease_left > 0:
            return TurnedAway(
                "held", f"another worker holds this region for {lease_left:.0f} more seconds"
            )
        return Admitted(member.epoch + 1, new=True)
    if boot == member.boot:
        return Admitted(member.epoch, new=False)
    if boot < member.boot:
        return TurnedAway(
            "older-copy",
            f"start {boot} of this region's folder, but start {member.boot} was seen before",
        )
    return Admitted(member.epoch + 1, new=True)
