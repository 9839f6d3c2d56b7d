"""Bytes that never change under their etag, sent whole or in ranges.

A piece that is in memory is sent at once; only one that the disk must read goes through a
thread: there and back takes longer than reading half a megabyte from memory.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from diloco_cli.server.refusals import HttpRefusal
from diloco_cli.server.store import BlobReader, Blobs
from diloco_cli.wire.messages import RUN_HEADER

FOREVER = "public, max-age=31536000, immutable"
MEDIA = "application/octet-stream"

PIECE_BYTES = 1 << 19
"""Bytes read and sent at a time. Buffers of this length are used again; one of a megabyte comes
from the system each time (see system/malloc.py), which costs more than reading it."""

SHORT_BYTES = 2 << 20
"""Up to this length a client that leaves goes unnoticed: all is read before it could be known."""

# Longer than any file; a number of thousands of digits is not worth reading.
_RANGE = re.compile(r"bytes=([0-9]{0,18})-([0-9]{0,18})")


class Pieces(Protocol):
    """Bytes on their way out; an empty piece follows the last one."""

    def next_now(self) -> bytes | None:
        """The next piece, or None if that would wait; only on the event loop."""
        ...

    def next(self) -> bytes: ...


class Resource(Protocol):
    """Bytes that never change under their etag."""

    @property
    def size(self) -> int: ...
    @property
    def etag(self) -> str: ...
    def read(self, start: int, stop: int) -> Pieces: ...


@dataclass(frozen=True)
class ImmutableResource:
    """One or more blobs, one after another."""

    blobs: Blobs
    parts: tuple[tuple[str, int], ...]
    """Names of the blobs, with their lengths."""
    etag: str

    @property
    def size(self) -> int:
        return sum(length for _, length in self.parts)

    def read(self, start: int, stop: int) -> BlobPieces:
        """Gives the bytes from `start` to `stop`, a piece at a time."""
        return BlobPieces(self.blobs, self.parts, start, stop)


class BlobPieces:
    """A range over several blobs; the one that is being read may be deleted meanwhile."""

    def __init__(
        self, blobs: Blobs, parts: Sequence[tuple[str, int]], start: int, stop: int
    ) -> None:
        self._blobs, self._parts = blobs, list(parts)
        self._offset, self._left = start, stop - start
        self._reader: BlobReader | None = None

    def __iter__(self) -> Iterator[bytes]:
        while piece := self.next():
            yield piece

    def next_now(self) -> bytes | None:
        reader, length = self._open()
        piece = reader.read_now(self._offset, length) if reader else None
        return self._count(piece) if piece else None

    def next(self) -> bytes:
        reader, length = self._open()
        return self._count(reader.read(self._offset, length)) if reader else b""

    def _open(self) -> tuple[BlobReader | None, int]:
        """Opens the blob that comes next, if there is one; says how long its piece may be."""
        while self._left and self._parts and self._offset >= self._parts[0][1]:
            self._offset -= self._parts.pop(0)[1]
            self._close()
        if not self._left or not self._parts:
            self._close()
            return None, 0
        name, length = self._parts[0]
        self._reader = self._reader or self._blobs.open(name)
        return self._reader, min(PIECE_BYTES, self._left, length - self._offset)

    def _count(self, piece: bytes) -> bytes:
        self._offset += len(piece)
        self._left -= len(piece)
        return piece

    def _close(self) -> None:
        if self._reader:
            self._reader.close()
        self._reader = None


def send(
    request: Request,
    resource: Resource,
    sent: Callable[[int], None],
    more_headers: Mapping[str, str] | None = None,
) -> Response:
    """Answers with a resource, the range of it that was asked for, or 304 if the client has it.

    `sent` is called with the length of each piece: a client may leave before the last.
    """
    headers = {"etag": resource.etag, "cache-control": FOREVER, "accept-ranges": "bytes"}
    # Another run has other weights under the same number, and may follow at the same address.
    headers["vary"] = RUN_HEADER
    headers |= more_headers or {}
    if resource.etag in _etags(request.headers.get("if-none-match", "")):
        return Response(status_code=304, headers=headers)
    start, stop, status = 0, resource.size, 200
    if span := _range(request, resource):
        start, stop = span
        status = 206
        headers["content-range"] = f"bytes {start}-{stop - 1}/{resource.size}"
    headers["content-length"] = str(stop - start)
    if request.method == "HEAD":
        return Response(status_code=status, headers=headers, media_type=MEDIA)
    return ByteRange(resource.read(start, stop), stop - start, sent, status, headers)


class ByteRange(Response):
    """Bytes of a resource as an answer, as fast as its client takes them.

    While a long one is sent, a task waits for the client to leave: the HTTP server would accept
    the rest of the bytes for a closed connection, and all of them would be read for nothing.
    """

    def __init__(
        self,
        pieces: Pieces,
        length: int,
        sent: Callable[[int], None],
        status: int,
        headers: Mapping[str, str],
    ) -> None:
        super().__init__(None, status, headers, MEDIA)
        self._pieces, self._left, self._sent = pieces, length, sent

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        head = {"status": self.status_code, "headers": self.raw_headers}
        await send({"type": "http.response.start", **head})
        leaving = asyncio.create_task(_left(receive)) if self._left > SHORT_BYTES else None
        try:
            while not (leaving and leaving.done()):
                piece = self._pieces.next_now()
                if piece is None:
                    piece = await asyncio.to_thread(self._pieces.next)
                self._left = self._left - len(piece) if piece else 0
                more = self._left > 0
                await send({"type": "http.response.body", "body": piece, "more_body": more})
                self._sent(len(piece))
                if not more:
                    return
                # Neither reading nor sending may have waited: let other tasks run.
                await asyncio.sleep(0)
        finally:
            if leaving:
                leaving.cancel()


async def _left(receive: Receive) -> None:
    """Returns once the client has left."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _range(request: Request, resource: Resource) -> tuple[int, int] | None:
    """The range asked for, as (start, stop); None for everything.

    As HTTP demands, a range that is not understood (several, other units) is ignored.
    """
    match = _RANGE.fullmatch(request.headers.get("range", "").replace(" ", ""))
    if not match or request.headers.get("if-range", resource.etag) != resource.etag:
        return None
    first, last = match.groups()
    if not first and not last:
        return None
    start = int(first) if first else max(0, resource.size - int(last))
    stop = min(int(last) + 1, resource.size) if first and last else resource.size
    if first and last and int(last) < start:
        return None
    if start >= stop:
        raise HttpRefusal(
            "range",
            f"Bytes {match.group()[6:]} are asked for, there are {resource.size}.",
            headers={"content-range": f"bytes */{resource.size}"},
        )
    return start, stop


def _etags(header: str) -> set[str]:
    return {etag.strip().removeprefix("W/") for etag in header.split(",")}
