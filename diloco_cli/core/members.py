"""Who is a member of the run, who speaks for it, and who may join?

A member is a name that has joined and is not retired. Rounds, quorum, grace and the end of the
run are about members only: a name in the spec that never joined counts nowhere.

    expected ──join──▶ member ──silent for `server.forget`, or left for good──▶ retired
                         ▲  └──────────removed by an amendment──▶ barred           │
                         └──────────join──────── (added again) ◀──┴────────────────┘

Names are for ever: epoch, largest clock and last merged frames of a name outlive its
retirement, so whoever comes back goes on as if it had been away.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

Admission = Literal["listed", "credentialed", "open"]
"""`server.admit`: names in the spec, names with a credential of the run, or any name."""

MOST_RETIRED = 1_000
"""Retired names whose every record is kept; of the older ones only epoch and largest clock."""

OTHERS = "(others)"
"""Where the merged tokens of names are summed of which little else is kept."""


@dataclass(slots=True)
class RegionOwner:
    """Who may speak for a region."""

    owner: str
    """Empty: the name is retired, and little is kept of it."""
    boot: int
    epoch: int
    order: str = ""
    """The order in which it reads its text; empty while that is not known."""
    key: str = ""
    """Digest of the key that a join must show, where anybody may join."""
    heard: float = 0.0
    """Seconds the run had been served when the region was last on record."""
    high: int = -1
    """Largest clock decided before the rest was forgotten; no frame up to it is ever accepted."""


@dataclass(frozen=True, slots=True)
class Retirement:
    """Why a name is no member any more."""

    why: str
    by: str = ""
    """Who removed it; empty if it left or was forgotten."""
    time: float | None = None
    """Seconds since 1970."""
    barred: bool = False
    """Removed by an amendment: it may not join until it is added again."""
    record: int = 0
    """Number of the record that ended the membership."""


@dataclass(frozen=True, slots=True)
class Admitted:
    """The join is granted; `new` says that it must be journaled first."""

    epoch: int
    new: bool


@dataclass(frozen=True, slots=True)
class TurnedAway:
    code: Literal["held", "older-copy", "unknown-region", "name-taken", "full", "retired"]
    why: str


def admit_worker(
    member: RegionOwner | None,
    owner: str,
    boot: int,
    *,
    lease_left: float,
    retired: bool = False,
) -> Admitted | TurnedAway:
    """Says whether a worker may speak for a region.

    A retried join gets the same epoch again, so a lost reply fences no worker. A second
    worker waits while the first one's lease lives, so two workers never fence each other
    in turn. A name that was retired joins under a new epoch, whoever speaks for it; one of which
    little is kept begins its books anew, so its folder must come under a new owner id.
    """
    if member is None:
        return Admitted(1, new=True)
    if not member.owner and boot > 1:
        return TurnedAway("older-copy", "nothing of this region's folder is on record any more")
    if member.owner != owner:
        # Of a run that was rebuilt no folder speaks for the region yet: nobody is waited for.
        if member.owner and lease_left > 0:
            return TurnedAway(
                "held", f"another worker holds this region for {lease_left:.0f} more seconds"
            )
        return Admitted(member.epoch + 1, new=True)
    if boot < member.boot:
        return TurnedAway(
            "older-copy",
            f"start {boot} of this region's folder, but start {member.boot} was seen before",
        )
    if boot == member.boot and not retired:
        return Admitted(member.epoch, new=False)
    return Admitted(member.epoch + 1, new=True)


@dataclass(frozen=True, slots=True)
class AdmissionRule:
    """Which names the run takes."""

    admit: Admission
    listed: Collection[str]
    most: int
    """Members that there may be, besides those that are listed."""


def admit_name(
    region: str,
    rule: AdmissionRule,
    *,
    members: Collection[str],
    known: RegionOwner | None,
    retired: Retirement | None,
    key: str,
) -> TurnedAway | None:
    """Says why a name may not join, or None if it may; whose name it is was settled before.

    `key` is the digest of what the worker shows. Where anybody may join, the first who comes
    under a name has it, and whoever comes later must show the same key.
    """
    if retired and retired.barred:
        return TurnedAway("retired", retired.why)
    if rule.admit == "open" and known and known.key and known.key != key:
        return TurnedAway("name-taken", "it belongs to the folder that joined first under it")
    if region in rule.listed:
        return None
    if rule.admit == "listed":
        return TurnedAway("unknown-region", f"the run has {', '.join(rule.listed)}")
    unlisted = set(members) - set(rule.listed)
    if region not in unlisted and len(unlisted) >= rule.most:
        return TurnedAway("full", f"{len(unlisted)} regions that no spec lists are members")
    return None
