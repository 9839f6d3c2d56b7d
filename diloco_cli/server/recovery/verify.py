"""Replay: is the outer state what the journal says? Recompute it and compare every bit.

    journal ──fold──▶ who was merged into which version
    oldest version whose successors' contributions are kept ──merge──▶ newest version

Versions and contributions are kept for a while only, and a compacted journal begins with
a snapshot, so a replay starts from a version that is certain: the initial weights, a
snapshot's version, or any version whose digest is on record. That digest is checked first;
then every later version is recomputed from its contributions and must have the digest that
was recorded when it was published. A folder is only read, never changed.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import assert_never

from diloco_cli.core.journal_records import (
    FragmentCalled,
    FrameDecided,
    LanesDealt,
    MemberDropped,
    Record,
    RegionJoined,
    RegionPaced,
    RegionRetired,
    RoundClosed,
    RunBegun,
    RunEnded,
    RunFinished,
    RunRebuilt,
    RunResumed,
    Snapshot,
    TermsAmended,
    VersionPublished,
    VersionStored,
    WeightsEvaluated,
)
from diloco_cli.core.ledger import FragmentState, Ledger
from diloco_cli.errors import SpecError, StoreDamaged
from diloco_cli.server.recovery.fold import fold
from diloco_cli.server.recovery.recompute import RecordedVersion, load, recompute
from diloco_cli.server.rounds.token_totals import RunTotals
from diloco_cli.server.settings import ServerSettings
from diloco_cli.server.store import stores
from diloco_cli.server.store.archive import Archive
from diloco_cli.server.store.journal_format import JournalContent
from diloco_cli.server.terms import Build, TermsHistory, build_plain


@dataclass(frozen=True)
class ReplayedFragment:
    """What a replay found out about one fragment."""

    fragment: int
    start: int
    """The version it began with, whose digest was checked."""
    version: int
    digest: str

    @property
    def made(self) -> int:
        """Versions that were recomputed."""
        return self.version - self.start


@dataclass(frozen=True)
class Replay:
    run: str
    base: int
    """The journal was compacted up to this record; 0 if it is whole."""
    record: int
    lines: tuple[ReplayedFragment, ...] = ()

    @property
    def digest(self) -> str:
        """One digest of the whole outer state: equal on two servers in the same state."""
        summary = hashlib.sha256()
        for line in self.lines:
            summary.update(f"{line.fragment} {line.version} {line.digest}\n".encode())
        return summary.hexdigest()


def replay(
    settings: ServerSettings, folder: Path, *, to: int | None = None, build: Build = build_plain
) -> Replay:
    """Recomputes the outer state as of record `to` (or the newest); StoreError if it differs.

    `settings` are those that the run began with; `build` makes the settings of later terms.
    """
    path = folder / "journal"
    blobs, content = stores.build(settings.spec.server.store).read(
        folder, layout=settings.layout.digest, spec=settings.spec_digest
    )
    last = _wanted(path, content, to)
    archive = Archive(blobs, content.run)
    terms = TermsHistory(settings, build)
    versions = _versions(terms, path, content, last)
    lines = tuple(_replayed(terms, archive, f, steps) for f, steps in enumerate(versions))
    return Replay(content.run, content.base, last, lines)


def _wanted(path: Path, content: JournalContent, to: int | None) -> int:
    first, last = content.base + bool(content.base), content.last.number
    if to is not None and not first <= to <= last:
        kept = f"; {content.base} records were compacted" if content.base else ""
        raise SpecError(
            f"{path} has the records {first} to {last}, not {to}{kept}.",
            hint=f"Give --to a number from {first} to {last}, or replay an older copy.",
        )
    return last if to is None else to


def _versions(
    terms: TermsHistory, path: Path, content: JournalContent, last: int
) -> list[list[RecordedVersion]]:
    """Folds the journal; gives every fragment's versions on record, oldest first."""
    steps = [[RecordedVersion(0, "")] for _ in terms.newest.sizes]

    def look(number: int, record: Record, ledger: Ledger, totals: RunTotals) -> None:
        match record:
            case RunBegun():
                steps[:] = [[RecordedVersion(0, state)] for state in record.states]
            case Snapshot() if number == content.base + 1:
                ledger.restore(record.ledger)
                steps[:] = [_of_snapshot(slot) for slot in ledger.slots]
            case RunRebuilt():
                slots = record.ledger["slots"]
                steps[:] = [
                    [RecordedVersion(slot["version"], state)]
                    for slot, state in zip(slots, record.states, strict=True)
                ]
            case Snapshot():
                _compare(path, number, record, ledger, totals)
            case VersionPublished():
                slot = ledger.slots[record.fragment]
                members = tuple(slot.closing.values())
                how = slot.drain, slot.terms, slot.live
                made = RecordedVersion(record.version, record.state, members, *how)
                steps[record.fragment].append(made)
            case RegionJoined() | RegionRetired() | RegionPaced() | FragmentCalled():
                pass
            case FrameDecided() | RoundClosed() | MemberDropped() | VersionStored():
                pass
            case WeightsEvaluated() | TermsAmended() | LanesDealt():
                pass
            case RunEnded() | RunFinished() | RunResumed():
                pass  # Versions and their members are in the ledger and the other records.
            case _:
                assert_never(record)

    fold(terms, content.records[: last - content.base], base=content.base, look=look)
    return steps


def _of_snapshot(slot: FragmentState) -> list[RecordedVersion]:
    """A snapshot names what the newest version was made of, and those up to the stored one."""
    before = slot.version - len(slot.made)
    digest = slot.first_state if before == slot.first else ""
    return [RecordedVersion(before, digest), *map(RecordedVersion.of, slot.made)]


def _compare(
    path: Path, number: int, snapshot: Snapshot, ledger: Ledger, totals: RunTotals
) -> None:
    """A snapshot must say what the records before it amount to."""
    for what, recorded, computed in (
        ("ledger", snapshot.ledger, ledger.snapshot()),
        ("tally", snapshot.tally, totals.snapshot()),
    ):
        keys = [key for key in computed if computed[key] != recorded.get(key)]
        if keys:
            raise StoreDamaged(
                f"{path}: record {number} is a snapshot that disagrees with the records before "
                f"it about {', '.join(keys)} of the {what}."
            )


def _replayed(
    terms: TermsHistory, archive: Archive, fragment: int, steps: list[RecordedVersion]
) -> ReplayedFragment:
    start = _start(archive, fragment, steps)
    first, newest = steps[start], steps[-1]
    state = load(archive, fragment, first)
    for step in steps[start + 1 :]:
        state = recompute(terms, archive, fragment, step, state)
    if newest.version in archive.versions(fragment):
        load(archive, fragment, newest)
    return ReplayedFragment(fragment, first.version, newest.version, state.digest)


def _start(archive: Archive, fragment: int, steps: list[RecordedVersion]) -> int:
    """Index of the oldest version from which everything later can be recomputed."""
    kept, start = set(archive.versions(fragment)), None
    for index in range(len(steps) - 1, -1, -1):
        step = steps[index]
        if step.version in kept:
            start = index
        members = archive.members(fragment, step.version)
        if not all(receipt.digest in members for receipt in step.receipts):
            break
    if start is None:
        raise SpecError(
            f"Version {steps[-1].version} of fragment {fragment} is no longer kept, nor anything "
            f"it can be recomputed from; the kept ones are {sorted(kept)}.",
            hint="Replay to a later record, or an older copy of the folder.",
        )
    return start
