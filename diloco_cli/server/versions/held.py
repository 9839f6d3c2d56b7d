"""Where are the vectors of the newest versions? In memory if they are few, else in files.

    stored whole    the file of the store
    not stored      a file that is only set aside: after a crash the version is recomputed

So the server needs memory for the fragment that it merges, not for the model.
"""

from __future__ import annotations

from dataclasses import replace

from diloco_cli.merge.optimizers import average_share
from diloco_cli.server.settings import ServerSettings
from diloco_cli.server.store.filed_state import FiledState
from diloco_cli.server.store.run_store import RunStore
from diloco_cli.server.versions.next_version import Version

HELD_BYTES = 64 << 20
"""States that together have no more stay in memory: that is a quarter of what the libraries take,
and nothing is written that a restart does not need."""


def holds_all(settings: ServerSettings) -> bool:
    """Whether the states of the whole model stay in memory."""
    vectors = 4 if average_share(settings.outer) else 3
    return 4 * vectors * settings.layout.size <= HELD_BYTES


def settle(
    settings: ServerSettings, store: RunStore, fragment: int, version: Version, *, stored: bool
) -> Version:
    """The version with its vectors where they belong; DiskFull if there is no room for them."""
    state = version.state.load()
    if not holds_all(settings):
        digest, number = state.digest, version.number
        if stored:
            return replace(version, state=FiledState(store, fragment, number, digest, stored=True))
        return replace(version, state=store.set_aside(fragment, number, state))
    if state.theta.flags.writeable:
        return version
    # Mapped: the file would have to stay readable for as long as this is the newest version.
    vectors = {name: vector.copy() for name, vector in state.vectors.items()}
    return replace(version, state=replace(state, **vectors))
