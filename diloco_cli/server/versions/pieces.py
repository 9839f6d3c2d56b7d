"""Bytes to be sent, in pieces: those in memory at once, the others after the disk has found them.

A piece that needs no disk needs no thread to wait for it: going to one and back takes longer
than reading half a megabyte.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from io import FileIO
from pathlib import Path

PIECE_BYTES = 1 << 19
"""Bytes read and sent at a time. As long as this, memory is used again; a megabyte comes fresh
from the system each time (`memory`), which costs more than reading it."""

_NOW = getattr(os, "RWF_NOWAIT", 0)
"""Reads what the system has in memory, and nothing that it would have to wait for."""


class Ready:
    """Pieces that are in memory, all of them."""

    def __init__(self, pieces: Iterator[bytes]) -> None:
        self._pieces = pieces

    def __iter__(self) -> Iterator[bytes]:
        return self._pieces

    def at_once(self) -> bytes | None:
        return self.next()

    def next(self) -> bytes:
        return next(self._pieces, b"")


class _Own(threading.local):
    """Each event loop's: filled and copied from before anybody else on it has a turn."""

    def __init__(self) -> None:
        self.scratch = memoryview(bytearray(PIECE_BYTES))


class Reading:
    """A stretch of files, one after another; one that is open may be removed meanwhile."""

    _own = _Own()

    def __init__(self, files: Sequence[tuple[Path, int]], start: int, stop: int) -> None:
        """`files` come with their lengths."""
        self._files, self._at, self._left = list(files), start, stop - start
        self._file: FileIO | None = None

    def __iter__(self) -> Iterator[bytes]:
        while piece := self.next():
            yield piece

    def at_once(self) -> bytes | None:
        """The next piece, if that takes no waiting; only on the event loop."""
        file, length = self._place()
        if not _NOW or not file:
            return None
        room = self._own.scratch[:length]
        try:
            found = os.preadv(file.fileno(), [room], self._at, _NOW)
        except OSError:  # Not in memory, or on a file system that cannot tell.
            return None
        return self._taken(bytes(room[:found])) if found else None

    def next(self) -> bytes:
        """The next piece, when the disk has found it; nothing after the last."""
        file, length = self._place()
        return self._taken(os.pread(file.fileno(), length, self._at)) if file else b""

    def __del__(self) -> None:
        # Not earlier: whoever broke off may have left a thread that reads.
        self._close()

    def _place(self) -> tuple[FileIO | None, int]:
        """Opens the file that comes next, if one does; says how long a piece of it may be."""
        while self._left and self._files and self._at >= self._files[0][1]:
            self._at -= self._files.pop(0)[1]
            self._close()
        if not self._left or not self._files:
            self._close()
            return None, 0
        path, length = self._files[0]
        self._file = self._file or FileIO(path)
        return self._file, min(PIECE_BYTES, self._left, length - self._at)

    def _taken(self, piece: bytes) -> bytes:
        self._at += len(piece)
        self._left -= len(piece)
        return piece

    def _close(self) -> None:
        if self._file:
            self._file.close()
        self._file = None
