"""What is on the server's disk, for whoever only reads: the server, and a replay of it."""

from __future__ import annotations

import errno
import mmap
import os
import re
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open

from diloco_cli.errors import StoreError, WireError
from diloco_cli.server.store.run_identity import FROM_COPY
from diloco_cli.wire.digest import state_digest, vector_digest
from diloco_cli.wire.frame import open_frame

READ_BYTES = 1 << 18
POPULATE_READ = 22
"""Linux's MADV_POPULATE_READ, which Python has no name for."""

_DIGEST = re.compile(r"[0-9a-f]{64}")


class PayloadLost(StoreError):
    """An accepted payload cannot be read; its work goes back to the region that sent it."""


@dataclass(frozen=True, eq=False, slots=True)
class StoredState:
    """One version of a fragment: flat float32 vectors."""

    theta: np.ndarray
    momentum: np.ndarray
    published: np.ndarray
    names: tuple[str, ...] = field(default=(), kw_only=True)
    """Digests of the three, if whoever made them knows."""

    @property
    def vectors(self) -> dict[str, np.ndarray]:
        return {"theta": self.theta, "momentum": self.momentum, "published": self.published}

    @property
    def digest(self) -> str:
        """Of every bit; two states are the same exactly if it is."""
        names = self.names or map(vector_digest, self.vectors.values())
        return state_digest(dict(zip(self.vectors, names, strict=True)))


class Archive:
    """The files of one server folder."""

    def __init__(self, folder: Path, run: str) -> None:
        self.folder, self.run = folder, run

    def payload(self, digest: str) -> memoryview:
        """An accepted payload, where it lies: it takes no memory of ours."""
        path = self.payload_path(digest)
        try:
            return mapped(path)
        except OSError as error:
            raise PayloadLost(
                f"The payload {path} cannot be read: {error.strerror}.",
                hint="Its region sends the work again with its next contribution.",
            ) from error

    def payloads(self) -> set[str]:
        """Digests of all payloads here, also of those that no record speaks of."""
        return {path.stem for path in (self.folder / "payloads").glob("*.frame")}

    def members(self, fragment: int, version: int) -> dict[str, Path]:
        """The contributions that a version was made of, by digest, as far as they are kept."""
        found = (self.folder / "fragments" / str(fragment)).glob(f"v{version:08d}.*.frame")
        return {path.name.split(".")[1]: path for path in found}

    def load_state(self, fragment: int, version: int) -> StoredState:
        """Reads one version and checks every bit of it."""
        path = self._file(fragment, version, "state")
        try:
            with safe_open(path, framework="np") as file:
                about = file.metadata() or {}
                state = StoredState(*map(file.get_tensor, ("theta", "momentum", "published")))
        except FileNotFoundError:
            raise StoreError(
                f"Fragment {fragment} is published at version {version}, but {path} is missing.",
                hint=FROM_COPY,
            ) from None
        except (SafetensorError, OSError) as error:
            raise StoreError(f"{path} cannot be read: {error}.", hint=FROM_COPY) from error
        said = (about.get("fragment"), about.get("version"), about.get("digest"))
        found = (str(fragment), str(version), state.digest)
        if said != found:
            raise StoreError(
                f"{path} is damaged: it says fragment, version, digest are {said}, "
                f"its content {found}.",
                hint=FROM_COPY,
            )
        return state

    def published(self, fragment: int, version: int) -> np.ndarray | None:
        """The published weights of a version: stored, or added up; None when they are gone."""
        base = max((kept for kept in self.versions(fragment) if kept <= version), default=None)
        if base is None:
            return None
        deltas = [self.delta(fragment, number) for number in range(base + 1, version + 1)]
        if None in deltas:
            return None
        weights = self.load_state(fragment, base).published
        for path in filter(None, deltas):
            try:
                frame = open_frame(mapped(path), size=weights.size)
                weights, digest = frame.added_to(weights)
            except (OSError, WireError) as error:
                raise StoreError(f"{path} cannot be read: {error}.", hint=FROM_COPY) from error
            if digest != frame.header.published:
                raise StoreError(
                    f"{path} leads to weights with the digest {digest[:12]}, it says "
                    f"{frame.header.published[:12]}.",
                    hint=FROM_COPY,
                )
        return weights

    def delta(self, fragment: int, version: int) -> Path | None:
        """The frame that leads from `version` - 1 to `version`, if it is still kept."""
        path = self._file(fragment, version, "delta")
        return path if path.exists() else None

    def versions(self, fragment: int) -> list[int]:
        """Versions whose state is kept, oldest first; the newest may not be journaled yet."""
        found = (self.folder / "fragments" / str(fragment)).glob("v*.state")
        return sorted(int(path.stem[1:]) for path in found)

    def payload_path(self, digest: str) -> Path:
        if not _DIGEST.fullmatch(digest):  # It becomes a file name.
            raise ValueError(f"{digest!r} is not a SHA-256 in hexadecimal")
        return self.folder / "payloads" / f"{digest}.frame"

    def _file(self, fragment: int, version: int, what: str) -> Path:
        return self.folder / "fragments" / str(fragment) / f"v{version:08d}.{what}"


def mapped(path: Path) -> memoryview:
    """A file as memory, all of which is there.

    What the disk cannot give is an error here, but the end of a process that finds out
    while it looks at mapped memory.
    """
    with open(path, "rb") as file:
        if not os.fstat(file.fileno()).st_size:
            return memoryview(b"")
        found = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        try:
            found.madvise(POPULATE_READ)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            while file.read(READ_BYTES):  # A system that has no such call.
                pass
        return memoryview(found)
