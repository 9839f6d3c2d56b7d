"""The file of the run log: several processes append lines, others read them in order.

It has two generations of a bounded size. A line that has no room left in `events.jsonl`
turns that file into `events.jsonl.1`, in place of the one before it, and begins a new one.
No process waits for another: each may be stopped or killed at any moment, and the server
writes on its event loop. So a line may be late: a writer that has opened the file and is
then overtaken by its move writes into `.1`, whole and at its end.

A reader's id names a place: the generation of the file, by a digest of its first line, and
the number of its bytes up to there. The bytes alone would mean another line as soon as the
file is moved, and so would its inode, which file systems give to the next new file.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

EVERYTHING = "0"
"""The id before the first line that is kept."""

BATCH_BYTES = 1 << 18
MOST_OF_A_NAME = 4096

_ID = re.compile(r"(?:([0-9a-f]{12})-)?([0-9]{1,18})")


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
        if os.write(file, line) < len(line):
            # The disk is full, and half a line is in the file: opened anew, it gets its end.
            os.close(file)
            self._file = None

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
        # A crash may have left half a line; ours must not be glued to it. A line that another
        # process is writing just now looks the same where it crosses a page: then an empty line
        # comes after it, which readers leave out.
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

        The lock is on the file that is moved, not on its name: a process that gets it after
        another has moved that file sees so, and does not put the new file in place of the old.
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


@dataclass(frozen=True, slots=True)
class EventLine:
    text: bytes
    id: str
    """The place after it; empty if it came late, when lines of the next file had been read."""


@dataclass(frozen=True, slots=True)
class OpenEventFile:
    """One of the files, open, with the size it had then."""

    name: str
    file: BinaryIO
    size: int


class EventReader:
    """Goes through the lines of all files that are kept, each of them once."""

    def __init__(self, path: Path, after: str | None = EVERYTHING) -> None:
        """Begins after the line with this id; at what comes next if it is no id, or None.

        A number alone is a place in the newest file. If the place is no longer kept, all
        that is kept comes after it.
        """
        self._path = path
        with _kept(path) as files:
            self._read = _before(files, after)

    def more(self) -> list[EventLine]:
        """Gives the next whole lines, about `BATCH_BYTES` of them; none if all are read."""
        with _kept(self._path) as files:
            # Also files that were read to their end: a line may land there late.
            self._read = {file.name: min(self._read.get(file.name, 0), file.size) for file in files}
            for number, file in enumerate(files):
                late = any(self._read[newer.name] for newer in files[number + 1 :])
                if lines := self._lines(file, late):
                    return lines
        return []

    def _lines(self, generation: OpenEventFile, late: bool) -> list[EventLine]:
        name, file, place = generation.name, generation.file, self._read[generation.name]
        file.seek(max(0, place - 1))
        if place:
            # An id made up by hand may point into a line; the rest of that line is left out.
            place += len(file.readline()) - 1
        lines, ends = [], place + BATCH_BYTES
        while place < ends and (text := file.readline()).endswith(b"\n"):
            place += len(text)
            lines.append(EventLine(text, "" if late else f"{name}-{place}"))
        self._read[name] = place
        return lines


def newest_id(path: Path) -> str:
    """The id to go on from with what is written from now on."""
    with _kept(path) as files:
        return f"{files[-1].name}-{files[-1].size}" if files else EVERYTHING


def _before(files: list[OpenEventFile], after: str | None) -> dict[str, int]:
    """How much of each file comes before what is asked for."""
    if after is None or not (id := _ID.fullmatch(after)):
        return {file.name: file.size for file in files}
    name, place = id[1], int(id[2])
    if name is None and place > 0 and files:
        name = files[-1].name
    for number, file in enumerate(files):
        if file.name == name and place <= file.size:
            return {before.name: before.size for before in files[:number]} | {file.name: place}
    return {}


@contextlib.contextmanager
def _kept(path: Path) -> Iterator[list[OpenEventFile]]:
    """Opens the files that have a line, the older one first."""
    with contextlib.ExitStack() as opened:
        files: list[BinaryIO] = []
        # In this order: a file that is moved in between is found twice, and not missed.
        for generation in (path, older(path)):
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                files.append(opened.enter_context(open(generation, "rb")))
        named = {_name(file): file for file in reversed(files)}
        yield [
            OpenEventFile(name, file, os.fstat(file.fileno()).st_size)
            for name, file in named.items()
            if name
        ]


def _name(file: BinaryIO) -> str:
    """Names a generation for ever; one without a whole line has no name yet."""
    first = file.readline(MOST_OF_A_NAME)
    if not first.endswith(b"\n") and len(first) < MOST_OF_A_NAME:
        return ""
    return hashlib.blake2b(first, digest_size=6).hexdigest()
