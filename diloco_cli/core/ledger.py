"""What has the server decided so far?

The ledger is a fold over the journal: `apply` takes one record after another and does
nothing else, so a restarted server, a replay and a simulated server all stand exactly
where the journal says. Records are plain mappings with a `kind`:

    joined     region owner boot epoch
    called     fragment version
    decided    receipt fate why
    closed     fragment version members drain
    dropped    fragment region fate why
    published  fragment version published members bytes stored
    stored     fragment version
    end        why
    finished   why
    evaluated  versions loss region
    snapshot   ledger

A snapshot says what all records before it amount to, so that they can be left out.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal

from diloco_cli.core.guard import GuardRecord, Norms
from diloco_cli.core.rounds import Decision, Receipt, RegionRecord

Record = Mapping[str, Any]
MOST_EVALUATIONS = 512
"""Evaluations remembered: the first, the best and the newest ones."""

NEWS = frozenset({"called", "dropped", "published", "end", "finished"})
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
    def of(cls, record: Record) -> MadeVersion:
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
    def of(cls, record: Record) -> FragmentState:
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


@dataclass(slots=True)
class Ledger:
    slots: list[FragmentState]
    regions: dict[str, RegionOwner] = field(default_factory=dict)
    news: int = 0
    end: str = ""
    finished: str = ""
    outer_steps: int = 0
    evaluations: list[dict[str, Any]] = field(default_factory=list)
    refused: dict[str, int] = field(default_factory=dict)
    """Contributions refused or returned, by region."""
    conduct: dict[str, GuardRecord] = field(default_factory=dict)
    """What was found in each region's latest contributions."""
    bytes_up: int = 0
    values_up: int = 0
    """Parameters that the accepted frames carried: bytes_up × 8 ÷ this = bits a parameter."""

    @classmethod
    def empty(cls, fragments: int) -> Ledger:
        return cls([FragmentState() for _ in range(fragments)])

    def standing(self, region: str, fragment: int) -> RegionRecord:
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
            return {}  # A round that nobody answered stays open; it asks for nothing any more.
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

    def restore(self, record: Record) -> None:
        """Stands where a snapshot stood."""
        for each in fields(self):
            setattr(self, each.name, record[each.name])
        self.slots = [FragmentState.of(slot) for slot in record["slots"]]
        self.regions = {name: RegionOwner(**member) for name, member in record["regions"].items()}
        self.evaluations = [dict(each) for each in record["evaluations"]]
        self.refused = dict(record["refused"])
        self.conduct = {name: GuardRecord(**found) for name, found in record["conduct"].items()}

    def apply(self, number: int, record: Record) -> None:
        kind = record["kind"]
        if kind in NEWS:
            self.news = number
        handler = _HANDLERS.get(kind)
        if handler is not None:  # Kinds unknown here carry notes, never outer state.
            handler(self, record)


def _joined(ledger: Ledger, record: Record) -> None:
    ledger.regions[record["region"]] = RegionOwner(record["owner"], record["boot"], record["epoch"])


def _called(ledger: Ledger, record: Record) -> None:
    ledger.slots[record["fragment"]].phase = "called"


def _decided(ledger: Ledger, record: Record) -> None:
    receipt = Receipt(**record["receipt"])
    slot = ledger.slots[receipt.fragment]
    slot.decided[receipt.region] = Decision(
        receipt.clock, receipt.digest, record["fate"], record.get("why", "")
    )
    _looked_at(ledger, receipt.region, record)
    if record["fate"] == "pending":
        slot.norms = slot.norms.seen(record.get("norm", 0.0), receipt.steps)
        slot.waiting[receipt.region] = receipt
        ledger.bytes_up += receipt.bytes
        ledger.values_up += record.get("values", 0)
    else:
        ledger.refused[receipt.region] = ledger.refused.get(receipt.region, 0) + 1


def _looked_at(ledger: Ledger, region: str, record: Record) -> None:
    fate, known = record["fate"], ledger.conduct.get(region, GuardRecord())
    if record.get("sound") or (fate == "pending" and known.quarantined):
        ledger.conduct[region] = known.found(None)
    elif fate == "refused":
        ledger.conduct[region] = known.found(record.get("why", ""))
    # What is accepted may still be found unfit beside the others of its round.


def _closed(ledger: Ledger, record: Record) -> None:
    slot = ledger.slots[record["fragment"]]
    slot.closing = {region: slot.waiting.pop(region) for region in record["members"]}
    slot.drain = record["drain"]
    slot.phase = "closing"


def _dropped(ledger: Ledger, record: Record) -> None:
    slot, region = ledger.slots[record["fragment"]], record["region"]
    receipt = slot.closing.pop(region)
    slot.decided[region] = Decision(receipt.clock, receipt.digest, record["fate"], record["why"])
    ledger.refused[region] = ledger.refused.get(region, 0) + 1
    if record.get("alone"):
        ledger.conduct[region] = ledger.conduct.get(region, GuardRecord()).found(record["why"])
    if not slot.closing:
        slot.phase = "idle"


def _published(ledger: Ledger, record: Record) -> None:
    slot = ledger.slots[record["fragment"]]
    for region, receipt in slot.closing.items():
        slot.merged[region] = receipt.digest
        slot.decided[region] = Decision(receipt.clock, receipt.digest, "merged")
        slot.applied[region] = slot.applied.get(region, 0.0) + receipt.tokens
        ledger.conduct[region] = ledger.conduct.get(region, GuardRecord()).found(None)
    slot.version, slot.phase = record["version"], "idle"
    slot.published, slot.state = record["published"], record.get("state", "")
    stored = record.get("stored", True)
    made = MadeVersion(slot.version, slot.state, slot.closing, slot.drain, stored)
    slot.made, slot.closing = [*slot.unstored, made], {}
    ledger.outer_steps += 1


def _stored(ledger: Ledger, record: Record) -> None:
    ledger.slots[record["fragment"]].made[-1].stored = True


def _end(ledger: Ledger, record: Record) -> None:
    ledger.end = record["why"]


def _finished(ledger: Ledger, record: Record) -> None:
    ledger.finished = record["why"]


def _evaluated(ledger: Ledger, record: Record) -> None:
    known = ledger.evaluations
    known.append({key: record[key] for key in ("versions", "loss", "region")})
    if len(known) > MOST_EVALUATIONS:
        best = min(known, key=lambda each: each["loss"])
        del known[2 if known[1] is best else 1]


def _snapshot(ledger: Ledger, record: Record) -> None:
    ledger.restore(record["ledger"])


_HANDLERS = {
    "joined": _joined,
    "called": _called,
    "decided": _decided,
    "closed": _closed,
    "dropped": _dropped,
    "published": _published,
    "stored": _stored,
    "end": _end,
    "finished": _finished,
    "evaluated": _evaluated,
    "snapshot": _snapshot,
}


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

    A retried join gets the same epoch again, so a lost reply fences nobody. A second
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
