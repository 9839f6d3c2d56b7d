"""From a folder to a server that stands where the last one stood.

    nothing there     initial weights become version 0 of every fragment
    a journal there   replay it; load each fragment's newest version on record

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
from diloco_cli.errors import StoreError
from diloco_cli.failpoints import reach
from diloco_cli.server.claim import FROM_COPY
from diloco_cli.server.coordinator import Coordinator
from diloco_cli.server.journal import Notice, to_stderr
from diloco_cli.server.merging import Version
from diloco_cli.server.recipe import Recipe
from diloco_cli.server.state import State
from diloco_cli.server.store import FragmentState, Store, stores
from diloco_cli.server.tally import Tally
from diloco_cli.server.weights import Weights
from diloco_cli.wire.frame import vector_digest

Initial = Callable[[], Mapping[str, np.ndarray]]


def open_coordinator(
    recipe: Recipe,
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
        ledger, tally = Ledger.empty(len(recipe.sizes)), Tally(recipe)
        for number, record in enumerate(records, store.journal.base + 1):
            ledger.apply(number, record)
            tally.apply(record)
        if not records:
            _begin(recipe, store, initial)
        weights = Weights(recipe, store, _newest(store, ledger), folder / "cache")
        reach("start.replayed")
        _sweep(store, ledger)
        reach("start.swept")
        state = State(recipe, store, ledger, tally, weights, clock=clock, wall=wall, note=note)
    except BaseException:
        store.close()
        raise
    return Coordinator(state)


def _begin(recipe: Recipe, store: Store, initial: Initial) -> None:
    """Stores version 0; a start that died half-way is repeated."""
    params: Mapping[str, np.ndarray] | None = None
    for fragment in recipe.layout.fragments:
        if 0 in store.versions(fragment.number):
            continue
        params = initial() if params is None else params
        theta = gather(params, fragment)
        state = FragmentState(theta, recipe.outer.start(fragment.size), theta)
        store.publish(fragment.number, 0, state, None)


def _newest(store: Store, ledger: Ledger) -> list[Version]:
    """Loads what the journal says is published, and checks that it is what was published."""
    versions = []
    for fragment, slot in enumerate(ledger.slots):
        state = store.load_state(fragment, slot.version)
        if slot.state and slot.state != state.digest:
            raise StoreError(
                f"Version {slot.version} of fragment {fragment} has the digest "
                f"{state.digest[:12]}, the journal says {slot.state[:12]}.",
                hint=FROM_COPY,
            )
        digest = slot.published or vector_digest(state.published)
        versions.append(Version(slot.version, state, digest, dict(slot.merged), slot.members))
    return versions


def _sweep(store: Store, ledger: Ledger) -> None:
    """Finishes the tidying that a crash interrupted; removes what no record speaks of."""
    for fragment, slot in enumerate(ledger.slots):
        # Older versions have theirs: a version is made only after the last one is tidied up.
        merged = [receipt.digest for receipt in slot.sources.values()]
        store.file_members(fragment, slot.version, merged)
        store.prune(fragment, slot.version)
    wanted = {
        receipt.digest
        for slot in ledger.slots
        for receipt in (*slot.waiting.values(), *slot.closing.values())
    }
    store.drop_payloads(store.payloads() - wanted)
