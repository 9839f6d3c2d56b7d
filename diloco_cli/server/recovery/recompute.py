"""One version from its predecessor and the contributions on record, and the check of its digest."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from diloco_cli.core.ledger import MadeVersion
from diloco_cli.core.rounds import Receipt
from diloco_cli.errors import StoreDamaged
from diloco_cli.server.store.archive import Archive
from diloco_cli.server.store.state_format import StoredState
from diloco_cli.server.terms import TermsHistory
from diloco_cli.server.versions.next_version import Spoiled, Version, next_version


@dataclass(frozen=True)
class RecordedVersion:
    """One version on record and what it was made of."""

    version: int
    digest: str
    """Of its state; empty if no record has it, but then its successor's digest proves it."""
    receipts: tuple[Receipt, ...] = ()
    drain: bool = False
    terms: int = 0
    live: int = 0

    @classmethod
    def of(cls, made: MadeVersion) -> RecordedVersion:
        how = made.drain, made.terms, made.live
        return cls(made.version, made.state, tuple(made.receipts.values()), *how)


def load(archive: Archive, fragment: int, recorded: RecordedVersion) -> StoredState:
    """Loads a stored version; StoreDamaged if it is not the one on record."""
    state = archive.load_state(fragment, recorded.version)
    _check(fragment, recorded, state, "stored")
    return state


def recompute(
    history: TermsHistory,
    archive: Archive,
    fragment: int,
    recorded: RecordedVersion,
    state: StoredState,
) -> StoredState:
    """Merges a version's contributions into `state`, the version before it, by its own terms.

    StoreDamaged if one of them cannot be read or the result is not the one on record.
    """
    old = Version(recorded.version - 1, state, "", {}, ())
    payloads = archive.members(fragment, recorded.version)
    settings = history[recorded.terms]
    layout = settings.layout.fragments[fragment]
    how: dict[str, Any] = {"drain": recorded.drain, "live": recorded.live}
    made = next_version(settings, payloads, old, layout, recorded.receipts, **how)
    if isinstance(made, Spoiled):
        raise StoreDamaged(
            f"Version {recorded.version} of fragment {fragment} cannot be recomputed: "
            f"{', '.join(made.regions)}: {made.why}."
        )
    result = made[0].state.load()
    _check(fragment, recorded, result, "recomputed")
    return result


def _check(fragment: int, recorded: RecordedVersion, state: StoredState, how: str) -> None:
    if recorded.digest and (digest := state.digest) != recorded.digest:
        raise StoreDamaged(
            f"Version {recorded.version} of fragment {fragment}, {how}, has the digest "
            f"{digest[:12]}; the journal says {recorded.digest[:12]}.",
            hint="Restore the server folder from a copy. If only its numpy or numba is another "
            "than the one that made it, start it with those and stop it once: that stores the "
            "versions as they are.",
        )
