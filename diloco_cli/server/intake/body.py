"""Bodies as they come in: bounded, never silent for long, in batches worth a write."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine

from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive

from diloco_cli.server.http.limits import check_drip
from diloco_cli.server.refusals import HttpRefusal

BATCH_BYTES = 1 << 20

LINGER_BYTES = 72 << 20
LINGER_SECONDS = 2.0
"""How much of a body, and for how long, is still taken in after it was refused: some clients hear
nothing before they have said everything."""

AGAIN = "It was cut or changed on its way; send it again."

Batch = list[bytes]
"""Pieces as they arrived; they are written without being copied together."""


async def batches(
    body: AsyncIterator[bytes],
    limit: int,
    silence: float,
    *,
    short: bool = False,
    clock: Callable[[], float] = time.monotonic,
) -> AsyncIterator[Batch]:
    """Yields a body of at most `limit` bytes, as long as something comes every `silence` s.

    Many a `short` one may come at a time, so less is held of each.
    """
    arriving = _Arriving(body, limit, silence, clock)
    enough = BATCH_BYTES // 2 if short else BATCH_BYTES
    while batch := await arriving.next(enough):
        yield batch


class _Arriving:
    """A body on its way in. A piece changes hands here as seldom as can be: there are thousands."""

    def __init__(
        self, body: AsyncIterator[bytes], limit: int, silence: float, clock: Callable[[], float]
    ) -> None:
        self._body, self._limit, self._silence, self._clock = body, limit, silence, clock
        self._began, self._received = clock(), 0

    async def next(self, enough: int) -> Batch:
        """The next pieces, `enough` bytes or what is left."""
        batch: Batch = []
        waiting, heard = 0, self._clock()
        try:
            async with asyncio.timeout(self._silence) as patience:
                async for piece in self._body:
                    now = self._clock()
                    self._count(len(piece), now)
                    if now - heard > self._silence / 16:
                        heard = now
                        patience.reschedule(asyncio.get_running_loop().time() + self._silence)
                    if piece:
                        batch.append(piece)
                        waiting += len(piece)
                        if waiting >= enough:
                            break
        except TimeoutError:
            said = f"Nothing arrived for {self._silence:.0f} s."
            raise HttpRefusal("too-slow", said, AGAIN) from None
        return batch

    def _count(self, size: int, now: float) -> None:
        self._received += size
        if self._received > self._limit:
            raise too_large(self._received, self._limit)
        check_drip(self._received, now - self._began)


class LimitedReceive:
    """What comes in on one request, piece by piece; knows how much, and whether that was all.

    The next piece is asked for before the last one is handed on, so that it is on its way through
    the server's own threads meanwhile.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._coming: Awaitable[Message] | None = None
        self._over = False
        self.received = 0

    async def __call__(self) -> Message:
        coming, self._coming = self._coming or self._receive(), None
        message = await coming
        self._over = message["type"] != "http.request" or not message.get("more_body", False)
        self.received += len(message.get("body", b""))
        return message

    def __aiter__(self) -> LimitedReceive:
        return self

    async def __anext__(self) -> bytes:
        # What `__call__` does, in one step less: there are thousands of pieces.
        if self._over:
            raise StopAsyncIteration
        coming, self._coming = self._coming or self._receive(), None
        message = await coming
        if message["type"] != "http.request":
            self._over = True
            raise ClientDisconnect
        if message.get("more_body", False):
            self._coming = self._receive()
        else:
            self._over = True
        body = message.get("body", b"")
        self.received += len(body)
        return body

    def close(self) -> None:
        """Gives up what was asked for and nobody waits for any more."""
        if isinstance(self._coming, Coroutine):
            self._coming.close()
        self._coming = None

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


def too_large(size: int, limit: int) -> HttpRefusal:
    """The body is longer than anything that could be meant."""
    return HttpRefusal(
        "too-large",
        f"The body has {size} bytes or more, at most {limit} are expected here.",
        "Do both sides use the same model, `sync.fragments` and `wire.up`?",
    )
