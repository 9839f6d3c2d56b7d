"""Which versions are stored whole, and how long blobs are kept: pure rules over names.

A version is stored whole (its state) or as its delta alone; then a restart recomputes it from
the contributions that were merged into it, which stay among the payloads until a stored state
contains them. After that they are moved beside their version, where `diloco replay` finds
them, and deleted after some versions more.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from diloco_cli.core.ledger import MadeVersion
from diloco_cli.server.store import blob_names

RECOMPUTED_AT_ONCE = 1 << 20
"""Bytes of contributions from which a version is recomputed in no time."""


@dataclass(frozen=True)
class Retention:
    """How much is kept; the options of a store explain each."""

    history: int
    replay: int
    whole: int
    journal: int


def is_due(rule: Retention, fragment: int, version: int, *, behind: int, size: int) -> bool:
    """Says whether a version is to be stored whole.

    `behind` is how many bytes of contributions a restart would have to merge to recompute it,
    `size` is that of its state: merging many takes longer than reading one state.
    """
    # Fragments take turns, so that writing is spread and a restart never recomputes all.
    return (version + fragment) % rule.whole == 0 or behind > max(size, RECOMPUTED_AT_ONCE)


def expired(rule: Retention, names: Iterable[str], *, version: int, base: int) -> list[str]:
    """The blobs of a fragment that are no longer kept once `version` is its newest.

    Version `base` is the newest stored whole: it stays, with all that leads on from it.
    """
    oldest = version - rule.history
    last = {
        "frame": version - rule.replay,
        "delta": min(oldest, base),
        "state": min(oldest, base - 1),
    }
    blobs = ((name, blob_names.parse(name)) for name in names)
    return [name for name, blob in blobs if blob and blob.version <= last[blob.kind]]


def merged_moves(fragment: int, base: int, made: Sequence[MadeVersion]) -> list[tuple[str, str]]:
    """Where payloads go, as (from, to), that the state of version `base` contains.

    Those of later versions stay: without them these versions could not be recomputed.
    """
    return [
        (
            blob_names.payload(receipt.digest),
            blob_names.member(fragment, step.version, receipt.digest),
        )
        for step in made
        if step.version <= base
        for receipt in step.receipts.values()
    ]


def is_long(rule: Retention, size: int, compacted_size: int) -> bool:
    """Says whether a journal of `size` bytes is worth compacting.

    `compacted_size` is what the last compaction left: it must have grown well beyond that.
    """
    return size > max(rule.journal, 2 * compacted_size)
