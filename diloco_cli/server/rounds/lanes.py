"""Who reads which text now, and what have they said about their lanes?

Owners, grants and accepted positions are in the ledger. What regions said since this server
started is only remembered: it says where the lanes of one that falls silent are read on, and
which lanes a live one has given up, which it says again until it is heard.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

from pydantic import TypeAdapter, ValidationError

from diloco_cli.core.lanes import (
    LANES,
    CorpusOrder,
    LanePosition,
    LaneTable,
    Positions,
    Readers,
    split,
)
from diloco_cli.core.ledger import Ledger
from diloco_cli.server.rounds.leases import Leases
from diloco_cli.spec.schema import RunSpec
from diloco_cli.wire.messages import LaneAssignment, LanePositions, TextCursor, TextOrder

Seconds = float
LEASES = 3
"""Silent for so many leases and `server.grant`, a region has its lanes read on by others."""

_positions = TypeAdapter[dict[int, tuple[int, int]]](LanePositions)


class LaneReports:
    def __init__(self, *, began: Seconds) -> None:
        self.began = began
        self.asked: Mapping[str, tuple[int, ...]] = {}
        """By region: lanes that it should give up."""
        self._heard: dict[str, dict[int, LanePosition]] = {}
        self._released: dict[str, dict[int, LanePosition]] = {}
        """Both by order and lane."""
        self._changed_at: dict[str, Seconds] = {}
        self._seen: object = None
        """Who was there at the last look; None when something else has changed since."""

    def may_change(self, region: str, spec: RunSpec, *, now: Seconds) -> bool:
        """Says whether a region may read another text already; each change is a record."""
        if now < self._changed_at.get(region, -math.inf) + spec.server.lease:
            return False
        self._changed_at[region] = now
        return True

    def stir(self) -> None:
        """Something happened that lanes may have to be dealt for."""
        self._seen = None

    def hear(self, ledger: Ledger, region: str, cursor: TextCursor, *, most: float) -> None:
        """Takes note how far a region has read, and what it has given up.

        It can have read `most` windows: if it says more it is not heard, since another region may
        have to read on from there.
        """
        if (table := ledger.orders.get(cursor.order.digest)) is None:
            return
        heard = self._heard.setdefault(cursor.order.digest, {})
        released = self._released.setdefault(cursor.order.digest, {})
        read, given = (
            _as_now(table, cursor.count, each) for each in (cursor.lanes, cursor.released)
        )
        if _beyond(table, region, read | given, most):
            return
        for lane, at in (read | given).items():
            if _owns(table, region, lane, at):
                heard[lane] = max(at, heard.get(lane, at))
        for lane, at in given.items():
            if _owns(table, region, lane, at) and released.get(lane) != at:
                released[lane] = at
                self.stir()

    def accepted(
        self, ledger: Ledger, region: str, cursor: Mapping[str, Any], *, most: float
    ) -> dict[int, LanePosition] | None:
        """How far the work of a frame has read, as far as that is news; None if it is not.

        A header says anything. What is no cursor of a text on record says nothing here, and
        nor does one that has read more than the `most` windows that its region can have read.
        """
        table = ledger.orders.get(str(cursor.get("order")))
        count = cursor.get("count")
        if table is None or not isinstance(count, int):
            return None
        try:
            read = _positions.validate_python(_numbered(cursor.get("lanes")))
            given = _positions.validate_python(_numbered(cursor.get("released")))
        except (ValidationError, ValueError, TypeError):
            return None
        positions = _as_now(table, count, {**given, **read})
        if _beyond(table, region, positions, most):
            return None
        return table.relevant(region, positions) or None

    def readers(
        self, ledger: Ledger, leases: Leases, spec: RunSpec, *, now: Seconds
    ) -> dict[str, Readers] | None:
        """Who reads which text; None if nothing about that has changed since the last call."""
        here, silent = leases.here(now=now), leases.silent(silence(spec), now=now)
        awaited = self._awaited(ledger, spec, now)
        if self._seen == (here, silent, awaited, id(spec)):
            return None
        self._seen = (here, silent, awaited, id(spec))
        return {
            order: self._readers_of(ledger, order, here, silent, awaited, spec)
            for order in ledger.orders
        }

    def _readers_of(
        self,
        ledger: Ledger,
        order: str,
        here: set[str],
        silent: set[str],
        awaited: set[str],
        spec: RunSpec,
    ) -> Readers:
        members = set(ledger.members)
        barred = {name for name, gone in ledger.retired.items() if gone.barred}
        reading = {name for name in members if ledger.regions[name].order == order}
        texts = {_text_of(spec, name) for name in reading}
        return Readers(
            ledger.regions.keys() - barred,
            here & reading,
            # Whoever has changed to another text still brings the work it has done on this one;
            # so does one that was forgotten, if it comes back.
            silent | (ledger.regions.keys() - reading),
            {name for name in awaited if _text_of(spec, name) in texts},
            self._heard.get(order, {}),
            self._released.get(order, {}),
            min((lanes_of(spec, name) for name in reading), default=0),
        )

    def _awaited(self, ledger: Ledger, spec: RunSpec, now: Seconds) -> set[str]:
        """Listed regions that have never joined, while it is early enough to wait for them."""
        if now >= self.began + spec.server.grant:
            return set()
        return {
            region.name
            for region in spec.regions
            if region.name not in ledger.regions and region.trainer is None
        }

    def wakes(self, leases: Leases, spec: RunSpec) -> Iterator[Seconds]:
        """Moments at which silence alone changes who reads what."""
        yield self.began + spec.server.grant
        yield from (lease.seen + silence(spec) for lease in leases.all.values())

    def assignment(self, ledger: Ledger, region: str) -> LaneAssignment | None:
        """What a region is told about its lanes."""
        member = ledger.regions.get(region)
        table = ledger.orders.get(member.order) if member else None
        if table is None:
            return None
        lanes = table.owned(region)
        asked = tuple(lane for lane in self.asked.get(region, ()) if lane in lanes)
        return LaneAssignment(
            order=table.order.digest, count=table.count, lanes=dict(lanes), asked=asked
        )


def silence(spec: RunSpec) -> Seconds:
    """Seconds after which the lanes of a silent region are read on by others."""
    return LEASES * spec.server.lease + spec.server.grant


def order_of(order: TextOrder) -> CorpusOrder:
    return CorpusOrder(**dict(order))


def _owns(table: LaneTable, region: str, lane: int, at: LanePosition) -> bool:
    owner = table.owners.get(lane)
    return owner is not None and (owner.region, owner.grant) == (region, at.grant)


def _beyond(table: LaneTable, region: str, positions: Positions, most: float) -> bool:
    return table.read(region, positions) > most


def _as_now(
    table: LaneTable, count: int, positions: Mapping[int, tuple[int, int]]
) -> dict[int, LanePosition]:
    """Positions in the lanes that there are now; whoever has not heard of them has fewer."""
    named: Positions = {lane: LanePosition(*at) for lane, at in positions.items() if lane < count}
    if count == table.count:
        return dict(named)
    if count < 1 or table.count % count:
        return {}
    return split(named, count=count, times=table.count // count, windows=table.order.windows)


def _numbered(positions: object) -> dict[int, Any]:
    if not isinstance(positions, Mapping):
        raise ValueError("not a mapping")
    return {int(lane): tuple(at) for lane, at in positions.items()}


def _text_of(spec: RunSpec, region: str) -> str:
    """Settings by which regions divide a text; one that is not listed reads the run's."""
    data, inner = spec.data_of(region), spec.inner_of(region)
    plain = {key: value for key, value in data.items() if key != "lanes"}
    return repr((sorted(plain.items()), inner.sequence))


def lanes_of(spec: RunSpec, region: str) -> int:
    return int(spec.data_of(region).get("lanes", LANES))
