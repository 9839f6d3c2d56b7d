"""A file that several processes append lines to, in two generations of a bounded size.

A line that has no room left in `events.jsonl` turns that file into `events.jsonl.1`, in
place of the one before it, and begins a new one. Nobody ever waits for anybody: each of
the processes may be stopped or killed at any moment, and the server writes on its event
loop. So a line may be late: who has opened the file and is then overtaken by its move
writes into `.1`, whole and at its end.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path


def older(path: Path) -> Path:
    """Where the generation before this file is kept."""
    return path.with_name(f"{path.name}.1")


class EventFile:
    """One process that appends, from one thread at a time.

    It keeps to the folder that it found at its first line, wherever that is moved: the
    lines of a run that was set aside never get into the log of the next one.
    """

    def __init__(self, path: Path, *, most: int) -> None:
        self._path = path
        self._most = most
        self._folder: int | None = None
        self._file: int | None = None

    def write(self, line: bytes) -> None:
        """Appends one line by one `write`; raises OSError when the disk refuses it."""
        file = self._current()
        if os.fstat(file).st_size + len(line) > self._most:
            self._move(file)
            file = self._current()
        os.write(file, line)

    def close(self) -> None:
        for handle in (self._file, self._folder):
            if handle is not None:
                os.close(handle)
        self._file = self._folder = None

    def _current(self) -> int:
        """Opens the file that has the name now: ours may have been moved, or deleted."""
        if self._folder is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._folder = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY)
        if self._file is not None:
            if self._has_the_name(self._file):
                return self._file
            os.close(self._file)
            self._file = None
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT
        file = self._file = os.open(self._path.name, flags, 0o644, dir_fd=self._folder)
        # A crash may have left half a line; ours must not be glued to it.
        if _is_torn(file):
            os.write(file, b"\n")
        return file

    def _has_the_name(self, file: int) -> bool:
        try:
            named = os.stat(self._path.name, dir_fd=self._folder)
        except FileNotFoundError:
            return False
        return os.path.samestat(named, os.fstat(file))

    def _move(self, file: int) -> None:
        """Makes the file the older generation, unless another process does or did so.

        The lock is on the file that is moved, not on its name: who gets it after another
        has moved that file sees it, and does not put the new file in place of the old one.
        A lock that is taken, or a folder that cannot be changed, lets the file grow.
        """
        name, folder = self._path.name, self._folder
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            try:
                if self._has_the_name(file):
                    os.replace(name, older(self._path).name, src_dir_fd=folder, dst_dir_fd=folder)
            finally:
                fcntl.flock(file, fcntl.LOCK_UN)


def _is_torn(file: int) -> bool:
    """Says whether the file ends in the middle of a line."""
    size = os.fstat(file).st_size
    return size > 0 and os.pread(file, 1, size - 1) != b"\n"
