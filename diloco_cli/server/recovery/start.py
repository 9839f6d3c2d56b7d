"""Restart: from a folder to a server in the state that the last one had.

    an empty folder   initial weights become version 0 of every fragment
    a journal         replay it; load each fragment's newest stored version on record, and
                      recompute the versions after it

A version that was stored but never journaled is computed again from the same payloads;
payloads that no record names were never acknowledged and are deleted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from diloco_cli.core.fragments import gather
from diloco_cli.core.ledger import FragmentState, Ledger
from diloco_cli.server.recovery.fold import fold
from diloco_cli.server.recovery.recompute import RecordedVersion, load, recompute
from diloco_cli.server.rounds.coordinator import Coordinator
from diloco_cli.server.rounds.state import State
from diloco_cli.server.settings import ServerSettings
from diloco_cli.server.store import Notice
from diloco_cli.server.store.archive import Archive
from diloco_cli.server.store.journal import to_log
from diloco_cli.server.store.run_store import RunStore, open_store
from diloco_cli.server.store.state_format import StoredState
from diloco_cli.server.versions.newest import PublishedVersions
from diloco_cli.server.versions.next_version import Version
from diloco_cli.system.failpoints import reach
from diloco_cli.wire.digest import vector_digest

Initial = Callable[[], Mapping[str, np.ndarray]]


def open_coordinator(
    settings: ServerSettings,
    folder: Path,
    initial: Initial,
    *,
    clock: Callable[[], float] = time.monotonic,
    wall: Callable[[], float] = time.time,
    note: Callable[..., None] = lambda kind, **fields: None,
    notice: Notice = to_log,
) -> Coordinator:
    """Takes the server folder for this process and restores the run's state."""
    store, records = open_store(
        settings.spec.server.store,
        folder,
        layout=settings.layout.digest,
        spec=settings.spec_digest,
        notice=notice,
    )
    try:
        ledger, tally = fold(settings, records, base=store.journal.base)
        if not records:
            _begin(settings, store, initial)
        weights = PublishedVersions(settings, store, _newest(settings, store, ledger))
        reach("start.replayed")
        _sweep(store, ledger)
        reach("start.swept")
        state = State(settings, store, ledger, tally, weights, clock=clock, wall=wall, note=note)
    except BaseException:
        store.close()
        raise
    return Coordinator(state)


def _begin(settings: ServerSettings, store: RunStore, initial: Initial) -> None:
    """Stores version 0; a start that died half-way is repeated."""
    params: Mapping[str, np.ndarray] | None = None
    for fragment in settings.layout.fragments:
        if 0 in store.versions(fragment.number):
            continue
        params = initial() if params is None else params
        theta = gather(params, fragment)
        state = StoredState(theta, settings.outer.start(fragment.size), theta)
        store.publish(fragment.number, 0, state, None)


def _newest(settings: ServerSettings, store: RunStore, ledger: Ledger) -> list[Version]:
    """Loads or recomputes what the journal says is published."""
    versions = []
    for fragment, slot in enumerate(ledger.slots):
        state = _restored(settings, store, fragment, slot)
        digest = slot.published or vector_digest(state.published)  # Version 0 has no record.
        versions.append(Version(slot.version, state, digest, dict(slot.merged), slot.members))
    return versions


def _restored(
    settings: ServerSettings, archive: Archive, fragment: int, slot: FragmentState
) -> StoredState:
    """The newest version on record: loaded, or recomputed from the last one that was stored."""
    digest = slot.made[-1].state if slot.made and not slot.unstored else ""
    state = load(archive, fragment, RecordedVersion(slot.base, digest))
    for made in slot.unstored:
        state = recompute(settings, archive, fragment, RecordedVersion.of(made), state)
        reach("start.made")
    return state


def _sweep(store: RunStore, ledger: Ledger) -> None:
    """Finishes the cleaning up that a crash interrupted; deletes payloads without a record."""
    for fragment, slot in enumerate(ledger.slots):
        # Those of older versions are moved: a round is closed only after the last clean-up.
        store.put_away(fragment, slot.version, slot.base, slot.made)
    needed = {
        receipt.digest
        for slot in ledger.slots
        for receipts in (slot.waiting, slot.closing, *(made.receipts for made in slot.unstored))
        for receipt in receipts.values()
    }
    store.drop_payloads(store.payloads() - needed)
