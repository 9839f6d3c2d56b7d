"""Rebuild: a new run that goes on from what is left of one whose server's disk is lost.

    copy of a server's folder ──read_copy──▶ what it has on record, and its newest versions
    what was found ──write_rebuilt──▶ a server's folder that begins with the record `rebuilt`

What to go on from is decided in core/rebuild.py; who holds what, run/rebuild/ finds out.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from diloco_cli.core.journal_records import RunRebuilt, encode
from diloco_cli.core.ledger import Ledger
from diloco_cli.server.recovery.fold import fold
from diloco_cli.server.recovery.start import restored
from diloco_cli.server.rounds.token_totals import RunTotals
from diloco_cli.server.settings import ServerSettings
from diloco_cli.server.store import stores
from diloco_cli.server.store.archive import Archive
from diloco_cli.server.store.run_store import open_store
from diloco_cli.server.store.state_format import StoredState
from diloco_cli.server.terms import Build, TermsHistory
from diloco_cli.wire.digest import vector_digest


@dataclass(frozen=True)
class CopiedRun:
    """A copy of a server's folder, as far as a run can go on from it."""

    run: str
    last: int
    """Number of its newest record."""
    ledger: Ledger = field(repr=False)
    totals: RunTotals = field(repr=False)
    state: Callable[[int], StoredState] = field(repr=False)
    """Gives a fragment's newest version; StoreDamaged if it is not the one on record."""

    def published(self, fragment: int) -> str:
        """Digest of a fragment's newest published weights."""
        # Version 0 has no record.
        return self.ledger.slots[fragment].published or vector_digest(
            self.state(fragment).published
        )


def read_copy(settings: ServerSettings, folder: Path, build: Build) -> CopiedRun:
    """Reads a copy of a server's folder; changes nothing."""
    blobs, content = stores.build(settings.spec.server.store).read(
        folder, layout=settings.layout.digest, spec=settings.spec_digest
    )
    archive, history = Archive(blobs, content.run), TermsHistory(settings, build)
    ledger, totals = fold(history, content.records, base=content.base)
    slots = Ledger.of(ledger.snapshot()).slots  # The ledger will become that of the new run.
    return CopiedRun(
        content.run,
        content.last.number,
        ledger,
        totals,
        lambda fragment: restored(history, archive, fragment, slots[fragment]),
    )


def write_rebuilt(
    settings: ServerSettings,
    folder: Path,
    ledger: Ledger,
    totals: RunTotals,
    state: Callable[[int], StoredState],
    *,
    was: tuple[str, ...],
    sources: tuple[str, ...],
    base: int,
) -> str:
    """Makes the server's folder of a new run; gives its id. One interrupted must be thrown away."""
    store, _ = open_store(
        settings.spec.server.store,
        folder,
        layout=settings.layout.digest,
        spec=settings.spec_digest,
        base=base,
    )
    try:
        states: list[str] = []
        for fragment, slot in enumerate(ledger.slots):
            states.append(store.publish(fragment, slot.version, state(fragment), None))
        tally = totals.rebuilt([slot.applied for slot in ledger.slots])
        record = RunRebuilt(
            was,
            tuple(states),
            sources,
            ledger.snapshot(),
            tally,
            time=round(time.time(), 3),
        )
        store.journal.append(encode(record))
        store.journal.sync()
    finally:
        store.close()
    return store.run
