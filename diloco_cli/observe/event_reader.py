"""Reading the run log in order while it is written, moved on, or deleted.

An id names a place: the generation of the file, by a digest of its first line, and the
number of its bytes up to there. The bytes alone would mean another line as soon as the
file is moved, and so would its inode, which file systems give to the next new file.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from diloco_cli.observe.event_file import older

EVERYTHING = "0"
"""The id before the first line that is kept."""

BATCH_BYTES = 1 << 18
MOST_OF_A_NAME = 4096

_ID = re.compile(r"(?:([0-9a-f]{12})-)?([0-9]{1,18})")


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
            self._read = {each.name: min(self._read.get(each.name, 0), each.size) for each in files}
            for number, each in enumerate(files):
                late = any(self._read[newer.name] for newer in files[number + 1 :])
                if lines := self._lines(each, late):
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
    if after is None or not (found := _ID.fullmatch(after)):
        return {each.name: each.size for each in files}
    name, place = found[1], int(found[2])
    if name is None and place > 0 and files:
        name = files[-1].name
    for number, each in enumerate(files):
        if each.name == name and place <= each.size:
            return {before.name: before.size for before in files[:number]} | {each.name: place}
    return {}


@contextlib.contextmanager
def _kept(path: Path) -> Iterator[list[OpenEventFile]]:
    """Opens the files that have a line, the older one first."""
    with contextlib.ExitStack() as opened:
        found: list[BinaryIO] = []
        # In this order: a file that is moved in between is found twice, and not missed.
        for each in (path, older(path)):
            with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                found.append(opened.enter_context(open(each, "rb")))
        named = {_name(file): file for file in reversed(found)}
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
