"""Restart: from a folder to a server in the state that the last one had.

    an empty folder   initial weights become version 0 of every fragment; where they are not
                      made from the seed, the journal's first record has their digests
    a journal         replay it; load each fragment's newest stored version on record, and
                      recompute the versions after it

A version that was stored but never journaled is computed again from the same payloads;
payloads that no record names were never acknowledged and are deleted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from diloco_cli.core.fragments import gather
from diloco_cli.core.journal_records import RunBegun, encode
from diloco_cli.core.ledger import FragmentState, Ledger
from diloco_cli.server.recovery.fold import fold
from diloco_cli.server.recovery.recompute import RecordedVersion, load, recompute
from diloco_cli.server.rounds.coordinator import Coordinator
from diloco_cli.server.rounds.state import State
from diloco_cli.server.settings import ServerSettings
from diloco_cli.server.store.archive import Archive
from diloco_cli.server.store.run_store import RunStore, open_store
from diloco_cli.server.store.state_format import StoredState
from diloco_cli.server.terms import Build, TermsHistory, build_plain
from diloco_cli.server.versions.held import settle
from diloco_cli.server.versions.newest import PublishedVersions
from diloco_cli.server.versions.next_version import Version
from diloco_cli.system.failpoints import reach
from diloco_cli.wire.digest import tensors_digest, vector_digest


@dataclass(frozen=True)
class FirstWeights:
    """Version 0 of a run that begins with weights from elsewhere."""

    params: Mapping[str, np.ndarray]
    source: str
    """Where they are from, for people."""
    momentum: Sequence[np.ndarray] | None = None
    """Of the outer optimiser, by fragment; None begins it anew."""


Initial = Callable[[], Mapping[str, np.ndarray] | FirstWeights]


def open_coordinator(
    settings: ServerSettings,
    folder: Path,
    initial: Initial,
    *,
    clock: Callable[[], float] = time.monotonic,
    wall: Callable[[], float] = time.time,
    note: Callable[..., None] = lambda kind, **fields: None,
    build: Build = build_plain,
) -> Coordinator:
    """Takes the server folder for this process and restores the run's state.

    `settings` are those that the run began with; `build` makes the settings of later terms.
    """
    history = TermsHistory(settings, build)
    store, records = open_store(
        settings.spec.server.store,
        folder,
        layout=settings.layout.digest,
        spec=settings.spec_digest,
    )
    try:
        ledger, tally = fold(history, records, base=store.journal.base)
        if not records and settings.spec.start:
            begun = replace(_begin_from(settings, store, initial), time=round(wall(), 3))
            ledger.apply(store.journal.append(encode(begun)), begun)
            store.journal.sync()
        elif not records:
            _begin(settings, store, initial)
        weights = PublishedVersions(
            settings,
            store,
            _newest(settings, history, store, ledger),
            lambda fragment: restored(history, store, fragment, ledger.slots[fragment]),
        )
        reach("start.replayed")
        _sweep(store, ledger)
        reach("start.swept")
        state = State(history, store, ledger, tally, weights, clock=clock, wall=wall, note=note)
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
        params = _made(initial) if params is None else params
        theta = gather(params, fragment)
        state = StoredState(theta, settings.outer.start(fragment.size), theta)
        store.publish(fragment.number, 0, state, None)


def _made(initial: Initial) -> Mapping[str, np.ndarray]:
    params = initial()
    assert not isinstance(params, FirstWeights)
    return params


def _begin_from(settings: ServerSettings, store: RunStore, initial: Initial) -> RunBegun:
    """Stores weights from elsewhere as version 0; the record that the run has them comes after.

    A start that died before it is repeated with every fragment: the weights may be others by
    then, and a model is never put together from two.
    """
    first = initial()
    assert isinstance(first, FirstWeights)
    states: list[str] = []
    for fragment in settings.layout.fragments:
        theta, momentum = gather(first.params, fragment), settings.outer.start(fragment.size)
        if first.momentum is not None:
            momentum = first.momentum[fragment.number]
        state = StoredState(theta, momentum, theta)
        states.append(store.publish(fragment.number, 0, state, None))
    kept = "fresh" if first.momentum is None else "keep"
    return RunBegun(first.source, tensors_digest(first.params), kept, tuple(states))


def _newest(
    settings: ServerSettings, history: TermsHistory, store: RunStore, ledger: Ledger
) -> list[Version]:
    """Loads or recomputes what the journal says is published, one fragment after the other."""
    versions = []
    for fragment, slot in enumerate(ledger.slots):
        state = restored(history, store, fragment, slot)
        digest = slot.published or vector_digest(state.published)  # Version 0 has no record.
        version = Version(slot.version, state, digest, dict(slot.merged), slot.members)
        versions.append(settle(settings, store, fragment, version, stored=not slot.unstored))
    return versions


def restored(
    history: TermsHistory, archive: Archive, fragment: int, slot: FragmentState
) -> StoredState:
    """The newest version on record: loaded, or recomputed from the last one that was stored."""
    digest = slot.made[-1].state if slot.made and not slot.unstored else ""
    if slot.base == slot.first:
        digest = slot.first_state
    state = load(archive, fragment, RecordedVersion(slot.base, digest))
    for made in slot.unstored:
        state = recompute(history, archive, fragment, RecordedVersion.of(made), state)
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
