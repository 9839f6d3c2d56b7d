"""Which region reads which lane of the text, and from where?

A corpus has one order of reading, cut into a fixed number of lanes; a lane is read by one
region at a time, from one position to the next. Lanes change hands only by a record, whose
number is the grant, so every position is one of a lane under a grant.

    free ──dealt──▶ owned ──somebody is poorer──▶ asked ──given up at p──▶ another's, from p on
                      └──────silent for too long, or removed─────────────▶ another's, see `deal`

`follow` is the region's side, `deal` the server's. Neither waits for the other: a region reads
the lanes it has for as long as it likes, and what it is asked for it gives up at a boundary
between two steps, with a checkpoint that holds all the work of the windows before.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

LaneReason = Literal["dealt", "released", "silent", "removed", "split"]

LANES, MOST_LANES = 64, 4096
"""Lanes of an order, where nothing else is said, and at most."""
MOST_LAPSED = 1024
"""Grants that ended without a word of their owner and are remembered one by one."""


class LanePosition(NamedTuple):
    """How far a lane is read under one grant: the first position that is not."""

    grant: int
    position: int


Positions = Mapping[int, LanePosition]
"""By lane."""


# What a region reads


@dataclass(frozen=True, slots=True)
class Cursor:
    """Where a region's reading stands: with the corpus it says every window to come."""

    order: str = ""
    """Which way of reading which corpus."""
    count: int = 1
    """Lanes of the order, this region's or not."""
    lanes: Positions = field(default_factory=dict)
    """What this region reads."""
    released: Positions = field(default_factory=dict)
    """What it has given up, and where; until the lane comes back under another grant."""
    own: Mapping[str, Any] | None = None
    """Where a loader stands that is not ours, in its own words; plain data."""

    def as_record(self) -> dict[str, Any]:
        """As plain data, for checkpoints and the headers of frames."""
        return {
            "order": self.order,
            "count": self.count,
            "lanes": plain_positions(self.lanes),
            "released": plain_positions(self.released),
            **({} if self.own is None else {"own": dict(self.own)}),
        }

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Cursor:
        return cls(
            record["order"],
            record["count"],
            read_positions(record["lanes"]),
            read_positions(record["released"]),
            record.get("own"),
        )


def plain_positions(positions: Positions) -> dict[str, list[int]]:
    return {str(lane): [*at] for lane, at in sorted(positions.items())}


def read_positions(plain: Mapping[Any, Iterable[int]]) -> dict[int, LanePosition]:
    return {int(lane): LanePosition(*at) for lane, at in plain.items()}


@dataclass(frozen=True, slots=True)
class Assignment:
    """What the server tells a region about its lanes."""

    order: str
    count: int
    lanes: Positions
    """All that the region owns, each from where it is to be read."""
    asked: Collection[int] = ()
    """Those of them that it should give up."""


def follow(cursor: Cursor, told: Assignment, *, windows: int) -> Cursor:
    """Takes up what was granted and gives up what is asked for or is no longer owned.

    A lane that was given up stays so under the same grant, whatever the server still says. One
    that was asked for before it was begun is given up as it came: otherwise nobody would read it.
    `windows` are those of an epoch.
    """
    if told.order != cursor.order:
        return cursor  # The server does not know yet that we read another text.
    if told.count != cursor.count:
        cursor = _cut(cursor, told.count, windows)
    lanes, released = dict(cursor.lanes), dict(cursor.released)
    for lane in cursor.lanes.keys() - told.lanes.keys():
        released[lane] = lanes.pop(lane)
    for lane, granted in told.lanes.items():
        have, gone = lanes.get(lane), released.get(lane)
        if gone and gone.grant >= granted.grant:
            continue
        # An older or empty disk begins after the windows whose work was accepted.
        newest = granted if have is None else max(have, granted)
        if lane in told.asked:
            lanes.pop(lane, None)
            released[lane] = newest
        else:
            released.pop(lane, None)
            lanes[lane] = newest
    same = lanes == cursor.lanes and released == cursor.released
    return cursor if same else replace(cursor, lanes=lanes, released=released)


def _cut(cursor: Cursor, count: int, windows: int) -> Cursor:
    """The same reading in more lanes; before the first grant, in whatever number there are."""
    times, rest = divmod(count, cursor.count)
    if not cursor.lanes and not cursor.released:
        return replace(cursor, count=count)
    if rest or times < 1:
        raise ValueError(f"{cursor.count} lanes cannot be cut into {count}")
    how = {"count": cursor.count, "times": times, "windows": windows}
    lanes, released = split(cursor.lanes, **how), split(cursor.released, **how)
    return replace(cursor, count=count, lanes=lanes, released=released)


def split(positions: Positions, *, count: int, times: int, windows: int) -> dict[int, LanePosition]:
    """The same places read when every one of `count` lanes is cut into `times`.

    Lane l becomes l, l + count, l + 2 × count, … of an order with `windows` windows an epoch.
    """
    before, after = windows // count, windows // (count * times)
    parts: dict[int, LanePosition] = {}
    for lane, (grant, position) in positions.items():
        epoch, read = divmod(position, before)
        for part in range(times):
            # Of the places 0 … read − 1 of the lane, the part has every `times`-th from its own.
            own = max(0, -(-(read - part) // times))
            parts[lane + part * count] = LanePosition(grant, epoch * after + min(after, own))
    return parts


# What the server has on record


@dataclass(frozen=True, slots=True)
class CorpusOrder:
    """One way of reading one corpus, as a region names it when it joins."""

    digest: str
    settings: str
    """Digest of all that settings decide: equal where only the files differ."""
    tokens: int
    """Of the training part."""
    windows: int
    """In one epoch."""
    sequence: int
    lanes: int


@dataclass(slots=True)
class LaneOwner:
    region: str
    grant: int
    position: int
    """Where the grant began, or the furthest that an accepted frame has read under it."""
    began: int = 0
    """Where the grant began."""


@dataclass(slots=True)
class LapsedGrant:
    """A lane that was dealt on without a word of its owner, which might come back."""

    lane: int
    region: str
    grant: int
    end: int
    """From here on another region reads."""
    position: int
    """The furthest that an accepted frame of the old owner has read, before or since."""
    began: int = 0
    """Where the grant began."""

    @property
    def unread(self) -> int:
        """Windows before the end whose work never came."""
        return max(0, self.end - self.position)

    @property
    def repeated(self) -> int:
        """Windows after the end whose work came all the same."""
        return max(0, self.position - self.end)


@dataclass(slots=True)
class LaneTable:
    """Who owns the lanes of one order."""

    order: CorpusOrder
    count: int
    owners: dict[int, LaneOwner] = field(default_factory=dict)
    lapsed: list[LapsedGrant] = field(default_factory=list)
    """The newest; sums of the older ones are below."""
    unread_windows: int = 0
    repeated_windows: int = 0

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> LaneTable:
        """A table as a snapshot has it."""
        table = cls(**record)
        table.order = CorpusOrder(**record["order"])
        table.owners = {int(lane): LaneOwner(**own) for lane, own in record["owners"].items()}
        table.lapsed = [LapsedGrant(**lapsed) for lapsed in record["lapsed"]]
        return table

    def owned(self, region: str) -> dict[int, LanePosition]:
        return {
            lane: LanePosition(owner.grant, owner.position)
            for lane, owner in self.owners.items()
            if owner.region == region
        }

    def dealt(self, grant: int, moves: Iterable[LaneMove], why: str) -> None:
        """Gives lanes to their next owners."""
        for move in moves:
            owner = self.owners.get(move.lane)
            if owner and why in ("silent", "removed"):
                whose = (move.lane, owner.region, owner.grant)
                self.lapsed.append(LapsedGrant(*whose, move.at, owner.position, owner.began))
            self.owners[move.lane] = LaneOwner(move.to, grant, move.at, began=move.at)
        for old in self.lapsed[:-MOST_LAPSED]:
            self.unread_windows += old.unread
            self.repeated_windows += old.repeated
        del self.lapsed[:-MOST_LAPSED]

    def accepted(self, region: str, positions: Positions) -> None:
        """Takes note how far the work of an accepted frame has read."""
        for lane, at in positions.items():
            if known := self._granted(region, lane, at.grant):
                known.position = max(known.position, at.position)

    def read(self, region: str, positions: Positions) -> int:
        """Windows that a region has read, by its own word, since it was given its lanes."""
        return sum(
            max(0, at.position - known.began)
            for lane, at in positions.items()
            if (known := self._granted(region, lane, at.grant))
        )

    def relevant(self, region: str, positions: Positions) -> dict[int, LanePosition]:
        """Those positions that say something new about a grant that the region has or had."""
        return {
            lane: at
            for lane, at in positions.items()
            if (known := self._granted(region, lane, at.grant)) and at.position > known.position
        }

    def _granted(self, region: str, lane: int, grant: int) -> LaneOwner | LapsedGrant | None:
        owner = self.owners.get(lane)
        if owner and (owner.region, owner.grant) == (region, grant):
            return owner
        key = (lane, region, grant)
        lapsed = (old for old in self.lapsed if (old.lane, old.region, old.grant) == key)
        return next(lapsed, None)

    def split(self, times: int) -> None:
        """Cuts every lane into so many; owners keep the parts, under the grants they have."""
        how = {"count": self.count, "times": times, "windows": self.order.windows}

        def parts(lane: int, grant: int, position: int) -> dict[int, LanePosition]:
            return split({lane: LanePosition(grant, position)}, **how)

        owners: dict[int, LaneOwner] = {}
        for lane, owner in self.owners.items():
            began = parts(lane, owner.grant, owner.began)
            owners |= {
                part: LaneOwner(owner.region, *at, began=began[part].position)
                for part, at in parts(lane, owner.grant, owner.position).items()
            }
        lapsed: list[LapsedGrant] = []
        for old in self.lapsed:
            ends, read, began = (
                parts(old.lane, old.grant, each) for each in (old.end, old.position, old.began)
            )
            lapsed += [
                LapsedGrant(
                    part, old.region, *ends[part], read[part].position, began[part].position
                )
                for part in ends
            ]
        self.owners, self.lapsed, self.count = owners, lapsed, self.count * times

    @property
    def unread(self) -> int:
        """Windows that nobody's merged work has read, because their owner fell silent."""
        return self.unread_windows + sum(lapsed.unread for lapsed in self.lapsed)

    @property
    def repeated(self) -> int:
        """Windows that a silent owner read on, and another region as well."""
        return self.repeated_windows + sum(lapsed.repeated for lapsed in self.lapsed)


# Who gets what


class LaneMove(NamedTuple):
    lane: int
    to: str
    at: int
    """Where the new owner begins."""


@dataclass(frozen=True, slots=True)
class Readers:
    """Who reads an order at one moment, and what they said."""

    members: Collection[str]
    """All that may come with work on it, there or not."""
    here: Collection[str]
    """Those that read it now."""
    silent: Collection[str] = ()
    """Members that others read on for: not heard for long, or reading another text by now."""
    expected: Collection[str] = ()
    """Regions that have never joined and are waited for: their share is not dealt yet."""
    heard: Positions = field(default_factory=dict)
    """By lane: the furthest that its owner has said."""
    released: Positions = field(default_factory=dict)
    """By lane: where its owner has given it up."""
    count: int = 0
    """Lanes that the order should have by now; 0 for those it has."""


@dataclass(frozen=True, slots=True)
class Dealing:
    moves: Mapping[LaneReason, tuple[LaneMove, ...]] = field(default_factory=dict)
    """Lanes that get another owner now, by reason; a record each."""
    asked: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    """By region: lanes that it should give up."""


def deal(table: LaneTable, readers: Readers) -> Dealing:
    """Gives free lanes to the poorest, and asks the richest for what is still missing.

    Where a lane begins when its owner has not given it up:

        removed   after the last window of an accepted frame: nothing else of it will come
        silent    after the last window heard of: it may come back with what it has read
    """
    here = sorted(set(readers.members) & set(readers.here))
    if not here:
        return Dealing()
    free, new, counts, away = _free(table, readers, here)
    claimants = sorted({*here, *away, *readers.expected})
    share, rest = divmod(table.count, len(claimants))
    poorest = [(counts[region], region) for region in here]
    heapq.heapify(poorest)
    moves: dict[LaneReason, list[LaneMove]] = {}
    for why, lane, at in free:
        held, to = poorest[0]
        heapq.heapreplace(poorest, (held + 1, to))
        moves.setdefault(why, []).append(LaneMove(lane, to, at))
    # The share of a region that is still expected stays free: it would be asked for at once.
    most = {region: share + (rank < rest) for rank, region in enumerate(claimants)}
    for lane in new:
        while poorest and poorest[0][0] >= most[poorest[0][1]]:
            heapq.heappop(poorest)
        if not poorest:
            break
        held, to = poorest[0]
        heapq.heapreplace(poorest, (held + 1, to))
        moves.setdefault("dealt", []).append(LaneMove(lane, to, 0))
    moved = [move for group in moves.values() for move in group]
    for move in moved:
        counts[move.to] += 1
    asked = _asked(table, counts, {move.lane for move in moved})
    return Dealing({why: tuple(group) for why, group in moves.items()}, asked)


def parts(table: LaneTable, count: int) -> int:
    """Into how many parts each lane is to be cut for so many lanes; 1 where it cannot be."""
    fits = count > table.count and count % table.count == 0 and count <= table.order.windows
    return count // table.count if fits else 1


def _free(
    table: LaneTable, readers: Readers, here: Collection[str]
) -> tuple[list[tuple[LaneReason, int, int]], list[int], dict[str, int], set[str]]:
    """Lanes without a reader and where they go on; lanes nobody has begun; who has how many."""
    free: list[tuple[LaneReason, int, int]] = []
    counts, away = dict.fromkeys(here, 0), set[str]()
    new = [lane for lane in range(table.count) if lane not in table.owners]
    for lane, owner in sorted(table.owners.items()):
        given, heard = readers.released.get(lane), readers.heard.get(lane)
        if given and given.grant == owner.grant:
            free.append(("released", lane, max(given.position, owner.position)))
        elif owner.region not in readers.members:
            free.append(("removed", lane, owner.position))
        elif owner.region in readers.silent:
            known = heard.position if heard and heard.grant == owner.grant else 0
            free.append(("silent", lane, max(known, owner.position)))
        elif owner.region in counts:
            counts[owner.region] += 1
        else:
            away.add(owner.region)
    return free, new, counts, away


def _asked(
    table: LaneTable, counts: Mapping[str, int], moved: Collection[int]
) -> dict[str, tuple[int, ...]]:
    """Lanes that the richest should give up, so that nobody is poorer by more than one."""
    own: dict[str, list[int]] = {region: [] for region in counts}
    for lane, owner in sorted(table.owners.items()):
        if owner.region in own and lane not in moved:
            own[owner.region].append(lane)
    asked: dict[str, list[int]] = {}
    poorest = [(held, region) for region, held in counts.items()]
    richest = [(-held, region) for region, held in counts.items()]
    heapq.heapify(poorest)
    heapq.heapify(richest)
    while -richest[0][0] - poorest[0][0] > 1 and own[richest[0][1]]:
        (held, rich), (few, poor) = richest[0], poorest[0]
        asked.setdefault(rich, []).append(own[rich].pop())
        heapq.heapreplace(richest, (held + 1, rich))
        heapq.heapreplace(poorest, (few + 1, poor))
    return {region: tuple(sorted(lanes)) for region, lanes in asked.items()}
