"""The store that is a folder on a local disk.

    server/
      lock             held by the one server that may write here
      run.json         which run this is: id, spec and layout digests
      was.json         ids of runs that it replaced before they had trained anything
      journal          every decision, in order
      payloads/ …      blobs: see blob_names.py
      fragments/F/ …
      cache/ …         whole frames; nothing is lost with them
      parts/ …         half-received frames: see intake/partial_files.py
      address.json     where the server listens, while it does

The order of a contribution is payload, journal record, reply; of a version: files, journal
record, visible. A file that no record of the journal names is never used.
"""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from io import FileIO
from pathlib import Path
from typing import Annotated

from pydantic import Field

from diloco_cli.core.journal_records import Entry
from diloco_cli.server.store.draft import Draft
from diloco_cli.server.store.journal import FileJournal, read_journal
from diloco_cli.server.store.journal_format import JournalContent
from diloco_cli.server.store.retention import Retention
from diloco_cli.server.store.run_identity import check_run, open_run, runs_before, take_lock
from diloco_cli.system.files import (
    DiskFull,
    disk_errors,
    draft_of,
    keep_files,
    make_folder,
    remove_drafts,
    sync_names,
    write_pieces,
)
from diloco_cli.system.locks import FileLock

READ_BYTES = 1 << 18
POPULATE_READ = 22
"""Linux's MADV_POPULATE_READ, which Python has no name for."""

_NOWAIT = getattr(os, "RWF_NOWAIT", 0)


@dataclass(frozen=True)
class Folder:
    """A folder on a local disk."""

    history: Annotated[int, Field(ge=2)] = 8
    """Versions of each fragment that are kept; regions further behind fetch whole weights."""

    replay: Annotated[int, Field(ge=0)] = 8
    """Of these, newest first, how many keep the contributions they were made of, so that
    `diloco replay` can recompute them."""

    whole: Annotated[int, Field(ge=1, le=64)] = 4
    """Of how many versions of a fragment one is stored whole. A restart recomputes those after
    it from their contributions: a larger number writes less and restarts more slowly."""

    journal: Annotated[int, Field(ge=1 << 12)] = 8 << 20
    """Bytes after which the journal is compacted: a snapshot takes the place of its records."""

    reserve: Annotated[int, Field(ge=0)] = 64 << 20
    """Bytes kept free for journal and versions: uploads are refused before they run out."""

    def open(
        self, folder: Path, *, layout: str, spec: str, base: int = 0
    ) -> tuple[FolderStore, list[Entry]]:
        """Takes the folder for this process; a second server, or another run, is refused."""
        make_folder(folder)
        lock = take_lock(folder)
        try:
            remove_drafts(folder)
            shutil.rmtree(folder / "cache", ignore_errors=True)
            journal, records = open_run(folder, layout, spec, base=base)
            for name in ("payloads", "parts", "fragments", "cache"):
                make_folder(folder / name)
            sync_names(folder)
        except BaseException:
            lock.release()
            raise
        return FolderStore(self, folder, journal, lock), records

    def read(self, folder: Path, *, layout: str, spec: str) -> tuple[FileBlobs, JournalContent]:
        """Reads a folder that no server has; changes nothing."""
        content = read_journal(folder / "journal")
        check_run(folder, content.run, layout, spec)
        return FileBlobs(folder), content


class FolderStore:
    """A folder that this process holds."""

    def __init__(self, kind: Folder, folder: Path, journal: FileJournal, lock: FileLock) -> None:
        self.run, self.journal, self.blobs = journal.run, journal, FileBlobs(folder)
        self.was = runs_before(folder)
        self.retention = Retention(kind.history, kind.replay, kind.whole, kind.journal)
        self.scratch = folder / "parts"
        self._folder, self._reserve, self._lock = folder, kind.reserve, lock

    def check_room(self, size: int) -> None:
        needed = size + self._reserve
        with disk_errors(self._folder):
            disk = os.statvfs(self._folder)
        if (free := disk.f_bavail * disk.f_frsize) < needed:
            raise DiskFull(
                f"{self._folder} needs {needed:,} free bytes and has {free:,}.",
                hint="Free some space on this disk; the run then goes on by itself.",
            )

    def draft(self, *, length: int = 0) -> Draft:
        return Draft(draft_of(self._folder / "payloads" / "upload"), length=length)

    def close(self) -> None:
        """Makes the journal durable and releases the folder."""
        try:
            self.journal.close()
        finally:
            self._lock.release()


class FileBlobs:
    """Blobs that are files under one folder."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def put(
        self,
        contents: Mapping[str, Iterable[bytes | memoryview]],
        *,
        durable: bool = True,
        steps: str = "",
    ) -> None:
        writers: dict[Path, Callable[[Path], None]] = {
            self._root / name: partial(write_pieces, pieces=pieces)
            for name, pieces in contents.items()
        }
        for parent in {path.parent for path in writers}:
            make_folder(parent)
        with disk_errors(next(iter(writers))):
            keep_files(writers, durable=durable, steps=steps)

    def keep(self, name: str, draft: Draft) -> None:
        draft.keep(self._root / name)

    def view(self, name: str) -> memoryview:
        return mapped(self._root / name)

    def open(self, name: str) -> FileReader:
        return FileReader(FileIO(self._root / name))

    def size(self, name: str) -> int | None:
        try:
            return os.stat(self._root / name).st_size
        except FileNotFoundError:
            return None

    def names(self, prefix: str) -> list[str]:
        folder, _, start = prefix.rpartition("/")
        try:
            files = os.listdir(self._root / folder)
        except FileNotFoundError:
            return []
        # A dot begins the name of a draft.
        return sorted(
            f"{folder}/{file}" for file in files if file.startswith(start) and file[0] != "."
        )

    def move(self, old: str, new: str) -> None:
        source = self._root / old
        if source.exists():
            with disk_errors(source):
                os.replace(source, self._root / new)

    def drop(self, names: Iterable[str]) -> None:
        for name in names:
            (self._root / name).unlink(missing_ok=True)

    def locate(self, name: str) -> str:
        return str(self._root / name)


class _Scratch(threading.local):
    """A buffer for each thread, used again by every `read_now`."""

    buffer = memoryview(b"")

    def of(self, length: int) -> memoryview:
        if len(self.buffer) < length:
            self.buffer = memoryview(bytearray(length))
        return self.buffer[:length]


class FileReader:
    _scratch = _Scratch()

    def __init__(self, file: FileIO) -> None:
        self._file = file

    def read_now(self, offset: int, length: int) -> bytes | None:
        if not _NOWAIT:
            return None
        buffer = self._scratch.of(length)
        try:
            count = os.preadv(self._file.fileno(), [buffer], offset, _NOWAIT)
        except OSError:  # Not in memory, or on a file system that cannot tell.
            return None
        return bytes(buffer[:count]) if count else None

    def read(self, offset: int, length: int) -> bytes:
        return os.pread(self._file.fileno(), length, offset)

    def close(self) -> None:
        self._file.close()

    __del__ = close


def mapped(path: Path) -> memoryview:
    """A file as memory, all of it read.

    A page that the disk cannot read raises an error here; found out later, while mapped memory
    is looked at, it would end the process (SIGBUS).
    """
    with open(path, "rb") as file:
        if not os.fstat(file.fileno()).st_size:
            return memoryview(b"")
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        try:
            memory.madvise(POPULATE_READ)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            while file.read(READ_BYTES):  # A system without that call.
                pass
        return memoryview(memory)
