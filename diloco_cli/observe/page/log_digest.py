"""What the run log tells a report, read once: faults, outages, amendments, and how rounds went."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from diloco_cli.observe.events import Event

FAULTS = {
    "lapsed": "a region fell silent",
    "revived": "it came back",
    "trainer-died": "a trainer died",
    "server-restarted": "the server died and was started again",
    "worker-restarted": "a worker died and was started again",
    "worker-gone": "a worker was given up",
    "refused": "a contribution was refused",
    "quarantined": "a region was quarantined",
    "diverging": "a region threw its work away again and again",
    "retired": "a region was retired",
    "link-lost": "a region lost its link",
    "link-back": "a link came back",
    "amended": "the run was amended",
    "fault": "a fault was inflicted",
}
MOMENTS = ("trainer-died", "worker-restarted", "fault", "refused", "quarantined", "diverging")
"""Faults that have no end: a mark on the time axis."""
MOST_FAULTS, MOST_AMENDMENTS, MOST_SPANS, MOST_ROUNDS = 200, 64, 2000, 100_000


@dataclass(frozen=True)
class RoundTimes:
    """How long one round took, in seconds."""

    fragment: int
    version: int
    began: float
    """Wall time of its call."""
    gathered: float
    merged: float
    members: int


@dataclass
class LogDigest:
    """Everything that a report says of the run log."""

    began: float | None = None
    ended: float | None = None
    versions: set[str] = field(default_factory=set)
    """Of the program that wrote the log."""
    counts: Counter[str] = field(default_factory=Counter)
    faults: deque[Event] = field(default_factory=lambda: deque(maxlen=MOST_FAULTS))
    amendments: deque[Event] = field(default_factory=lambda: deque(maxlen=MOST_AMENDMENTS))
    away: dict[str, list[tuple[float, float | None]]] = field(default_factory=dict)
    """From when to when each region was silent."""
    moments: dict[str, list[tuple[float, str]]] = field(default_factory=dict)
    """Faults without an end, by region; those of the server under an empty name."""
    rounds: deque[RoundTimes] = field(default_factory=lambda: deque(maxlen=MOST_ROUNDS))
    members: Counter[str] = field(default_factory=Counter)
    """Rounds that each region is in."""


def digest(events: Iterable[Event]) -> LogDigest:
    """Folds the log, in the order in which it was written."""
    told = LogDigest()
    called: dict[Any, float] = {}
    closed: dict[Any, tuple[float, float]] = {}
    for event in events:
        fields, kind = event.fields, event.kind
        told.began = event.time if told.began is None else min(told.began, event.time)
        told.ended = event.time if told.ended is None else max(told.ended, event.time)
        fragment = fields.get("fragment")
        if kind == "called":
            called[fragment] = event.time
        elif kind == "closed" and fragment in called:
            closed[fragment] = (called.pop(fragment), event.time)
        elif kind == "published" and fragment in closed:
            began, gathered = closed.pop(fragment)
            members = fields.get("members") or ()
            told.members.update(members)
            told.rounds.append(
                RoundTimes(
                    int(fragment or 0),
                    int(fields.get("version", 0)),
                    began,
                    max(0.0, gathered - began),
                    max(0.0, event.time - gathered),
                    len(members),
                )
            )
        elif kind == "run-started" and fields.get("version"):
            told.versions.add(str(fields["version"]))
        elif kind in FAULTS:
            _fault(told, event)
    return told


def _fault(told: LogDigest, event: Event) -> None:
    told.counts[event.kind] += 1
    told.faults.append(event)
    region = str(event.fields.get("region") or "")
    spans = told.away.setdefault(region, []) if event.kind in ("lapsed", "revived") else []
    if event.kind == "lapsed" and len(spans) < MOST_SPANS:
        silent = float(event.fields.get("silent_seconds") or 0.0)
        spans.append((event.time - silent, None))
    elif event.kind == "revived" and spans and spans[-1][1] is None:
        spans[-1] = (spans[-1][0], event.time)
    elif event.kind == "amended":
        told.amendments.append(event)
    elif event.kind == "server-restarted":
        told.moments.setdefault("", []).append((event.time, event.kind))
    elif event.kind in MOMENTS and len(told.moments.setdefault(region, [])) < MOST_SPANS:
        told.moments[region].append((event.time, event.kind))
