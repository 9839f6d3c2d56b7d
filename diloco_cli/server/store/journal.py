"""The journal: every decision of the server, in order, in one append-only file.

`append` numbers a record, `sync` makes all of them durable with one flush (who waits for it is
`group_commit`'s subject; the bytes are `journal_format`'s). When the file has grown long, a
snapshot is appended like any record and `compact` deletes the records before it: numbers and
hash chain continue.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from threading import Lock
from typing import Any

from diloco_cli.core.journal_records import Entry
from diloco_cli.errors import StoreError
from diloco_cli.server.store import journal_format
from diloco_cli.server.store.journal_format import JournalContent, JournalEntry
from diloco_cli.system.failpoints import reach
from diloco_cli.system.files import FULL, DiskFull, disk_errors, keep_bytes

log = logging.getLogger(__name__)

CHECK = "Check the disk, then start the server again."
GONE = (
    "Nothing is acknowledged any more. Bring the server back from a copy, `diloco restore COPY "
    "--dir NEW`, or from what the regions hold, `diloco restore --from-regions FOLDER… --dir NEW`."
)


def read_journal(path: Path) -> JournalContent:
    """Reads a journal and changes nothing; raises as opening it would."""
    return _read(path)[0]


class FileJournal:
    """Appends in order; `sync` makes durable.

    One thread appends; another may `sync` or `compact` meanwhile. A failed flush ends the
    journal for good (see `group_commit`).
    """

    def __init__(self, path: Path, run: str, last: JournalEntry, stop: int, base: int = 0) -> None:
        self.path, self.run, self.base = path, run, base
        with disk_errors(path):
            self._handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._writing = Lock()
        self._beside: dict[Path, int] = {}
        self._waiting: list[JournalEntry] = []
        self._last, self._chain = last.number, last.chain
        self._durable, self._stop = last.number, stop
        self._dead, self._hint = "", CHECK

    @classmethod
    def create(cls, path: Path, *, run: str, base: int = 0) -> FileJournal:
        """Makes an empty journal whose first record is `base` + 1; it is there whole or not."""
        if path.exists():
            raise StoreError(f"{path} exists already.", hint="Open it instead of creating it.")
        header = journal_format.header(run, base=base)
        frame = journal_format.frame(header._replace(number=0), settled=0)
        with disk_errors(path):
            keep_bytes(path, frame)
        return cls(path, run, header, len(frame), base)

    @classmethod
    def open(cls, path: Path) -> tuple[FileJournal, list[Entry]]:
        """Opens a journal and gives its records, `base` + 1 first; cuts a torn tail."""
        content, data = _read(path)
        last, stop, size = content.last, content.stop, len(data)
        if stop < size:
            log.warning(
                f"{path}: cut {size - stop} bytes after record {last.number}, at byte {stop}: "
                f"a write that a crash interrupted before it was acknowledged"
            )
        # What the last server wrote and could not flush is about to be relied on. It goes into
        # a new file: after a flush that failed, the kernel takes pages for written that never
        # reached the disk, and another flush of the old file would only seem to succeed.
        with disk_errors(path):
            keep_bytes(path, data[:stop])
        return cls(path, content.run, last, stop, content.base), content.records

    def stands_with(self, path: Path) -> None:
        """Ends the journal once this file, too, is gone or another."""
        with disk_errors(path):
            self._beside[path] = path.stat().st_ino

    def check(self) -> None:
        """Raises once the journal's file, or one that it stands with, is gone or another.

        What is written then goes to a file without a name, and is nowhere after a restart.
        """
        with self._writing:
            self._refuse_if_dead()
            self._refuse_if_gone()

    @property
    def last(self) -> int:
        """Number of the newest record, durable or not."""
        return self._last

    @property
    def size(self) -> int:
        """Bytes of what is durable."""
        return self._stop

    def append(self, record: Mapping[str, Any]) -> int:
        """Numbers the record; it is durable after `sync`."""
        self._refuse_if_dead()
        entry = journal_format.entry(self._last + 1, self._chain, record)
        self._waiting.append(entry)
        self._last, self._chain = entry.number, entry.chain
        reach("journal.appended")
        return entry.number

    def sync(self) -> None:
        """Returns once every record appended before the call is durable.

        On DiskFull the records keep their numbers and a later `sync` retries.
        """
        with self._writing:
            self._refuse_if_dead()
            if batch := tuple(self._waiting):  # More may be appended from here on.
                self._refuse_if_gone()
                self._commit(batch)

    def compact(self, number: int) -> None:
        """Deletes the records before `number`, a snapshot. On DiskFull nothing changes."""
        self.sync()
        with self._writing:
            self._refuse_if_dead()
            self._refuse_if_gone()
            try:
                self._rewrite(number)
            except DiskFull:
                if os.fstat(self._handle).st_ino == self.path.stat().st_ino:
                    raise
                # The new file has the name, not durably: a crash may leave either.
                self._end(f"{self.path} could not be compacted.")
            except (OSError, StoreError) as error:
                self._end(f"{self.path} could not be compacted: {error}.")

    def close(self) -> None:
        """Makes everything durable and closes the file."""
        try:
            if not self._dead:
                self.sync()
        finally:
            with self._writing:
                if self._handle >= 0:
                    os.close(self._handle)
                self._handle, self._dead = -1, self._dead or f"{self.path} is closed."

    def _rewrite(self, number: int) -> None:
        data = self.path.read_bytes()[: self._stop]
        short = journal_format.compacted(
            self.path, data, number, run=self.run, settled=self._durable
        )
        with disk_errors(self.path):
            keep_bytes(self.path, short, steps="compact")
        old, self._handle = self._handle, os.open(self.path, os.O_RDWR | os.O_CLOEXEC)
        os.close(old)
        self._stop, self.base = len(short), number - 1

    def _commit(self, batch: tuple[JournalEntry, ...]) -> None:
        """Writes a batch and flushes it."""
        try:
            size = self._write(
                b"".join(journal_format.frame(e, settled=batch[0].number) for e in batch)
            )
            reach("journal.written")
            os.fdatasync(self._handle)
            reach("journal.flushed")
        except OSError as error:
            self._end(f"{self.path} could not be made durable: {error.strerror or error}.")
        else:
            self._durable, self._stop = batch[-1].number, self._stop + size
            del self._waiting[: len(batch)]

    def _write(self, data: bytes) -> int:
        done = 0
        try:
            while done < len(data):
                done += os.pwrite(self._handle, data[done:], self._stop + done)
        except OSError as error:
            if error.errno not in FULL:
                raise
            os.ftruncate(self._handle, self._stop)  # No half record stays behind.
            with disk_errors(self.path):
                raise
        return done

    def _end(self, why: str, hint: str = CHECK) -> None:
        self._dead, self._hint = why, hint
        self._refuse_if_dead()

    def _refuse_if_dead(self) -> None:
        if self._dead:
            raise StoreError(self._dead, hint=self._hint)

    def _refuse_if_gone(self) -> None:
        for path, number in {self.path: os.fstat(self._handle).st_ino, **self._beside}.items():
            try:
                found = path.stat().st_ino
            except OSError:
                self._end(f"{path} was deleted while the server ran.", GONE)
            else:
                if found != number:
                    self._end(f"{path} was replaced by another file while the server ran.", GONE)


def _read(path: Path) -> tuple[JournalContent, bytes]:
    if not path.exists():
        raise StoreError(f"{path} is missing.", hint=journal_format.RESTORE)
    with disk_errors(path):
        data = path.read_bytes()
    return journal_format.read(path, data), data
