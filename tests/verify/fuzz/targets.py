"""What must hold for any bytes at all, whoever sends them.

A target takes bytes and says in a word what became of them. It raises when a decoder does
anything but refuse (`WireError`) or understand; and what is understood is held against
everything that can be known about it: digests are computed again, headers and messages
written down again and read again, numbers decoded on a second way.

The first two bytes of an input say how deep the rest is put, because no fuzzer guesses a
SHA-256: as it is, under a right digest, as a header, as a zstd frame, as a codec's body.
"""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable

import numpy as np

from diloco_cli.errors import WireError
from diloco_cli.net.transfer.upload import missing
from diloco_cli.server.intake.partial_files import PartialFileEntry
from diloco_cli.wire import messages
from diloco_cli.wire.error_bodies import parse_error
from diloco_cli.wire.frame import Frame, open_frame, read_chain
from diloco_cli.wire.header import read_header, write_header
from diloco_cli.wire.messages import (
    Having,
    parse,
    parse_heartbeat,
)
from tests.verify.fuzz.seeds import CODECS, body_bytes, fields_of
from tests.wire.forged_frames import put_together, squeezed

MOST_VALUES = 1 << 14
"""A receiver knows how many values it expects; more are not decoded."""

EXACT = ("fp32", "bf16")
"""Codecs with one body for each vector: what was decoded encodes to the same bytes."""

Target = Callable[[bytes], str]


# Frames


def frame(data: bytes) -> str:
    """A frame, or what is inside one, at the depth that the first byte says."""
    if len(data) < 2:
        return _opened(data)
    depth, name, rest = data[0] % len(DEPTHS), CODECS[data[1] % len(CODECS)], data[2:]
    return DEPTHS[depth](name, rest)


def _as_is(_: str, rest: bytes) -> str:
    """A frame, or several deltas one after another."""
    try:
        chain = read_chain(rest)
    except WireError:
        chain = []
    assert b"".join(bytes(each.data) for each in chain) in (rest, b""), "a chain lost bytes"
    return "chain" if len(chain) > 1 else _opened(rest)


def _resealed(_: str, rest: bytes) -> str:
    """The frame's length and digest are those of the bytes that are here."""
    if len(rest) < 24:
        return _opened(rest)
    whole = rest[:16] + struct.pack("<Q", len(rest) + 32) + rest[24:]
    return _opened(whole + hashlib.sha256(whole).digest())


def _header(name: str, rest: bytes) -> str:
    _, chunk = fields_of(name)
    return _opened(put_together(rest, chunk))


def _chunk(name: str, rest: bytes) -> str:
    fields, _ = fields_of(name)
    return _opened(put_together({**fields, "chunks": [len(rest)]}, rest))


def _body(name: str, rest: bytes) -> str:
    fields, _ = fields_of(name)
    length = body_bytes(name)
    chunk = squeezed(rest[:length].ljust(length, b"\0"))
    return _opened(put_together({**fields, "chunks": [len(chunk)]}, chunk))


DEPTHS = (_as_is, _resealed, _header, _chunk, _body)


def _opened(data: bytes) -> str:
    try:
        found = open_frame(data)
    except WireError:
        return "refused"
    assert found.digest == hashlib.sha256(data[:-32]).hexdigest() == data[-32:].hex()
    lengths = list(found.lengths)
    again, listed, codec = read_header(write_header(found.header, lengths))
    assert (again, listed, codec) == (found.header, lengths, found.codec), "another header"
    return _numbers(found) if found.header.size <= MOST_VALUES else "opened"


def _numbers(found: Frame) -> str:
    size = found.header.size
    sums, ones = np.zeros(size), np.ones(size, np.float32)
    try:
        values = found.values(threads=1)
    except WireError:
        ways = (lambda: found.accumulate(sums, 1.0, threads=1), lambda: found.added_to(ones))
        assert not any(map(_is_done, ways)), "what cannot be read can be added"
        return "no numbers"
    assert values.dtype == np.float32 and values.shape == (size,) and np.isfinite(values).all()
    found.accumulate(sums, 1.0, threads=1)
    assert np.array_equal(sums, values), "added, the numbers are others"
    assert np.array_equal(found.added_to(ones)[0], ones + values), "added at once, they are others"
    expected = float(sums @ sums)
    assert abs(found.squares([0, size], threads=1)[0] - expected) <= 1e-9 * expected
    if found.header.codec["kind"] in EXACT:
        assert found.codec.encode(values) == found.body(0), "another body for the same numbers"
    return "taken"


def _is_done(work: Callable[[], object]) -> bool:
    try:
        work()
    except WireError:
        return False
    return True


# Messages


def message(data: bytes) -> str:
    """A JSON body of any call, in either direction; the first byte says of which."""
    if not data:
        return "refused"
    _, decode = MESSAGES[data[0] % len(MESSAGES)]
    try:
        decode(data[1:])
    except WireError:
        return "refused"
    return "taken"


def _again(kind: type[messages.Message]) -> Callable[[bytes], None]:
    def decode(data: bytes) -> None:
        found = parse(kind, data)
        assert parse(kind, found.body()) == found, "it says something else the second time"

    return decode


def _heartbeat(data: bytes) -> None:
    found = parse_heartbeat(data, fragments=2)
    assert parse_heartbeat(found.body(), fragments=2) == found
    assert len(found.fragments) == 2


def _having(data: bytes) -> None:
    """What a server says it has of an upload: the rest is what is sent, whatever it says."""
    found = parse(Having, data)
    assert parse(Having, found.body()) == found
    for size in (1, 1000, 2**53 - 1):
        gaps = missing(found.have, size)
        at = 0
        for start, stop in gaps:
            assert at <= start < stop <= size, gaps
            at = stop


def _listed(data: bytes) -> None:
    """What a server wrote down of an upload: taken up again only if it fits together."""
    found = parse(PartialFileEntry, data)
    assert parse(PartialFileEntry, found.body()) == found
    if not found.sound:
        raise WireError("ranges that do not fit together")
    gaps = missing(found.have, found.size)
    covered = sum(stop - start for start, stop in (*found.have, *gaps))
    assert covered == found.size, (found.have, gaps)


def _error(data: bytes) -> None:
    found = parse_error(data)
    if found is None:
        raise WireError("not an error of ours")
    said, beside = found
    text = json.dumps({"error": said.model_dump(), **beside})
    again = parse_error(text.encode())
    assert again is not None and again[0] == said


def _head(data: bytes) -> None:
    header, chunks, codec = read_header(data)
    again = read_header(write_header(header, chunks))
    assert again == (header, chunks, codec)


MESSAGES: tuple[tuple[str, Callable[[bytes], None]], ...] = (
    ("join", _again(messages.Join)),
    ("heartbeat", _heartbeat),
    ("run", _again(messages.Run)),
    ("news", _again(messages.News)),
    ("joined", _again(messages.Joined)),
    ("latest", _again(messages.Latest)),
    ("answer", _again(messages.Answer)),
    ("having", _having),
    ("listed", _listed),
    ("error", _error),
    ("header", _head),
)

TARGETS: dict[str, Target] = {"frame": frame, "message": message}
