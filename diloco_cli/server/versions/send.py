"""Bytes that never change under their etag, sent whole or in ranges."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from diloco_cli.server.refusals import HttpRefusal
from diloco_cli.server.versions.newest import ImmutableResource, ModelDownload
from diloco_cli.server.versions.pieces import Reading, Ready

FOREVER = "public, max-age=31536000, immutable"
MEDIA = "application/octet-stream"

SHORT_BYTES = 2 << 20
"""Up to this nobody looks whether the client is still there: it is read before one could know."""

# As long as any file; a number of thousands of digits is not worth reading.
_RANGE = re.compile(r"bytes=([0-9]{0,18})-([0-9]{0,18})")


def send(
    request: Request,
    resource: ImmutableResource | ModelDownload,
    sent: Callable[[int], None],
    beside: Mapping[str, str] | None = None,
) -> Response:
    """Answers with a resource, or the part of it that was asked for, or that it is known.

    `sent` is told what leaves, as it does: a client may go before it has everything.
    `beside` are further headers.
    """
    headers = {"etag": resource.etag, "cache-control": FOREVER, "accept-ranges": "bytes"}
    headers |= beside or {}
    if resource.etag in _etags(request.headers.get("if-none-match", "")):
        return Response(status_code=304, headers=headers)
    start, stop, status = 0, resource.size, 200
    if found := _asked(request, resource):
        start, stop = found
        status = 206
        headers["content-range"] = f"bytes {start}-{stop - 1}/{resource.size}"
    headers["content-length"] = str(stop - start)
    if request.method == "HEAD":
        return Response(status_code=status, headers=headers, media_type=MEDIA)
    return ByteRange(resource.read(start, stop), stop - start, sent, status, headers)


class ByteRange(Response):
    """Bytes of a resource as an answer, as fast as its client takes them.

    A long one is sent beside a task that hears when the client leaves: the server below us
    takes whatever is sent to nobody, and would let us read all of it.
    """

    def __init__(
        self,
        pieces: Reading | Ready,
        length: int,
        sent: Callable[[int], None],
        status: int,
        headers: Mapping[str, str],
    ) -> None:
        super().__init__(None, status, headers, MEDIA)
        self._pieces, self._left, self._sent = pieces, length, sent

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        about = {"status": self.status_code, "headers": self.raw_headers}
        await send({"type": "http.response.start", **about})
        leaving = asyncio.create_task(_left(receive)) if self._left > SHORT_BYTES else None
        try:
            while not (leaving and leaving.done()):
                piece = self._pieces.at_once()
                if piece is None:
                    piece = await asyncio.to_thread(self._pieces.next)
                self._left = self._left - len(piece) if piece else 0
                more = self._left > 0
                await send({"type": "http.response.body", "body": piece, "more_body": more})
                self._sent(len(piece))
                if not more:
                    return
                # Neither reading nor sending need have waited: now others have their turn.
                await asyncio.sleep(0)
        finally:
            if leaving:
                leaving.cancel()


async def _left(receive: Receive) -> None:
    """Returns once the client has."""
    while (await receive())["type"] != "http.disconnect":
        pass


def _asked(request: Request, resource: ImmutableResource | ModelDownload) -> tuple[int, int] | None:
    """The range asked for, as (start, stop); None for everything.

    As HTTP wants it, what is not understood (several ranges, other units) is not there.
    """
    found = _RANGE.fullmatch(request.headers.get("range", "").replace(" ", ""))
    if not found or request.headers.get("if-range", resource.etag) != resource.etag:
        return None
    first, last = found.groups()
    if not first and not last:
        return None
    start = int(first) if first else max(0, resource.size - int(last))
    stop = min(int(last) + 1, resource.size) if first and last else resource.size
    if first and last and int(last) < start:
        return None
    if start >= stop:
        raise HttpRefusal(
            "range",
            f"Bytes {found.group()[6:]} are asked for, there are {resource.size}.",
            headers={"content-range": f"bytes */{resource.size}"},
        )
    return start, stop


def _etags(header: str) -> set[str]:
    return {each.strip().removeprefix("W/") for each in header.split(",")}
