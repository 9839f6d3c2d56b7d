"""What does a run go on from when its server's journal is lost, or an older copy of it is all
there is?

Every region holds, of every fragment, the newest published weights that it has heard of, with
the frames that are merged in them. The newest of each fragment, among regions and a copy of the
server's folder, is where the run goes on, as a new run that names the old one:

    found ──newest of each fragment──▶ ledger of the new run ──▶ record `rebuilt`

Frames of the old run are void by their run id, so nothing of it can be merged twice; what was
merged after the versions that were found is lost, and every region counts its own part.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from diloco_cli.core.claims import AllowanceClock, PaceRecord
from diloco_cli.core.guard import Norms
from diloco_cli.core.journal_records import TermsAmended
from diloco_cli.core.lanes import CorpusOrder, Cursor, LaneOwner, LaneTable, Positions, split
from diloco_cli.core.ledger import Ledger
from diloco_cli.core.members import RegionOwner

NUMBERS = 10**9
"""So far above every number that is known does the new journal begin: the lost one had more."""


@dataclass(frozen=True, slots=True)
class FoundVersion:
    """One version of a fragment, as somebody holds it."""

    holder: str
    version: int
    published: str
    """Digest of the published weights."""
    merged: Mapping[str, str]
    """Digest of each region's last merged frame, as of this version."""
    counted: Mapping[str, float]
    """Tokens merged and counted by then, by region."""


@dataclass(frozen=True, slots=True)
class NewestVersion:
    """What a fragment goes on from, and who has it."""

    found: FoundVersion
    holders: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class OtherWeights:
    """Two histories: under one number, holders have different weights."""

    version: int
    holders: Mapping[str, tuple[str, ...]]
    """By digest."""


@dataclass(frozen=True, slots=True)
class FoundRegion:
    """What its folder says of a region."""

    high: int = -1
    """Largest clock of a frame that it posted."""
    key: str = ""
    """Digest of the key that it shows when it joins."""
    order: CorpusOrder | None = None
    reading: tuple[Cursor, ...] = field(default=(), repr=False)
    """Where its reading stood, as of several files."""


def newest_version(found: Iterable[FoundVersion]) -> NewestVersion | OtherWeights | None:
    """Chooses what a fragment goes on from; None if nobody holds any version of it."""
    all_found = list(found)
    if not all_found:
        return None
    top = max(each.version for each in all_found)
    newest = [each for each in all_found if each.version == top]
    if len({each.published for each in newest}) > 1:
        holders: dict[str, tuple[str, ...]] = {}
        for each in newest:
            holders[each.published] = (*holders.get(each.published, ()), each.holder)
        return OtherWeights(top, holders)
    # Whoever asked last was told of the most tokens.
    best = max(newest, key=lambda each: sum(each.counted.values()))
    return NewestVersion(best, tuple(each.holder for each in newest))


def newest_runs(found: Mapping[str, Iterable[str]]) -> list[str]:
    """Of the runs that were found, with those that each continues: those that none continues."""
    continued = {run for was in found.values() for run in was}
    return sorted(found.keys() - continued)


def first_number(known: Iterable[int]) -> int:
    """Number before the first record of the new journal, given all that are known of the old."""
    return (max(known, default=0) // NUMBERS + 1) * NUMBERS


def rebuilt_ledger(
    ledger: Ledger,
    versions: Sequence[FoundVersion],
    regions: Mapping[str, FoundRegion],
    amendments: Sequence[TermsAmended],
    *,
    served: float | None,
) -> Ledger:
    """What the new run has on record. `ledger`, that of a copy or an empty one, is used up.

    `served` is when the lost server was last heard of, by the wall clock: since then regions may
    have trained, and all of that may count.
    """
    for number in range(ledger.terms, len(amendments)):
        ledger.amendments.append(amendments[number])
        ledger.amend_members(0, amendments[number])
    names = {name for found in versions for name in found.merged}
    names |= {name for name, owner in ledger.regions.items() if owner.owner}
    _members(ledger, sorted(names | regions.keys()), regions)
    for slot, found in zip(ledger.slots, versions, strict=True):
        slot.version, slot.phase, slot.published = found.version, "idle", found.published
        slot.merged, slot.applied = dict(found.merged), dict(found.counted)
        slot.waiting, slot.closing, slot.made, slot.decided, slot.claims = {}, {}, [], {}, {}
        slot.drain, slot.terms, slot.norms = False, 0, Norms()
    _lanes(ledger, regions)
    ledger.outer_steps = sum(slot.version for slot in ledger.slots)
    ledger.end, ledger.ended, ledger.finished, ledger.resumed = "", 0, "", None
    ledger.allowance = AllowanceClock(ledger.allowance.at, served)
    return ledger


def _members(ledger: Ledger, names: Sequence[str], regions: Mapping[str, FoundRegion]) -> None:
    """Makes every name that is known a member again, whose folder is still to come."""
    for name in names:
        known, found = ledger.regions.get(name), regions.get(name, FoundRegion())
        order = found.order.digest if found.order else known.order if known else ""
        high, key = max(ledger.high(name), found.high), known.key if known else ""
        epoch = known.epoch if known else 0
        owner = RegionOwner("", 0, epoch, order, found.key or key, ledger.seconds, high)
        ledger.regions[name] = owner
        pace = ledger.paces.get(name)
        since = ledger.allowance.at
        ledger.paces[name] = replace(pace, since=since) if pace else PaceRecord(since)


def _lanes(ledger: Ledger, regions: Mapping[str, FoundRegion]) -> None:
    for name, found in sorted(regions.items()):
        if found.order is None:
            continue
        table = ledger.orders.setdefault(
            found.order.digest, LaneTable(found.order, found.order.lanes)
        )
        for cursor in found.reading:
            if cursor.order == found.order.digest:
                _read(table, name, cursor)
    absent = [name for name in ledger.members if name not in regions]
    for table in ledger.orders.values():
        free = [lane for lane in range(table.count) if lane not in table.owners]
        known = [owner.position for owner in table.owners.values()]
        if free and known and absent:
            # Nobody knows how far it is read. Its owner does, and says so when it comes.
            for lane in free:
                table.owners[lane] = LaneOwner(absent[0], 0, min(known), began=min(known))


def _read(table: LaneTable, region: str, cursor: Cursor) -> None:
    """Takes in how far a region has read; a lane belongs to whoever has the newest grant of it."""
    if cursor.count > table.count and cursor.count % table.count == 0:
        table.split(cursor.count // table.count)
    if cursor.count < 1 or table.count % cursor.count:
        return
    positions: Positions = {**cursor.lanes, **cursor.released}
    if cursor.count < table.count:
        times = table.count // cursor.count
        positions = split(positions, count=cursor.count, times=times, windows=table.order.windows)
    for lane, at in positions.items():
        owner = table.owners.get(lane)
        if owner is None or at.grant > owner.grant:
            table.owners[lane] = LaneOwner(region, at.grant, at.position, began=at.position)
        elif (owner.region, owner.grant) == (region, at.grant):
            owner.position = max(owner.position, at.position)
