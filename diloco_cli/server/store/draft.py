"""A payload on its way in."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from pathlib import Path

from diloco_cli.server.store.durable import disk_errors
from diloco_cli.system.failpoints import reach
from diloco_cli.system.files import allocate, sync_folder, write_all

MOST_PIECES = 512
"""Written in one call; the system takes a thousand."""


class Draft:
    """A payload on its way in: written as it arrives, visible only once it is kept."""

    def __init__(self, path: Path, *, again: bool = False, length: int = 0) -> None:
        """With `again` it goes on with what may be there; `length` is what it will have.

        It takes that much room when it is first written to, in a thread: some disks take long.
        Room that is taken at once is not looked for page by page, which is a third of what
        writing costs, and cannot be taken by somebody else.
        """
        self.path, self.size, self._wanted = path, 0, length
        self.allocated = False
        """Whether it has all its room already."""
        self._mapped: mmap.mmap | None = None
        new = 0 if again else os.O_EXCL
        with disk_errors(path):
            self._handle = os.open(path, os.O_RDWR | os.O_CREAT | new, 0o600)
            if again:
                self.allocated = 512 * os.fstat(self._handle).st_blocks >= length

    @property
    def closed(self) -> bool:
        """Whether it was kept or given up."""
        return self._handle < 0

    def write(self, data: bytes | memoryview) -> None:
        with disk_errors(self.path):
            write_all(self._handle, data)
        self.size += len(data)
        reach("draft.written")

    def write_pieces(self, pieces: Sequence[bytes], offset: int | None = None) -> None:
        """Writes pieces one after another, as they are: at the end, or at a place of their own.

        `size` counts only what is written at the end.
        """
        if len(pieces) > MOST_PIECES:
            pieces = [b"".join(pieces)]
        at = self.size if offset is None else offset
        with disk_errors(self.path):
            self._take_room()
            written = os.pwritev(self._handle, pieces, at)
            if written < (length := sum(map(len, pieces))):
                left = memoryview(b"".join(pieces))[written:]
                while left:
                    written = length - len(left)
                    left = left[os.pwrite(self._handle, left, at + written) :]
        if offset is None:
            self.size += length
        reach("draft.written")

    def _take_room(self) -> None:
        wanted, self._wanted = self._wanted, 0
        if wanted and not self.allocated:
            self.allocated = allocate(self._handle, wanted)

    def read_at(self, offset: int, length: int) -> bytes:
        with disk_errors(self.path):
            return os.pread(self._handle, length, offset)

    def read(self) -> bytes:
        """Everything written so far, to be checked before it is kept."""
        with disk_errors(self.path):
            return self.path.read_bytes()

    def view(self) -> memoryview:
        """Everything written so far, where it is: nothing is read before it is looked at."""
        if not self.size:
            return memoryview(b"")
        with disk_errors(self.path):
            self._mapped = mmap.mmap(self._handle, self.size, access=mmap.ACCESS_READ)
        return memoryview(self._mapped)

    def rest(self) -> None:
        """Lets go of the memory that looking at it took; the system has the bytes at hand."""
        if self._mapped is not None:
            self._mapped.madvise(mmap.MADV_DONTNEED)

    def keep(self, final: Path) -> None:
        """Makes the payload durable, then visible under its name; the draft is used up."""
        try:
            with disk_errors(final):
                os.fsync(self._handle)
                reach("draft.flushed")
                os.replace(self.path, final)
                reach("draft.renamed")
                sync_folder(final.parent)
                reach("draft.kept")
        finally:
            self.discard()

    def discard(self) -> None:
        """Closes the draft; removes it unless it was kept."""
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1
        self._mapped = None
        self.path.unlink(missing_ok=True)
