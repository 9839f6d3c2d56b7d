"""Request bodies as they arrive: bounded, with an idle timeout, in batches worth a write."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine

from starlette.requests import ClientDisconnect
from starlette.types import Message, Receive

from diloco_cli.server.refusals import HttpRefusal

BATCH_BYTES = 1 << 20

SLOWEST_BYTES_PER_SECOND = 8192
PATIENCE_SECONDS = 60.0
"""How long a body may take beyond what it takes at the slowest rate."""

LINGER_BYTES = 72 << 20
LINGER_SECONDS = 2.0
"""How much of a body, and for how long, is still read after it was refused: some clients read the
answer only after they have sent everything."""

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
    """Yields a body of at most `limit` bytes; the idle timeout is `silence` seconds.

    Many `short` ones may arrive at a time, so less of each is held in memory.
    """
    reader = _BatchReader(body, limit, silence, clock)
    enough = BATCH_BYTES // 2 if short else BATCH_BYTES
    while batch := await reader.next(enough):
        yield batch


class _BatchReader:
    """Gathers the pieces of a body; there are thousands, so little is done for each."""

    def __init__(
        self, body: AsyncIterator[bytes], limit: int, silence: float, clock: Callable[[], float]
    ) -> None:
        self._body, self._limit, self._silence, self._clock = body, limit, silence, clock
        self._began, self._received = clock(), 0

    async def next(self, enough: int) -> Batch:
        """The next pieces, `enough` bytes or what is left."""
        batch: Batch = []
        size, last_extended = 0, self._clock()
        try:
            async with asyncio.timeout(self._silence) as idle_timeout:
                async for piece in self._body:
                    now = self._clock()
                    self._count(len(piece), now)
                    if now - last_extended > self._silence / 16:
                        last_extended = now
                        idle_timeout.reschedule(asyncio.get_running_loop().time() + self._silence)
                    if piece:
                        batch.append(piece)
                        size += len(piece)
                        if size >= enough:
                            break
        except TimeoutError:
            message = f"Nothing arrived for {self._silence:.0f} s."
            raise HttpRefusal("too-slow", message, AGAIN) from None
        return batch

    def _count(self, size: int, now: float) -> None:
        self._received += size
        if self._received > self._limit:
            raise too_large(self._received, self._limit)
        _check_rate(self._received, now - self._began)


class LimitedReceive:
    """The ASGI messages of one request; counts its bytes and knows whether the body is complete.

    The next piece is requested before the last one is returned, so that it passes through the
    HTTP server's threads meanwhile.
    """

    def __init__(self, receive: Receive) -> None:
        self._receive = receive
        self._next: Awaitable[Message] | None = None
        self._over = False
        self.received = 0

    async def __call__(self) -> Message:
        pending, self._next = self._next or self._receive(), None
        message = await pending
        self._over = message["type"] != "http.request" or not message.get("more_body", False)
        self.received += len(message.get("body", b""))
        return message

    def __aiter__(self) -> LimitedReceive:
        return self

    async def __anext__(self) -> bytes:
        # What `__call__` does, in one step less: there are thousands of pieces.
        if self._over:
            raise StopAsyncIteration
        pending, self._next = self._next or self._receive(), None
        message = await pending
        if message["type"] != "http.request":
            self._over = True
            raise ClientDisconnect
        if message.get("more_body", False):
            self._next = self._receive()
        else:
            self._over = True
        body = message.get("body", b"")
        self.received += len(body)
        return body

    def close(self) -> None:
        """Drops the requested piece that is no longer wanted."""
        if isinstance(self._next, Coroutine):
            self._next.close()
        self._next = None

    async def linger(self) -> None:
        """Discards what still arrives after the answer, for a while and up to a limit.

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


def _check_rate(received: int, seconds: float) -> None:
    """Refuses a body that arrives too slowly to ever end."""
    if seconds > PATIENCE_SECONDS + received / SLOWEST_BYTES_PER_SECOND:
        raise HttpRefusal(
            "too-slow",
            f"{received} bytes in {seconds:.0f} s are less than "
            f"{SLOWEST_BYTES_PER_SECOND} per second.",
            "The client retries by itself; parts that arrived are kept.",
        )


def too_large(size: int, limit: int) -> HttpRefusal:
    """The body is longer than any that this call takes."""
    return HttpRefusal(
        "too-large",
        f"The body has {size} bytes or more, at most {limit} are expected here.",
        "Do both sides use the same model, `sync.fragments` and `wire.up`?",
    )
