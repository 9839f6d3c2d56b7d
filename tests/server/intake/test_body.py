"""Bodies as they come in: given up when nothing comes, never because they are slow."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine
from typing import Any, TypeVar

import pytest
from starlette.requests import ClientDisconnect

from diloco_cli.server.intake.body import BATCH_BYTES, LimitedReceive, batches
from diloco_cli.server.refusals import HttpRefusal

T = TypeVar("T")


class Jumping(asyncio.SelectorEventLoop):
    """A loop whose time jumps to the next timer: a minute of silence takes no time."""

    at = 0.0

    def time(self) -> float:
        return self.at

    def _run_once(self) -> None:
        scheduled: Any = self._scheduled  # pyright: ignore[reportAttributeAccessIssue]
        timers = [timer.when() for timer in scheduled if not timer.cancelled()]
        if timers and not self._ready:  # pyright: ignore[reportAttributeAccessIssue]
            self.at = max(self.at, min(timers))
        super()._run_once()  # pyright: ignore[reportAttributeAccessIssue]


def played(work: Coroutine[Any, Any, T], loop: asyncio.AbstractEventLoop) -> T:
    try:
        return loop.run_until_complete(work)
    finally:
        loop.close()


async def dripping(pieces: int, size: int, seconds: float) -> AsyncIterator[bytes]:
    for _ in range(pieces):
        await asyncio.sleep(seconds)
        yield bytes(size)


@pytest.mark.parametrize(("pieces", "size"), [(40, 1 << 20), (16, BATCH_BYTES // 2)])
def test_silence_is_counted_from_the_last_piece_not_from_the_last_batch(pieces, size):
    loop = Jumping()

    async def received(seconds: float) -> int:
        body, total = dripping(pieces, size, seconds), 0
        async for batch in batches(body, pieces * size, 60.0, clock=loop.time):
            total += sum(map(len, batch))
        return total

    assert played(received(50.0), loop) == pieces * size
    loop = Jumping()
    with pytest.raises(HttpRefusal, match="Nothing arrived for 60 s") as denied:
        played(received(70.0), loop)
    assert denied.value.status == 408 and loop.at < 70


class Line:
    """What a server hands on, and when it was asked for it."""

    def __init__(self, *bodies: bytes, then: str = "http.request") -> None:
        self._messages: list[dict[str, Any]] = [
            {"type": "http.request", "body": body, "more_body": True} for body in bodies
        ]
        self._messages.append({"type": then, "body": b"", "more_body": False})
        self.asked = 0

    def __call__(self) -> asyncio.Future[dict[str, Any]]:
        self.asked += 1
        coming = asyncio.get_running_loop().create_future()
        coming.set_result(self._messages.pop(0))
        return coming


def test_the_next_piece_is_on_its_way_while_one_is_looked_at_and_none_is_asked_for_twice():
    async def read() -> None:
        line = Line(b"a", b"bb", b"ccc")
        incoming, seen = LimitedReceive(line), []  # pyright: ignore[reportArgumentType]
        async for piece in incoming:
            seen.append((piece, line.asked))
        assert seen == [(b"a", 2), (b"bb", 3), (b"ccc", 4), (b"", 4)] and incoming.received == 6

    asyncio.run(read())


def test_what_was_asked_for_ahead_is_thrown_away_like_the_rest_of_a_refused_body():
    async def read() -> None:
        line = Line(b"a", b"bb", b"ccc")
        incoming = LimitedReceive(line)  # pyright: ignore[reportArgumentType]
        assert await anext(incoming) == b"a"
        await incoming.linger()
        assert (incoming.received, line.asked) == (6, 4)

    asyncio.run(read())


def test_a_sender_that_is_gone_ends_the_body():
    async def read() -> None:
        incoming = LimitedReceive(Line(b"a", then="http.disconnect"))  # pyright: ignore
        assert await anext(incoming) == b"a"
        with pytest.raises(ClientDisconnect):
            await anext(incoming)
        with pytest.raises(StopAsyncIteration):
            await anext(incoming)

    asyncio.run(read())
