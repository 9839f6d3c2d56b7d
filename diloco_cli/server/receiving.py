"""Bodies as they come in: bounded, never silent for long, in batches worth a write."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from diloco_cli.server.denied import Denied

BATCH_BYTES = 1 << 20

AGAIN = "It was cut or changed on its way; send it again."

Batch = list[bytes]
"""Pieces as they arrived; they are written without being copied together."""


async def batches(body: AsyncIterator[bytes], limit: int, silence: float) -> AsyncIterator[Batch]:
    """Yields a body of at most `limit` bytes, as long as something comes every `silence` s."""
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
        if waiting >= BATCH_BYTES:
            yield batch
            batch, waiting = [], 0
    if batch:
        yield batch


def too_large(size: int, limit: int) -> Denied:
    """The body is longer than anything that could be meant."""
    return Denied(
        "too-large",
        f"The body has {size} bytes or more, at most {limit} are expected here.",
        "Do both sides use the same model, `sync.fragments` and `wire.up`?",
    )
