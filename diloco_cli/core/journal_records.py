"""What does the server write into its journal?

Each kind of record is one class; `Record` is any of them. Every fold of the journal matches
them exhaustively, so the type checker names every place that a new kind must be added to.
`encode` and `decode` lead to the JSON objects on the disk and back; the journal itself
knows nothing of their meaning.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, ClassVar, get_args

from diloco_cli.core.lanes import (
    CorpusOrder,
    LaneMove,
    LaneReason,
    Positions,
    plain_positions,
    read_positions,
)
from diloco_cli.core.rounds import Fate, Receipt
from diloco_cli.core.unmerged_work import Work

Entry = Mapping[str, Any]
"""A record as JSON."""


@dataclass(frozen=True, slots=True)
class JournalRecord:
    """What all kinds have in common."""

    kind: ClassVar[str]
    time: float | None = field(default=None, kw_only=True)
    """Seconds since 1970; None where there is no clock, as in a simulation."""


@dataclass(frozen=True, slots=True)
class RunBegun(JournalRecord):
    """Version 0 is stored, of weights that the run did not make itself: its first record."""

    kind: ClassVar[str] = "begun"
    source: str
    """Where the weights are from, for people."""
    weights: str
    """Digest of the whole model's tensors."""
    momentum: str
    """`fresh` or `keep`."""
    states: tuple[str, ...]
    """Digest of everything the server keeps of version 0, by fragment."""


@dataclass(frozen=True, slots=True)
class RunRebuilt(JournalRecord):
    """The run goes on, after the loss of its server's disk, from what copies and regions held.

    The first record of a new run; its number is far above any that the lost journal had, so
    grants of lanes and numbers of news go on rising.
    """

    kind: ClassVar[str] = "rebuilt"
    was: tuple[str, ...]
    """Ids of the runs that it continues, oldest first: frames of them are void here."""
    states: tuple[str, ...]
    """Digest of everything the server keeps of the versions it begins with, by fragment."""
    sources: tuple[str, ...]
    """Where each of these versions was found, for people."""
    ledger: Entry
    """All that was found on record, in the form of a snapshot."""
    tally: Entry


@dataclass(frozen=True, slots=True)
class RegionJoined(JournalRecord):
    """A worker got the region's lease under a new epoch."""

    kind: ClassVar[str] = "joined"
    region: str
    owner: str
    boot: int
    epoch: int
    order: CorpusOrder | None = None
    """How it reads which text; None if that is as before, or not known."""
    key: str | None = None
    """Digest of the key that later joins under this name must show, where one is asked for."""
    at: float = 0.0
    """On the allowance clock."""


@dataclass(frozen=True, slots=True)
class RegionRetired(JournalRecord):
    """A region is no member any more: it left for good, or was silent for too long."""

    kind: ClassVar[str] = "retired"
    region: str
    why: str


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
    lanes: Positions | None = None
    """How far the work of an accepted frame has read, where that is further than was known."""
    at: float | None = None
    """Of an accepted frame: when, on the allowance clock."""
    counted: Work | None = None
    """Of an accepted frame: how much of the work it claims counts; all of it if not said."""
    credit: float | None = None
    """Of an accepted frame: steps that would have counted beside these."""


@dataclass(frozen=True, slots=True)
class RoundClosed(JournalRecord):
    """A round has its members; they are merged next."""

    kind: ClassVar[str] = "closed"
    fragment: int
    version: int
    members: tuple[str, ...]
    drain: bool
    terms: int = 0
    """Number of the terms by which the version is made, whatever the terms are by then."""
    live: int = 0
    """Regions that could have been members; 0: not known, and the step is a whole one."""


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
    terms: int = 0
    """By which it was made."""


@dataclass(frozen=True, slots=True)
class VersionStored(JournalRecord):
    """The newest version is on the disk as a whole by now."""

    kind: ClassVar[str] = "stored"
    fragment: int
    version: int


@dataclass(frozen=True, slots=True)
class RunEnded(JournalRecord):
    """All of the budget is spoken for; what regions still hold is drained."""

    kind: ClassVar[str] = "end"
    why: str


@dataclass(frozen=True, slots=True)
class RunFinished(JournalRecord):
    """Nothing will be merged any more."""

    kind: ClassVar[str] = "finished"
    why: str


@dataclass(frozen=True, slots=True)
class RunResumed(JournalRecord):
    """Less than the budget came out of the drain, so the run goes on."""

    kind: ClassVar[str] = "resumed"
    why: str
    trained: Mapping[str, float]
    """By region: tokens that it had trained, of the fragment of which it trained most."""
    at: float
    """On the allowance clock."""


@dataclass(frozen=True, slots=True)
class WeightsEvaluated(JournalRecord):
    """A region measured the held-out loss of published versions."""

    kind: ClassVar[str] = "evaluated"
    versions: tuple[int, ...]
    loss: float
    region: str
    ema: bool | None = None
    """It is that of the average of the published weights, as of these versions."""


@dataclass(frozen=True, slots=True)
class TermsAmended(JournalRecord):
    """Settings of the run changed: `number` is that of the terms from here on."""

    kind: ClassVar[str] = "amended"
    number: int
    id: str
    set: Mapping[str, Any] = field(default_factory=dict)
    """By dotted key; None takes a key back to its default."""
    add: tuple[Entry, ...] = ()
    remove: tuple[str, ...] = ()
    by: str = ""
    why: str = ""
    reopens: bool = False
    """The run had ended, and these terms leave tokens to train."""
    digest: str = ""
    """Of the settings that every region shares under these terms."""
    repace: tuple[str, ...] = ()
    """Regions whose pace on record is forgotten, and learnt anew."""
    at: float | None = None
    """On the allowance clock, where a pace is forgotten."""


@dataclass(frozen=True, slots=True)
class LanesDealt(JournalRecord):
    """Lanes of a text got other readers; the number of the record is the grant."""

    kind: ClassVar[str] = "lanes"
    order: str
    why: LaneReason
    moves: tuple[LaneMove, ...] = ()
    count: int | None = None
    """split: lanes of the order from here on."""


@dataclass(frozen=True, slots=True)
class RegionPaced(JournalRecord):
    """A region's pace was learnt."""

    kind: ClassVar[str] = "paced"
    region: str
    steps_per_second: float
    at: float
    """On the allowance clock."""
    credit: float | None = None
    """Steps that are left of any fragment's credit at most: it grew faster before."""


@dataclass(frozen=True, slots=True)
class Snapshot(JournalRecord):
    """What all records before amount to, so that they can be left out."""

    kind: ClassVar[str] = "snapshot"
    ledger: Entry
    tally: Entry


Record = (
    RunBegun
    | RunRebuilt
    | RegionJoined
    | RegionRetired
    | FragmentCalled
    | FrameDecided
    | RoundClosed
    | MemberDropped
    | VersionPublished
    | VersionStored
    | RunEnded
    | RunFinished
    | RunResumed
    | WeightsEvaluated
    | TermsAmended
    | LanesDealt
    | RegionPaced
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
        elif isinstance(value, CorpusOrder | Work):
            value = asdict(value)
        elif each.name == "moves":
            value = [move._asdict() for move in value]
        elif each.name == "lanes" and value is not None:
            value = plain_positions(value)
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
        values["receipt"] = Receipt.of(values["receipt"])
    if kind is RegionJoined and "order" in values:
        values["order"] = CorpusOrder(**values["order"])
    if "moves" in values:
        values["moves"] = tuple(LaneMove(**move) for move in values["moves"])
    if "lanes" in values:
        values["lanes"] = read_positions(values["lanes"])
    if "counted" in values:
        values["counted"] = Work(**values["counted"])
    return kind(**values)


def decode_all(entries: Iterable[Entry], *, base: int = 0) -> Iterator[tuple[int, Record]]:
    """The records of a journal with their numbers; `base` is the number before the first."""
    for number, entry in enumerate(entries, base + 1):
        if record := decode(entry):
            yield number, record
