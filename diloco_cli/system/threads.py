"""How does a coroutine wait for work in a thread, which cannot be cancelled?"""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

T = TypeVar("T")


async def result_of(work: asyncio.Future[T]) -> T:
    """What the work gives; a cancelled caller is cancelled only when it is over."""
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        await wait_uncancelled(work)
        raise
    finally:
        del work  # A traceback that refers to it would keep its result.


async def wait_uncancelled(work: asyncio.Future[Any]) -> bool:
    """Waits until the work is over; says whether the caller was cancelled meanwhile."""
    cancelled = False
    while not work.done():
        try:
            await asyncio.wait([work])
        except asyncio.CancelledError:
            cancelled = True
    return cancelled
