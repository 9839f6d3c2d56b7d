"""Bytes that never change under their etag, sent whole or in ranges."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from itertools import islice

from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from diloco_cli.server.denied import Denied
from diloco_cli.server.weights import Model, Resource

FOREVER = "public, max-age=31536000, immutable"
AT_A_TIME = 2
"""Pieces read ahead: going to a thread and back costs a tenth of reading a megabyte."""

# As long as any file; a number of thousands of digits is not worth reading.
_RANGE = re.compile(r"bytes=([0-9]{0,18})-([0-9]{0,18})")


def send(
    request: Request,
    resource: Resource | Model,
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
    media = "application/octet-stream"
    if request.method == "HEAD":
        return Response(status_code=status, headers=headers, media_type=media)
    body = _counted(resource.read(start, stop), stop - start, sent)
    return StreamingResponse(body, status, headers, media)


async def _counted(
    pieces: Iterator[bytes], left: int, sent: Callable[[int], None]
) -> AsyncIterator[bytes]:
    """Gives `left` bytes; while some are sent, the next are read."""

    def read() -> list[bytes]:
        return list(islice(pieces, AT_A_TIME))

    ahead = asyncio.ensure_future(asyncio.to_thread(read))
    while taken := await ahead:
        left -= sum(map(len, taken))
        if left > 0:
            ahead = asyncio.ensure_future(asyncio.to_thread(read))
        for piece in taken:
            sent(len(piece))
            yield piece
        if left <= 0:
            return


def _asked(request: Request, resource: Resource | Model) -> tuple[int, int] | None:
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
        raise Denied(
            "range",
            f"Bytes {found.group()[6:]} are asked for, there are {resource.size}.",
            headers={"content-range": f"bytes */{resource.size}"},
        )
    return start, stop


def _etags(header: str) -> set[str]:
    return {each.strip().removeprefix("W/") for each in header.split(",")}
