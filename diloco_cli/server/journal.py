"""What the server decided, in order, for ever.

An append-only file of records. Record 0 is the header; every record is one frame:

    magic  length  number  settled  chain  crc  body
    4      4       8       8        32     4    `length` bytes of canonical JSON

`chain` is the SHA-256 of the previous chain and the body, so no record can be changed,
lost or moved without all later ones showing it. `crc` covers everything else of the
frame. Records below `settled` were durable before this one was written: that tells a
torn tail from damage. A crash can spoil only what was not yet durable, so a bad record
with no later proof that it was durable is cut off (nobody was ever told about it), and
a bad record with such proof means that the file was damaged and must be repaired.

Header: {"journal": 1, "run": id}. Its framing stays as it is in every later schema, so
that any version can at least read which one it has before it.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
import sys
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from threading import Condition
from typing import Any, NamedTuple

from diloco_cli.errors import StoreError
from diloco_cli.server.durable import FULL, DiskFull, disk_errors, keep_bytes

SCHEMA = 1
MAGIC = b"\xd1LJ\x01"  # Not UTF-8, so it never occurs inside a body.
HEAD = struct.Struct("<4sIQQ32s")
CRC = struct.Struct("<I")
LONGEST = 1 << 24
"""Bytes in one body. Payloads do not belong here."""

Notice = Callable[[str], None]


def to_stderr(said: str) -> None:
    print(said, file=sys.stderr)


class Entry(NamedTuple):
    number: int
    chain: bytes
    body: bytes


class Frame(NamedTuple):
    number: int
    settled: int
    chain: bytes
    body: bytes
    stop: int


class Journal:
    """Appends in order; `sync` makes durable, one fsync for all that wait.

    Safe to use from many threads. A failed fsync ends the journal for good: the kernel
    forgets what it could not write, so trying again would only seem to succeed.
    """

    def __init__(self, path: Path, run: str, last: Entry, stop: int) -> None:
        self.path, self.run = path, run
        with disk_errors(path):
            self._handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._turn = Condition()
        self._waiting: list[Entry] = []
        self._writing = False
        self._last, self._chain = last.number, last.chain
        self._durable, self._stop = last.number, stop
        self._dead = ""

    @classmethod
    def create(cls, path: Path, *, run: str) -> Journal:
        """Makes an empty journal; it exists with its header or not at all."""
        if path.exists():
            raise StoreError(f"{path} exists already.", hint="Open it instead of creating it.")
        header = _entry(0, b"", {"journal": SCHEMA, "run": run})
        keep_bytes(path, frame := _frame(header, settled=0))
        return cls(path, run, header, len(frame))

    @classmethod
    def open(cls, path: Path, *, notice: Notice = to_stderr) -> tuple[Journal, list[dict]]:
        """Opens a journal and gives its records, number 1 first; cuts a torn tail with a notice."""
        if not path.exists():
            raise StoreError(f"{path} is missing.", hint=_RESTORE)
        with disk_errors(path):
            data = path.read_bytes()
        run, records, last, stop = _read(path, data)
        if stop < len(data):
            notice(
                f"{path}: cut {len(data) - stop} bytes after record {last.number}, at byte {stop}: "
                f"a write that a crash interrupted before anyone was told of it"
            )
        # What the last server wrote and could not flush is about to be relied on. It goes into
        # a new file: after a flush that failed, the kernel takes pages for written that never
        # reached the disk, and another flush of the old file would only seem to succeed.
        keep_bytes(path, data[:stop])
        return cls(path, run, last, stop), records

    @property
    def last(self) -> int:
        """Number of the newest record, durable or not."""
        return self._last

    def append(self, record: Mapping[str, Any]) -> int:
        """Gives the record its number and its place; durable only after `sync`."""
        with self._turn:
            self._refuse_if_dead()
            entry = _entry(self._last + 1, self._chain, record)
            self._waiting.append(entry)
            self._last, self._chain = entry.number, entry.chain
            return entry.number

    def sync(self, number: int | None = None) -> None:
        """Returns once every record up to `number` (or the newest) is durable.

        On DiskFull the records keep their places and a later `sync` tries again, so an
        answer that rests on any record, also one recorded earlier, needs its `sync`.
        """
        while True:
            with self._turn:
                self._refuse_if_dead()
                wanted = self._last if number is None else number
                if wanted > self._last:
                    raise ValueError(f"record {wanted} does not exist; the newest is {self._last}")
                if self._durable >= wanted:
                    return
                if self._writing:
                    self._turn.wait()
                    continue
                self._writing = True
                batch = tuple(self._waiting)
            self._commit(batch)

    def close(self) -> None:
        """Makes everything durable and lets the file go."""
        try:
            if not self._dead:
                self.sync()
        finally:
            with self._turn:
                if self._handle >= 0:
                    os.close(self._handle)
                self._handle, self._dead = -1, self._dead or f"{self.path} is closed."

    def _commit(self, batch: tuple[Entry, ...]) -> None:
        """Writes a batch and flushes it; only one thread is ever in here."""
        size = 0
        try:
            size = self._write(b"".join(_frame(e, settled=batch[0].number) for e in batch))
            os.fdatasync(self._handle)
        except DiskFull:
            raise
        except OSError as error:
            self._dead = f"{self.path} could not be made durable: {error.strerror or error}."
        finally:
            with self._turn:
                if size and not self._dead:
                    self._durable, self._stop = batch[-1].number, self._stop + size
                    del self._waiting[: len(batch)]
                self._writing = False
                self._turn.notify_all()

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

    def _refuse_if_dead(self) -> None:
        if self._dead:
            raise StoreError(self._dead, hint="Check the disk, then start the server again.")


def _entry(number: int, chain: bytes, record: Mapping[str, Any]) -> Entry:
    text = json.dumps(
        record, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )
    body = text.encode()
    if len(body) > LONGEST:
        raise ValueError(f"record {number} has {len(body)} bytes, at most {LONGEST} are allowed")
    return Entry(number, hashlib.sha256(chain + body).digest(), body)


def _frame(entry: Entry, *, settled: int) -> bytes:
    head = HEAD.pack(MAGIC, len(entry.body), entry.number, settled, entry.chain)
    return head + CRC.pack(zlib.crc32(entry.body, zlib.crc32(head))) + entry.body


def _frame_at(data: bytes, offset: int) -> Frame | None:
    """The frame that starts here, or None if no whole and correct one does."""
    start = offset + HEAD.size + CRC.size
    if start > len(data):
        return None
    magic, length, number, settled, chain = HEAD.unpack_from(data, offset)
    stop = start + length
    if magic != MAGIC or stop > len(data):
        return None
    body = data[start:stop]
    if (
        zlib.crc32(body, zlib.crc32(data[offset : offset + HEAD.size]))
        != CRC.unpack_from(data, offset + HEAD.size)[0]
    ):
        return None
    return Frame(number, settled, chain, body, stop)


def _read(path: Path, data: bytes) -> tuple[str, list[dict], Entry, int]:
    """The run, its records, the last entry, and where the next one goes."""
    frame = _frame_at(data, 0)
    if frame is None:
        raise StoreError(
            f"{path} is not a journal, or its header (byte 0) is damaged.", hint=_RESTORE
        )
    run = _run_of(path, frame)
    last, stop = Entry(0, frame.chain, frame.body), frame.stop
    records: list[dict] = []
    while stop < len(data):
        frame = _frame_at(data, stop)
        if frame is None:
            _refuse_damage(path, data, last.number + 1, stop)
            break
        chain = hashlib.sha256(last.chain + frame.body).digest()
        if (frame.number, frame.chain) != (last.number + 1, chain):
            raise StoreError(
                f"{path}: record {last.number + 1} at byte {stop} does not continue record "
                f"{last.number}: it says number {frame.number}, chain {frame.chain.hex()[:12]}, "
                f"expected chain {chain.hex()[:12]}.",
                hint=_repair(path, last.number + 1, stop),
            )
        records.append(json.loads(frame.body))
        last, stop = Entry(frame.number, chain, frame.body), frame.stop
    return run, records, last, stop


def _run_of(path: Path, frame: Frame) -> str:
    header = json.loads(frame.body)
    schema, run = header.get("journal"), header.get("run")
    if not isinstance(schema, int) or not isinstance(run, str) or schema < 1:
        raise StoreError(f"{path} does not begin with a journal's header.", hint=_RESTORE)
    if schema > SCHEMA:
        raise StoreError(
            f"{path} has schema {schema}, this version of diloco reads up to {SCHEMA}.",
            hint="Start the server with the version of diloco that wrote it, or a newer one.",
        )
    return run


def _refuse_damage(path: Path, data: bytes, number: int, offset: int) -> None:
    """Raises if a later record proves that record `number`, bad at `offset`, was durable."""
    place = data.find(MAGIC, offset + 1)
    while place >= 0:
        later = _frame_at(data, place)
        if later and later.settled > number:
            raise StoreError(
                f"{path}: record {number} at byte {offset} is damaged, and record {later.number} "
                f"at byte {place} says that it was once whole.",
                hint=_repair(path, number, offset),
            )
        place = data.find(MAGIC, place + 1)


_RESTORE = "Restore the server folder from a copy; without the journal its state is unknown."


def _repair(path: Path, number: int, offset: int) -> str:
    return (
        f"Restore it from a copy. To give up record {number} and everything after it instead: "
        f"truncate -s {offset} {path}"
    )
