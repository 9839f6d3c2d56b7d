"""The journal's bytes: frames in a chain, and what is wrong when they do not hold together.

Record 0 is the header; every record is one frame:

    magic  length  number  settled  chain  crc  body
    4      4       8       8        32     4    `length` bytes of canonical JSON

`chain` is the SHA-256 of the previous chain and the body, so no record can be changed,
lost or moved without all later ones showing it. `crc` covers everything else of the
frame. Records below `settled` were durable before this one was written: that tells a
torn tail from damage. A crash can spoil only what was not yet durable, so a bad record
with no later proof that it was durable is cut off (nobody was ever told about it), and
a bad record with such proof means that the file was damaged and must be repaired.

    new         {"journal": 1, "run": id}
    rebuilt     {"journal": 1, "run": id, "base": n}
    compacted   {"journal": 1, "run": id, "base": n, "chain": c, "settled": m}

The records of a rebuilt run are numbered from `base` + 1 on, which is the record of that; there
were none before. In a compacted journal the records up to `base` are gone, `chain` is theirs,
record `base` + 1 is a snapshot of what they amounted to, and records up to `settled` were durable
when the file was made. The header's framing stays the same in every schema, so that any version
can read which schema it has before it.
"""

from __future__ import annotations

import hashlib
import json
import struct
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from diloco_cli.core.journal_records import Entry
from diloco_cli.errors import StoreError

SCHEMA = 1
MAGIC = b"\xd1LJ\x01"  # Not UTF-8, so it never occurs inside a body.
HEAD = struct.Struct("<4sIQQ32s")
CRC = struct.Struct("<I")
LONGEST = 1 << 28
"""Bytes in one body. Payloads do not belong here; a snapshot of many regions does."""


class JournalEntry(NamedTuple):
    number: int
    chain: bytes
    body: bytes


class JournalFrame(NamedTuple):
    number: int
    settled: int
    chain: bytes
    body: bytes
    stop: int


@dataclass(frozen=True)
class JournalHeader:
    """The first record; a compacted journal says where it goes on."""

    run: str
    base: int
    chain: bytes
    """Of the record before the first one here."""
    settled: int
    """Newest record that was durable when the file was made."""

    @classmethod
    def of(cls, path: Path, first: JournalFrame) -> JournalHeader:
        plain: Entry = json.loads(first.body)
        schema, run = plain.get("journal"), plain.get("run")
        if not isinstance(schema, int) or not isinstance(run, str):
            raise StoreError(f"{path} does not begin with a journal's header.", hint=RESTORE)
        if schema != SCHEMA:
            raise StoreError(
                f"{path} has schema {schema}, this version of diloco reads {SCHEMA}.",
                hint="Start the server with the version of diloco that wrote it.",
            )
        chain = bytes.fromhex(plain["chain"]) if "chain" in plain else first.chain
        return cls(run, plain.get("base", 0), chain, plain.get("settled", 0))


@dataclass(frozen=True)
class JournalContent:
    """A journal as it was read."""

    run: str
    base: int
    """Number of the record before the first one here."""
    records: list[Entry]
    last: JournalEntry
    stop: int
    """Where the next record goes; what follows was never durable."""


def header(run: str, *, base: int = 0) -> JournalEntry:
    """The first record of a new journal, whose next record is `base` + 1."""
    begin: Entry = {"journal": SCHEMA, "run": run}
    first = entry(0, b"", {**begin, "base": base} if base else begin)
    return first._replace(number=base)


def entry(number: int, chain: bytes, record: Entry) -> JournalEntry:
    text = json.dumps(
        record, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False
    )
    body = text.encode()
    if len(body) > LONGEST:
        raise ValueError(f"record {number} has {len(body)} bytes, at most {LONGEST} are allowed")
    return JournalEntry(number, hashlib.sha256(chain + body).digest(), body)


def frame(entry: JournalEntry, *, settled: int) -> bytes:
    head = HEAD.pack(MAGIC, len(entry.body), entry.number, settled, entry.chain)
    return head + CRC.pack(zlib.crc32(entry.body, zlib.crc32(head))) + entry.body


def frame_at(data: bytes, offset: int) -> JournalFrame | None:
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
    return JournalFrame(number, settled, chain, body, stop)


def read(path: Path, data: bytes) -> JournalContent:
    """Reads a journal from its bytes, or says which record is wrong and what to do."""
    first = frame_at(data, 0)
    if first is None:
        raise StoreError(
            f"{path} is not a journal, or its header (byte 0) is damaged.", hint=RESTORE
        )
    header = JournalHeader.of(path, first)
    last, stop = JournalEntry(header.base, header.chain, first.body), first.stop
    records: list[Entry] = []
    while stop < len(data):
        record = frame_at(data, stop)
        if record is None:
            _refuse_damage(path, data, last.number + 1, stop, header)
            break
        chain = hashlib.sha256(last.chain + record.body).digest()
        if (record.number, record.chain) != (last.number + 1, chain):
            raise StoreError(
                f"{path}: record {last.number + 1} at byte {stop} does not continue record "
                f"{last.number}: it says number {record.number}, chain {record.chain.hex()[:12]}, "
                f"expected chain {chain.hex()[:12]}.",
                hint=_repair(path, last.number + 1, stop, header),
            )
        records.append(json.loads(record.body))
        last, stop = JournalEntry(record.number, chain, record.body), record.stop
    if last.number < header.settled:
        raise StoreError(
            f"{path} ends with record {last.number} at byte {stop}, but record "
            f"{header.settled} was durable when the journal was compacted.",
            hint=_repair(path, last.number + 1, stop, header),
        )
    return JournalContent(header.run, header.base, records, last, stop)


def compacted(path: Path, data: bytes, number: int, *, run: str, settled: int) -> bytes:
    """The same journal without the records before `number`, which is a snapshot of them."""
    place = frame_at(data, 0)
    assert place is not None
    chain, stop = JournalHeader.of(path, place).chain, place.stop
    while (record := frame_at(data, stop)) and record.number < number:
        chain, stop = record.chain, record.stop
    if record is None or record.number != number:
        raise StoreError(f"{path}: record {number} cannot be read again.", hint=RESTORE)
    begin = {
        "journal": SCHEMA,
        "run": run,
        "base": number - 1,
        "chain": chain.hex(),
        "settled": settled,
    }
    return frame(entry(0, b"", begin), settled=0) + data[stop:]


def _refuse_damage(
    path: Path, data: bytes, number: int, offset: int, header: JournalHeader
) -> None:
    """Raises if anything proves that record `number`, bad at `offset`, was durable."""
    if number <= header.settled:
        raise StoreError(
            f"{path}: record {number} at byte {offset} is damaged; it was whole when the journal "
            f"was compacted.",
            hint=_repair(path, number, offset, header),
        )
    place = data.find(MAGIC, offset + 1)
    while place >= 0:
        later = frame_at(data, place)
        if later and later.settled > number:
            raise StoreError(
                f"{path}: record {number} at byte {offset} is damaged, and record {later.number} "
                f"at byte {place} says that it was once whole.",
                hint=_repair(path, number, offset, header),
            )
        place = data.find(MAGIC, place + 1)


RESTORE = "Restore the server folder from a copy; without the journal its state is unknown."


def _repair(path: Path, number: int, offset: int, header: JournalHeader) -> str:
    # What was durable when the file was made cannot be given up by cutting it: the header
    # would go on to speak of it, and without the snapshot nothing is known at all.
    if number <= header.settled:
        return RESTORE
    return (
        f"Restore it from a copy. To give up record {number} and everything after it instead: "
        f"truncate -s {offset} {path}"
    )
