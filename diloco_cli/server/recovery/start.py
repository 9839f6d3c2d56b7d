"""From a folder to a server that stands where the last one stood.

    nothing there     initial weights become version 0 of every fragment
    a journal there   replay it; load each fragment's newest stored version on record, and
                      make the versions after it again

A version that was stored but never journaled is computed again from the same payloads;
payloads that no record speaks of were never acknowledged and are removed.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from diloco_cli.core.fragments import gather
from diloco_cli.core.ledger import Ledger
from diloco_cli.server.recovery.fold import fold
from diloco_cli.server.recovery.verify import brought_back
from diloco_cli.server.rounds.coordinator import Coordinator
from diloco_cli.server.rounds.state import State
from diloco_cli.server.settings import ServerSettings
from diloco_cli.server.store.journal import Notice, to_stderr
from diloco_cli.server.store.on_disk import Store, StoredState, put_away, stores
from diloco_cli.server.versions.newest import PublishedVersions
from diloco_cli.server.versions.next_version import Version
from diloco_cli.system.failpoints import reach
from diloco_cli.wire.digest import vector_digest

Initial = Callable[[], Mapping[str, np.ndarray]]


def open_coordinator(
    recipe: ServerSettings,
    folder: Path,
    initial: Initial,
    *,
    clock: Callable[[], float] = time.monotonic,
    wall: Callable[[], float] = time.time,
    note: Callable[..., None] = lambda kind, **fields: None,
    notice: Notice = to_stderr,
) -> Coordinator:
    """Takes the server folder for this process and brings the run's state back."""
    kind = stores.build(recipe.spec.server.store)
    store, records = kind.open(
        folder, layout=recipe.layout.digest, spec=recipe.spec_digest, notice=notice
    )
    try:
        ledger, tally = fold(recipe, records, base=store.journal.base)
        if not records:
            _begin(recipe, store, initial)
        weights = PublishedVersions(recipe, store, _newest(recipe, store, ledger), folder / "cache")
        reach("start.replayed")
        _sweep(store, ledger)
        reach("start.swept")
        state = State(recipe, store, ledger, tally, weights, clock=clock, wall=wall, note=note)
    except BaseException:
        store.close()
        raise
    return Coordinator(state)


def _begin(recipe: ServerSettings, store: Store, initial: Initial) -> None:
    """Stores version 0; a start that died half-way is repeated."""
    params: Mapping[str, np.ndarray] | None = None
    for fragment in recipe.layout.fragments:
        if 0 in store.versions(fragment.number):
            continue
        params = initial() if params is None else params
        theta = gather(params, fragment)
        state = StoredState(theta, recipe.outer.start(fragment.size), theta)
        store.publish(fragment.number, 0, state, None)


def _newest(recipe: ServerSettings, store: Store, ledger: Ledger) -> list[Version]:
    """Brings back what the journal says is published, and checks that it is just that."""
    versions = []
    for fragment, slot in enumerate(ledger.slots):
        state = brought_back(recipe, store, fragment, slot)
        digest = slot.published or vector_digest(state.published)  # Version 0 is on no record.
        versions.append(Version(slot.version, state, digest, dict(slot.merged), slot.members))
    return versions


def _sweep(store: Store, ledger: Ledger) -> None:
    """Finishes the tidying that a crash interrupted; removes what no record speaks of."""
    for fragment, slot in enumerate(ledger.slots):
        # Older versions have theirs: a version is made only after the last one is tidied up.
        put_away(store, fragment, slot.version, slot.base, slot.made)
    wanted = {
        receipt.digest
        for slot in ledger.slots
        for found in (slot.waiting, slot.closing, *(made.receipts for made in slot.unstored))
        for receipt in found.values()
    }
    store.drop_payloads(store.payloads() - wanted)
