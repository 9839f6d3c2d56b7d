"""Is the outer state what the journal says? Make it again and compare every bit.

    journal ──fold──▶ who was merged into which version
    oldest version whose successors' contributions are kept ──merge again──▶ newest version

Versions and contributions are kept for a while only, and a compacted journal begins with
a snapshot, so a replay starts where something is known for sure: the initial weights, a
snapshot's version, or any version whose digest is on record. That digest is checked first;
then every later version is made from its contributions and must have the digest that was
recorded when it was published. A folder is only read, never changed.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from diloco_cli.core.journal_records import Record, Snapshot, VersionPublished
from diloco_cli.core.ledger import FragmentState, Ledger, MadeVersion
from diloco_cli.core.rounds import Receipt
from diloco_cli.errors import SpecError, StoreError
from diloco_cli.server.recovery.fold import fold
from diloco_cli.server.rounds.token_totals import RunTotals
from diloco_cli.server.settings import ServerSettings
from diloco_cli.server.store.archive import Archive, StoredState, mapped
from diloco_cli.server.store.journal import read_journal
from diloco_cli.server.store.journal_format import JournalContent
from diloco_cli.server.store.on_disk import Store
from diloco_cli.server.store.run_identity import FROM_COPY
from diloco_cli.server.versions.next_version import Spoiled, Version, next_version
from diloco_cli.system.failpoints import reach


@dataclass(frozen=True)
class RecordedVersion:
    """One version on record and what it was made of."""

    version: int
    state: str
    """Its digest; empty if no record names it, but then that of its successor proves it."""
    receipts: tuple[Receipt, ...] = ()
    drain: bool = False


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
        """Versions that were made again."""
        return self.version - self.start


@dataclass(frozen=True)
class Replay:
    run: str
    base: int
    """The journal was compacted up to this record; 0 if it is whole."""
    record: int
    lines: tuple[ReplayedFragment, ...] = field(default=())

    @property
    def digest(self) -> str:
        """One digest of the whole outer state; two servers stand at the same place if it is."""
        summary = hashlib.sha256()
        for line in self.lines:
            summary.update(f"{line.fragment} {line.version} {line.digest}\n".encode())
        return summary.hexdigest()


def replay(recipe: ServerSettings, folder: Path, *, to: int | None = None) -> Replay:
    """Makes the outer state as of record `to` (or the newest) again; StoreError if it differs."""
    path = folder / "journal"
    content = read_journal(path)
    last = _wanted(path, content, to)
    archive = Archive(folder, content.run)
    history = _history(recipe, path, content, last)
    lines = tuple(_replayed(recipe, archive, f, steps) for f, steps in enumerate(history))
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


def _history(
    recipe: ServerSettings, path: Path, content: JournalContent, last: int
) -> list[list[RecordedVersion]]:
    """Folds the journal; gives every fragment's versions on record, oldest first."""
    steps = [[RecordedVersion(0, "")] for _ in recipe.sizes]

    def look(number: int, record: Record, ledger: Ledger, totals: RunTotals) -> None:
        match record:
            case Snapshot() if number == content.base + 1:
                ledger.restore(record.ledger)
                steps[:] = [_of_snapshot(slot) for slot in ledger.slots]
            case Snapshot():
                _compare(path, number, record, ledger, totals)
            case VersionPublished():
                slot = ledger.slots[record.fragment]
                members = tuple(slot.closing.values())
                made = RecordedVersion(record.version, record.state, members, slot.drain)
                steps[record.fragment].append(made)
            case _:
                pass  # Only these speak of versions.

    fold(recipe, content.records[: last - content.base], base=content.base, look=look)
    return steps


def _of_snapshot(slot: FragmentState) -> list[RecordedVersion]:
    """A snapshot names what the newest version was made of, and those up to the stored one."""
    return [RecordedVersion(slot.version - len(slot.made), ""), *map(_step, slot.made)]


def _step(made: MadeVersion) -> RecordedVersion:
    return RecordedVersion(made.version, made.state, tuple(made.receipts.values()), made.drain)


def brought_back(
    recipe: ServerSettings, store: Store, fragment: int, slot: FragmentState
) -> StoredState:
    """The newest version on record: loaded, or made again from the last one that was stored."""
    known = slot.made[-1].state if slot.made and not slot.unstored else ""
    state = store.load_state(fragment, slot.base)
    _check(fragment, RecordedVersion(slot.base, known), state, "stored")
    for made in slot.unstored:
        state = _again(recipe, store, fragment, _step(made), state)
        _check(fragment, _step(made), state, "made again")
        reach("start.made")
    return state


def _compare(
    path: Path, number: int, snapshot: Snapshot, ledger: Ledger, totals: RunTotals
) -> None:
    """A snapshot must say what the records before it amount to."""
    for what, recorded, found in (
        ("ledger", snapshot.ledger, ledger.snapshot()),
        ("tally", snapshot.tally, totals.snapshot()),
    ):
        parts = [key for key in found if found[key] != recorded.get(key)]
        if parts:
            raise StoreError(
                f"{path}: record {number} is a snapshot that disagrees with the records before "
                f"it about {', '.join(parts)} of the {what}.",
                hint=FROM_COPY,
            )


def _replayed(
    recipe: ServerSettings, archive: Archive, fragment: int, steps: list[RecordedVersion]
) -> ReplayedFragment:
    start = _start(archive, fragment, steps)
    first, newest = steps[start], steps[-1]
    state = archive.load_state(fragment, first.version)
    _check(fragment, first, state, "stored")
    for step in steps[start + 1 :]:
        state = _again(recipe, archive, fragment, step, state)
        _check(fragment, step, state, "made again")
    if newest.version in archive.versions(fragment):
        _check(fragment, newest, archive.load_state(fragment, newest.version), "stored")
    return ReplayedFragment(fragment, first.version, newest.version, state.digest)


def _start(archive: Archive, fragment: int, steps: list[RecordedVersion]) -> int:
    """Index of the oldest version from which everything later can be made."""
    kept, found = set(archive.versions(fragment)), None
    for index in range(len(steps) - 1, -1, -1):
        if steps[index].version in kept:
            found = index
        if not all(path.exists() for path in _members(archive, fragment, steps[index])):
            break
    if found is None:
        wanted = steps[-1].version
        raise SpecError(
            f"Version {wanted} of fragment {fragment} is no longer kept, nor anything it can be "
            f"made of; the kept ones are {sorted(kept)}.",
            hint="Replay to a later record, or an older copy of the folder.",
        )
    return found


def _members(archive: Archive, fragment: int, step: RecordedVersion) -> Iterator[Path]:
    filed = archive.members(fragment, step.version)
    for receipt in step.receipts:
        # A server that died right after publishing has not filed them yet.
        yield filed.get(receipt.digest) or archive.payload_path(receipt.digest)


class _Members:
    """As much of a store as merging needs."""

    def __init__(self, store: Archive | Store, fragment: int, version: int) -> None:
        self.run, self._store = store.run, store
        self._filed = store.members(fragment, version)

    def payload(self, digest: str) -> memoryview:
        filed = self._filed.get(digest)
        return mapped(filed) if filed else self._store.payload(digest)


def _again(
    recipe: ServerSettings,
    store: Archive | Store,
    fragment: int,
    step: RecordedVersion,
    state: StoredState,
) -> StoredState:
    old = Version(step.version - 1, state, "", {}, ())
    about = recipe.layout.fragments[fragment]
    members = cast(Any, _Members(store, fragment, step.version))
    made = next_version(recipe, members, old, about, step.receipts, drain=step.drain)
    if isinstance(made, Spoiled):
        raise StoreError(
            f"Version {step.version} of fragment {fragment} cannot be made again: "
            f"{', '.join(made.regions)}: {made.why}.",
            hint=FROM_COPY,
        )
    return made[0].state


def _check(fragment: int, step: RecordedVersion, state: StoredState, how: str) -> None:
    if step.state and (found := state.digest) != step.state:
        raise StoreError(
            f"Version {step.version} of fragment {fragment}, {how}, has the digest "
            f"{found[:12]}; the journal says {step.state[:12]}.",
            hint=f"{FROM_COPY} If only its numpy or numba is another than the one that made it, "
            "start it with those and stop it once: that stores the versions as they are.",
        )
