"""How blobs are named.

payloads/DIGEST.frame                a contribution that no stored state contains yet
fragments/F/vNNNNNNNN.state          one version: weights, momentum, published weights
fragments/F/vNNNNNNNN.delta          the frame that leads from the version before
fragments/F/vNNNNNNNN.DIGEST.frame   a contribution that was merged into the version
cache/F-vNNNNNNNN.whole              a whole frame, encoded; emptied by the next start
cache/F-vNNNNNNNN.state              the newest version, where it is not stored; likewise
"""

from __future__ import annotations

import re
from typing import NamedTuple

PAYLOADS = "payloads/"
CACHE = "cache/"

_DIGEST = re.compile(r"[0-9a-f]{64}")
_VERSION = re.compile(r"v(\d+)\.(?:([0-9a-f]{64})\.)?(state|delta|frame)")


class VersionBlob(NamedTuple):
    """What the name of a fragment's blob says."""

    version: int
    digest: str
    """Of the contribution; empty for states and deltas."""
    kind: str


def payload(digest: str) -> str:
    if not _DIGEST.fullmatch(digest):
        raise ValueError(f"{digest!r} is not a SHA-256 in hexadecimal")
    return f"{PAYLOADS}{digest}.frame"


def payload_digest(name: str) -> str:
    return name.removeprefix(PAYLOADS).removesuffix(".frame")


def fragment(number: int) -> str:
    """The prefix of a fragment's blobs."""
    return f"fragments/{number}/"


def state(number: int, version: int) -> str:
    return f"{fragment(number)}v{version:08d}.state"


def delta(number: int, version: int) -> str:
    return f"{fragment(number)}v{version:08d}.delta"


def member(number: int, version: int, digest: str) -> str:
    """A contribution that was merged into a version."""
    return f"{fragment(number)}v{version:08d}.{digest}.frame"


def whole(number: int, version: int) -> str:
    return f"{CACHE}{number}-v{version:08d}.whole"


def set_aside(number: int, version: int) -> str:
    """A state that is not stored: it may be gone after a crash."""
    return f"{CACHE}{number}-v{version:08d}.state"


def parse(name: str) -> VersionBlob | None:
    """Reads the name of a fragment's blob; None for any other name."""
    match = _VERSION.fullmatch(name.rpartition("/")[2])
    return VersionBlob(int(match[1]), match[2] or "", match[3]) if match else None
