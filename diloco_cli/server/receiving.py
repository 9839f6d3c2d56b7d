"""Bodies as they come in: bounded, never silent for long, in batches worth a write."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from starlette.types import Message, Receive

from diloco_cli.server.denied import Denied

BATCH_BYTES = 1 << 20

LINGER_BYTES = 16 << 20
LINGER_SECONDS = 2.0
"""How much of a body, and for how long, is still taken in after it was refused."""

AGAIN = "It was cut or changed on its way; send it again."

Batch = list[bytes]
"""Pieces as they arrived; they are written without being copied together."""


async def batches(
    body: AsyncIterator[bytes], limit: int, silence: float, *, short: bool = False
) -> AsyncIterator[Batch]:
    """Yields a body of at most `limit` bytes, as long as something comes every `silence` s.

    Many a `short` one may come at a time, so less is held of each.
    """
    enough = BATCH_BYTES // 2 if short else BATCH_BYTES
    pieces, received = aiter(body), 0
    batch: Batch = []
    waiting = 0
    while True:
        try:
            async with asyncio.timeout(silence):
                piece = await anext(pieces, None)
        except TimeoutError:
            raise Denied("too-slow", f"Nothing arrived for {silence:.0f} s.", AGAIN) from None
        if piece is None:
            break
        received += len(piece)
        if received > limit:
            raise too_large(received, limit)
        if piece:
            batch.append(piece)
            waiting += len(piece)
        if waiting >= enough:
            yield batch
            batch, waiting = [], 0
    if batch:
        yield batch


class Incoming:
    """What comes in on one request; knows whether that was all of it."""

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._over = False

    async def __call__(self) -> Message:
        message = await self._receive()
        self._over = message["type"] != "http.request" or not message.get("more_body", False)
        return message

    async def linger(self) -> None:
        """Throws away what still comes after the answer, for a while and up to a limit.

        A request that is dropped while its body is on the way is reset, and clients that
        see the reset first never read why they were refused.
        """
        left = LINGER_BYTES
        try:
            async with asyncio.timeout(LINGER_SECONDS):
                while not self._over and left > 0:
                    left -= len((await self()).get("body", b""))
        except TimeoutError:
            pass


def too_large(size: int, limit: int) -> Denied:
    """The body is longer than anything that could be meant."""
    return Denied(
        "too-large",
        f"The body has {size} bytes or more, at most {limit} are expected here.",
        "Do both sides use the same model, `sync.fragments` and `wire.up`?",
    )
