"""An upload on its way in: a local file that becomes visible once it is kept."""

from __future__ import annotations

import mmap
import os
from collections.abc import Sequence
from pathlib import Path

from diloco_cli.system.failpoints import reach
from diloco_cli.system.files import allocate, disk_errors, sync_folder, write_all

MOST_PIECES = 512
"""Pieces written in one call; the system takes a thousand."""


class Draft:
    """A payload that is written as it arrives."""

    def __init__(self, path: Path, *, resume: bool = False, length: int = 0) -> None:
        """With `resume` it may exist already; `length` is how long it will be.

        That much room is allocated with the first write, in a thread, because some disks take
        long. Allocating at once saves a third of the cost of writing, and no other file can
        take the room meanwhile.
        """
        self.path, self.size, self._length = path, 0, length
        self.allocated = False
        """Whether it has all its room already."""
        self._mapped: mmap.mmap | None = None
        exclusive = 0 if resume else os.O_EXCL
        with disk_errors(path):
            self._handle = os.open(path, os.O_RDWR | os.O_CREAT | exclusive, 0o600)
            if resume:
                self.allocated = 512 * os.fstat(self._handle).st_blocks >= length

    @property
    def closed(self) -> bool:
        """Whether it was kept or discarded."""
        return self._handle < 0

    def write(self, data: bytes | memoryview) -> None:
        with disk_errors(self.path):
            write_all(self._handle, data)
        self.size += len(data)
        reach("draft.written")

    def write_pieces(self, pieces: Sequence[bytes], offset: int | None = None) -> None:
        """Writes pieces one after another, without joining them: at the end, or at `offset`.

        `size` counts only what is written at the end.
        """
        if len(pieces) > MOST_PIECES:
            pieces = [b"".join(pieces)]
        start = self.size if offset is None else offset
        with disk_errors(self.path):
            self._allocate()
            written = os.pwritev(self._handle, pieces, start)
            if written < (length := sum(map(len, pieces))):
                left = memoryview(b"".join(pieces))[written:]
                while left:
                    left = left[os.pwrite(self._handle, left, start + length - len(left)) :]
        if offset is None:
            self.size += length
        reach("draft.written")

    def _allocate(self) -> None:
        length, self._length = self._length, 0
        if length and not self.allocated:
            self.allocated = allocate(self._handle, length)

    def read_at(self, offset: int, length: int) -> bytes:
        with disk_errors(self.path):
            return os.pread(self._handle, length, offset)

    def read(self) -> bytes:
        """Reads everything written so far."""
        with disk_errors(self.path):
            return self.path.read_bytes()

    def view(self) -> memoryview:
        """Maps everything written so far: a page is read when it is looked at."""
        if not self.size:
            return memoryview(b"")
        with disk_errors(self.path):
            self._mapped = mmap.mmap(self._handle, self.size, access=mmap.ACCESS_READ)
        return memoryview(self._mapped)

    def release_pages(self) -> None:
        """Releases the memory of a view; its bytes stay in the page cache."""
        if self._mapped is not None:
            self._mapped.madvise(mmap.MADV_DONTNEED)

    def keep(self, final: Path) -> None:
        """Makes the file durable, then visible as `final`; the draft is used up."""
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
