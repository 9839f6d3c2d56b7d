"""What does the server write into its journal?

Each kind of record is one class; `Record` is any of them. Every fold of the journal matches
them exhaustively, so the type checker names every place that a new kind must be added to.
`encode` and `decode` lead to the JSON objects on the disk and back; the journal itself
knows nothing of their meaning.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, get_args

from diloco_cli.core.rounds import Fate, Receipt

Entry = Mapping[str, Any]
"""A record as JSON."""


@dataclass(frozen=True, slots=True)
class JournalRecord:
    """What all kinds have in common."""

    kind: ClassVar[str]
    time: float | None = field(default=None, kw_only=True)
    """Seconds since 1970; None where there is no clock, as in a simulation."""


@dataclass(frozen=True, slots=True)
class RegionJoined(JournalRecord):
    """A worker got the region's lease under a new epoch."""

    kind: ClassVar[str] = "joined"
    region: str
    owner: str
    boot: int
    epoch: int


@dataclass(frozen=True, slots=True)
class FragmentCalled(JournalRecord):
    """Regions are asked for their work on a fragment."""

    kind: ClassVar[str] = "called"
    fragment: int
    version: int


@dataclass(frozen=True, slots=True)
class FrameDecided(JournalRecord):
    """A contribution got its answer: `pending`, `refused` or `returned`."""

    kind: ClassVar[str] = "decided"
    receipt: Receipt
    fate: Fate
    why: str = ""
    totals: Mapping[str, float] | None = None
    """The region's tokens by fate, as the frame's header has them."""
    values: int | None = None
    """Parameters that an accepted frame carries."""
    norm: float | None = None
    """Of an accepted frame."""
    sound: bool | None = None
    """Of a refused frame: its content is fit, but the region is in quarantine."""


@dataclass(frozen=True, slots=True)
class RoundClosed(JournalRecord):
    """A round has its members; they are merged next."""

    kind: ClassVar[str] = "closed"
    fragment: int
    version: int
    members: tuple[str, ...]
    drain: bool


@dataclass(frozen=True, slots=True)
class MemberDropped(JournalRecord):
    """A member was taken out of its closed round."""

    kind: ClassVar[str] = "dropped"
    fragment: int
    region: str
    fate: Fate
    why: str
    alone: bool = False
    """It alone was unfit, so it counts against the region."""


@dataclass(frozen=True, slots=True)
class VersionPublished(JournalRecord):
    """A round was merged into the next version."""

    kind: ClassVar[str] = "published"
    fragment: int
    version: int
    published: str
    """Digest of the published weights."""
    state: str = ""
    """Digest of everything the server keeps of the version."""
    members: tuple[str, ...] = ()
    stored: bool = True
    """All of it is on the disk; otherwise it is recomputed after a crash."""
    bytes: int = 0
    """Of the frame that leads to this version from the one before."""
    bytes_down: int = 0
    """Sent to regions so far."""
    seconds: float = 0.0
    """That the run has been served, all starts together."""


@dataclass(frozen=True, slots=True)
class VersionStored(JournalRecord):
    """The newest version is on the disk as a whole by now."""

    kind: ClassVar[str] = "stored"
    fragment: int
    version: int


@dataclass(frozen=True, slots=True)
class RunEnded(JournalRecord):
    """The budget is merged; what regions still hold is drained."""

    kind: ClassVar[str] = "end"
    why: str


@dataclass(frozen=True, slots=True)
class RunFinished(JournalRecord):
    """Nothing will be merged any more."""

    kind: ClassVar[str] = "finished"
    why: str


@dataclass(frozen=True, slots=True)
class WeightsEvaluated(JournalRecord):
    """A region measured the held-out loss of published versions."""

    kind: ClassVar[str] = "evaluated"
    versions: tuple[int, ...]
    loss: float
    region: str


@dataclass(frozen=True, slots=True)
class Snapshot(JournalRecord):
    """What all records before amount to, so that they can be left out."""

    kind: ClassVar[str] = "snapshot"
    ledger: Entry
    tally: Entry


Record = (
    RegionJoined
    | FragmentCalled
    | FrameDecided
    | RoundClosed
    | MemberDropped
    | VersionPublished
    | VersionStored
    | RunEnded
    | RunFinished
    | WeightsEvaluated
    | Snapshot
)

KINDS: dict[str, type[Record]] = {kind.kind: kind for kind in get_args(Record)}


def encode(record: Record) -> dict[str, Any]:
    """The record as JSON; fields that are None are left out."""
    entry: dict[str, Any] = {"kind": record.kind}
    for each in fields(record):
        value = getattr(record, each.name)
        if isinstance(value, Receipt):
            value = value.as_record()
        if value is not None:
            entry[each.name] = value
    return entry


def decode(entry: Entry) -> Record | None:
    """The record of a JSON object; None for a kind of a later version, which changes nothing."""
    kind = KINDS.get(entry["kind"])
    if kind is None:
        return None
    values = {each.name: entry[each.name] for each in fields(kind) if each.name in entry}
    for name, value in values.items():
        if isinstance(value, list):
            values[name] = tuple(value)
    if "receipt" in values:
        values["receipt"] = Receipt(**values["receipt"])
    return kind(**values)


def decode_all(entries: Iterable[Entry], *, base: int = 0) -> Iterator[tuple[int, Record]]:
    """The records of a journal with their numbers; `base` is the number before the first."""
    for number, entry in enumerate(entries, base + 1):
        if record := decode(entry):
            yield number, record
