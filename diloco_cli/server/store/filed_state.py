"""A version whose vectors are in a file: mapped while they are needed, believed by digest only.

What is mapped goes from memory with the last array that refers to it. A file may be deleted
while it is mapped or open: its bytes stay until nobody looks at them any more.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import xxhash

from diloco_cli.errors import StoreDamaged
from diloco_cli.server.store import BlobReader, blob_names
from diloco_cli.server.store.archive import Archive
from diloco_cli.server.store.state_format import StoredState, place_of

READ_BYTES = 1 << 20


@dataclass(frozen=True, eq=False)
class FiledState:
    """One version of a fragment, as a file of the store."""

    archive: Archive
    fragment: int
    version: int
    digest: str
    """Of the state, as it was published."""
    stored: bool
    """Whether it outlives this process; else it was only set aside."""

    @property
    def name(self) -> str:
        of = blob_names.state if self.stored else blob_names.set_aside
        return of(self.fragment, self.version)

    def load(self) -> StoredState:
        """Maps the state and checks every bit; StoreDamaged if it is not what was published."""
        state = self.archive.read_state(self.name, self.fragment, self.version)
        if state.digest != self.digest:
            where = self.archive.blobs.locate(self.name)
            raise StoreDamaged(f"{where} is another state than the one that was published.")
        return state

    @property
    def theta(self) -> np.ndarray:
        return self.load().theta

    @property
    def momentum(self) -> np.ndarray:
        return self.load().momentum

    @property
    def published(self) -> np.ndarray:
        return self.load().published

    @property
    def average(self) -> np.ndarray | None:
        return self.load().average

    def open_published(self) -> PublishedFile:
        """Opens the published weights alone; StoreDamaged if there is no such file."""
        where = self.archive.blobs.locate(self.name)
        try:
            return PublishedFile(self.archive.blobs.open(self.name))
        except (OSError, ValueError, KeyError) as error:
            raise StoreDamaged(f"{where} cannot be read: {error!r}.") from error


class PublishedFile:
    """The published weights in an open file of a state, as if they were all of it."""

    def __init__(self, reader: BlobReader) -> None:
        self._reader = reader
        self._start, self.size = place_of("published", reader)

    def read_now(self, offset: int, length: int) -> bytes | None:
        return self._reader.read_now(self._start + offset, min(length, self.size - offset))

    def read(self, offset: int, length: int) -> bytes:
        return self._reader.read(self._start + offset, min(length, self.size - offset))

    def close(self) -> None:
        self._reader.close()

    def digest(self) -> str:
        """Reads all of it, a piece at a time."""
        found = xxhash.xxh3_128()
        for piece in self._pieces():
            found.update(piece)
        return found.hexdigest()

    def values(self) -> np.ndarray:
        """All of it, in memory."""
        vector, offset = np.empty(self.size // 4, "<f4"), 0
        into = vector.view(np.uint8).data
        for piece in self._pieces():
            into[offset : offset + len(piece)] = piece
            offset += len(piece)
        return vector

    def _pieces(self) -> Iterator[bytes]:
        offset = 0
        while piece := self.read(offset, READ_BYTES):
            yield piece
            offset += len(piece)
