"""One run's server, rebuilt from what folders and a copy hold."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from diloco_cli.core.journal_records import (
    FragmentCalled,
    FrameDecided,
    Record,
    RegionJoined,
    RoundClosed,
    RunRebuilt,
    VersionPublished,
)
from diloco_cli.core.ledger import Ledger
from diloco_cli.core.rebuild import (
    FoundRegion,
    FoundVersion,
    NewestVersion,
    first_number,
    newest_version,
    rebuilt_ledger,
)
from diloco_cli.core.rounds import Accept, Ahead, Fenced, Foreign, Receipt, Recorded, admit
from diloco_cli.core.unmerged_work import Totals
from tests.verify.rebuild.rules import Broken, Rules

Tokens = frozenset[int]
FRAGMENTS = 2


@dataclass(frozen=True)
class ModelFrame:
    run: str
    region: str
    owner: str
    receipt: Receipt
    totals: Totals
    tokens: Tokens
    applied: Tokens
    """What its folder knew to be merged, when it was posted."""


@dataclass(frozen=True)
class ModelImage:
    run: str
    version: int
    published: str
    merged: Mapping[str, str]
    tokens: Tokens


@dataclass
class Copy:
    """A copy of a server's folder."""

    run: str
    ledger: Ledger
    published: list[dict[int, Tokens]]
    applied: Counter[tuple[str, int]]


@dataclass
class Server:
    run: str
    rules: Rules
    alpha: float
    ledger: Ledger = field(default_factory=lambda: Ledger.empty(FRAGMENTS))
    published: list[dict[int, Tokens]] = field(
        default_factory=lambda: [{0: frozenset()} for _ in range(FRAGMENTS)]
    )
    """By fragment and version: the work that is in it."""
    frames: dict[str, ModelFrame] = field(default_factory=dict)
    applied: Counter[tuple[str, int]] = field(default_factory=Counter)
    """By owner and fragment: tokens merged in this run."""
    number: int = 0

    def record(self, record: Record) -> None:
        self.number += 1
        self.ledger.apply(self.number, record)

    def join(self, region: str, owner: str) -> int:
        known = self.ledger.regions.get(region)
        self.record(RegionJoined(region, owner, 1, known.epoch + 1 if known else 1))
        return self.ledger.high(region)

    def put(self, frame: ModelFrame) -> str:
        if self.rules.void and frame.run != self.run:
            return "void"
        receipt = frame.receipt
        record = self.ledger.region_record(receipt.region, receipt.fragment)
        answer = admit(receipt, record, epoch=record.epoch, alpha=self.alpha, staleness=10**6)
        match answer:
            case Accept():
                self.frames[receipt.digest] = frame
                self.record(FrameDecided(receipt, "pending"))
                return "pending"
            case Recorded(decision):
                return decision.fate
            case Foreign() | Fenced():
                return "foreign"
            case Ahead():
                return "ahead"
        return "returned"

    def merge(self, fragment: int, rng: random.Random) -> None:
        slot = self.ledger.slots[fragment]
        if not slot.waiting:
            return
        members = sorted(rng.sample(sorted(slot.waiting), rng.randint(1, len(slot.waiting))))
        self.record(FragmentCalled(fragment, slot.version))
        self.record(RoundClosed(fragment, slot.version, tuple(members), drain=False))
        work = set(self.published[fragment][slot.version])
        for receipt in slot.closing.values():
            frame = self.frames[receipt.digest]
            if twice := work & frame.tokens:
                raise Broken(f"{len(twice)} steps of {receipt.region} are merged twice")
            work |= frame.tokens
            self.applied[frame.owner, fragment] += len(frame.tokens)
        version = slot.version + 1
        self.record(VersionPublished(fragment, version, f"{self.run}-{fragment}-{version}"))
        self.published[fragment][version] = frozenset(work)

    def image(self, fragment: int) -> ModelImage:
        slot = self.ledger.slots[fragment]
        work = self.published[fragment][slot.version]
        return ModelImage(self.run, slot.version, slot.published, dict(slot.merged), work)

    def copy(self) -> Copy:
        published = [dict(versions) for versions in self.published]
        return Copy(self.run, Ledger.of(self.ledger.snapshot()), published, Counter(self.applied))


def rebuild(
    lost: Server, run: str, images: Mapping[str, Sequence[ModelImage | None]], copy: Copy | None
) -> Server | None:
    """The server that goes on; None if nobody holds some fragment."""
    chosen: list[NewestVersion] = []
    held: dict[str, ModelImage] = {}
    for fragment in range(FRAGMENTS):
        found: list[FoundVersion] = []
        for name, folder in images.items():
            image = folder[fragment]
            if image and image.run == lost.run:
                held[f"{name}-{fragment}"] = image
                found.append(FoundVersion(name, image.version, image.published, image.merged, {}))
        if copy and copy.run == lost.run:
            slot = copy.ledger.slots[fragment]
            found.append(FoundVersion("copy", slot.version, slot.published, slot.merged, {}))
        newest = newest_version(found)
        if newest is None:
            return None
        if not isinstance(newest, NewestVersion):
            raise Broken(f"two histories of one run: {newest}")
        chosen.append(newest)
    base = copy.ledger if copy else Ledger.empty(FRAGMENTS)
    regions = {name: FoundRegion() for name in images}
    ledger = rebuilt_ledger(base, [it.found for it in chosen], regions, (), served=None)
    was = (*lost.ledger.continues, lost.run)
    new = Server(run, lost.rules, lost.alpha)
    new.number = first_number([lost.number])
    states = tuple(f"state-{run}-{fragment}" for fragment in range(FRAGMENTS))
    new.record(RunRebuilt(was, states, ("",) * FRAGMENTS, ledger.snapshot(), {}))
    for fragment, newest in enumerate(chosen):
        version = newest.found.version
        holder = newest.holders[0]
        if holder == "copy" and copy:
            work = copy.published[fragment][version]
        else:
            work = held[f"{holder}-{fragment}"].tokens
        new.published[fragment] = {version: work}
    return new
