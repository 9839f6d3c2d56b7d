"""May this contribution enter, and may this round close?

A round gathers one fragment's contributions until enough regions have arrived
(the quorum) and the slower ones have had their chance (the grace window).

    idle ──called──▶ gathering ──quorum met──▶ in grace ──over, or everyone in──▶ closing

Frames may wait in an idle round, but only a called round closes. This module decides;
it never waits. It holds no arrays, reads no clock and does no I/O, so the live server
and a simulated one run exactly these lines.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from diloco_cli.core.unmerged_work import Work

Seconds = float
Fate = Literal["pending", "merged", "returned", "refused", "foreign"]


@dataclass(frozen=True, slots=True)
class Receipt:
    """A contribution without its arrays."""

    region: str
    fragment: int
    base: int
    clock: int
    digest: str
    prev: str
    tokens: float
    steps: float
    bytes: int = 0
    counted: Work | None = None
    """What of its work counts, once that is decided; all of it where nobody judges."""

    @property
    def id(self) -> str:
        return f"{self.base}-{self.clock}"

    @property
    def worth(self) -> Work:
        """The work that it counts for: in its round, and against the budget."""
        return self.counted if self.counted is not None else Work(self.tokens, self.steps)

    def as_record(self) -> dict[str, Any]:
        """As the record of its decision has it, which says beside it what counts."""
        return {name: getattr(self, name) for name in self.__slots__ if name != "counted"}

    @classmethod
    def of(cls, entry: Mapping[str, Any]) -> Receipt:
        """A receipt as a journal has it."""
        counted = entry.get("counted")
        return cls(**{**entry, "counted": Work(**counted) if counted else None})


@dataclass(frozen=True, slots=True)
class Decision:
    """The newest answer given to a region about a fragment; a retry gets it again."""

    clock: int
    digest: str
    fate: Fate
    why: str = ""


@dataclass(frozen=True, slots=True)
class Accept:
    why: str = "waiting for its round"


@dataclass(frozen=True, slots=True)
class Recorded:
    """The frame was decided before; here is the same answer."""

    decision: Decision


@dataclass(frozen=True, slots=True)
class Fenced:
    why: str


@dataclass(frozen=True, slots=True)
class Returned:
    """Keep the work and send it again later."""

    why: str


@dataclass(frozen=True, slots=True)
class Refused:
    """The content is unfit: drop the work."""

    why: str


@dataclass(frozen=True, slots=True)
class Foreign:
    """Somebody else has contributed for this region: drop the work. Not journaled."""

    why: str


@dataclass(frozen=True, slots=True)
class Ahead:
    """The worker has seen versions this server never published."""

    why: str


Answer = Accept | Recorded | Fenced | Returned | Refused | Foreign | Ahead


@dataclass(frozen=True, slots=True)
class RegionRecord:
    """What the server knows when a frame arrives."""

    epoch: int
    version: int
    merged: str
    known: Decision | None
    finished: bool = False
    retired: str = ""
    """Why the region is no member any more; empty while it is one."""
    high: int = -1
    """Largest clock decided before the region's decisions were forgotten."""


def admit(
    receipt: Receipt,
    record: RegionRecord,
    *,
    epoch: int,
    alpha: float,
    staleness: int,
    unfit: str | None = None,
) -> Answer:
    """Answers a contribution. The order of the checks is part of the protocol."""
    if record.retired:
        return Fenced(f"{receipt.region} is no member any more: {record.retired}")
    if epoch != record.epoch:
        return Fenced(f"epoch {epoch} of {receipt.region} is over, {record.epoch} is current")
    known = record.known
    # A retry gets its answer before anything else may judge it, even after the end.
    if known and known.digest == receipt.digest:
        return Recorded(known)
    if receipt.base > record.version:
        return Ahead(f"base version {receipt.base}, but {record.version} is the newest published")
    decided = max(known.clock if known else -1, record.high)
    if receipt.clock <= decided:
        return Foreign(f"clock {receipt.clock}, but {decided} was decided before")
    # Not sooner: this answer is put on record, and a late copy must not take a newer frame's place.
    if record.finished:
        return Returned("the run is finished")
    if known and known.fate == "pending":
        return Foreign(f"frame {known.clock} of this region is still waiting to be merged")
    if receipt.prev != record.merged:
        return Foreign(
            f"it follows frame {_short(receipt.prev)}, but {_short(record.merged)} "
            "was merged last for this region"
        )
    age = record.version - receipt.base
    if alpha < 1 and age > staleness:
        return Returned(f"{age} versions behind, {staleness} allowed")
    return Refused(unfit) if unfit else Accept()


@dataclass(frozen=True, slots=True)
class Round:
    """One fragment's gathering on its way to the next version, as far as time matters."""

    members: tuple[str, ...] = ()
    called_at: Seconds | None = None
    floor: Seconds = 0.0
    """Before this moment fresh answers cannot be expected, so quorum alone does not count."""
    met_at: Seconds | None = None
    grace: Seconds | None = 0.0
    """None while nobody knows how long anything takes."""
    asked_at: Seconds | None = None
    """When the round before was called: who arrives before the next call answers that one, late."""


def called(
    round: Round, *, need: int, usual: Seconds, grace: Seconds | None, now: Seconds
) -> Round:
    """Opens the round; frames that came early are members already."""
    opened = replace(round, called_at=now, floor=now + usual, met_at=None, grace=grace)
    return replace(opened, met_at=now) if len(opened.members) >= need else opened


def joined(round: Round, region: str, *, need: int, now: Seconds) -> Round:
    grown = replace(round, members=(*round.members, region))
    # The window starts once, when the quorum is met: late arrivals never extend it.
    met = grown.called_at is not None and len(round.members) < need <= len(grown.members)
    return replace(grown, met_at=now) if met else grown


@dataclass(frozen=True, slots=True)
class Wait:
    why: str
    until: Seconds | None = None
    """None means that only a new event can change the answer."""


@dataclass(frozen=True, slots=True)
class Close:
    why: str
    members: tuple[str, ...]
    live: int = 0
    """Regions that could have been members; a step is in proportion to those who are."""


def decide(
    round: Round,
    *,
    live: Collection[str],
    need: int,
    drained: Collection[str] = (),
    ready: Collection[str] = (),
    now: Seconds,
) -> Wait | Close:
    """Says whether the round closes now, and if not, what it is waiting for.

    `ready` are regions that have enough work again for another round.
    """
    if round.called_at is None:
        return Wait("not called yet")
    if len(round.members) < need:
        return Wait(f"{len(round.members)} of {need} contributions needed")

    # Sorted, so that merging adds floats in one order whatever the network did.
    members = tuple(sorted(round.members))
    owing = sorted(set(live) - set(members) - set(drained))
    count = len(members) + len(owing)
    if not owing:
        return Close("every live region has arrived", members, count)

    # The end lowers `need` under an open round: its members then count from the call on.
    # Counting from `now` would move the deadline away at every look.
    if round.grace is None:
        # No time is known by which to wait; a member that could be called again has waited.
        if not set(ready).isdisjoint(members):
            return Close(f"a member is ready again, without {', '.join(owing)}", members, count)
        return Wait(f"quorum met, giving {', '.join(owing)} time to arrive")
    met_at = round.met_at if round.met_at is not None else round.called_at
    deadline = max(met_at, round.floor) + round.grace
    if now >= deadline:
        return Close(f"grace window over without {', '.join(owing)}", members, count)
    return Wait(f"quorum met, giving {', '.join(owing)} time to arrive", until=deadline)


def _short(digest: str) -> str:
    return digest[:12] if digest else "none"
