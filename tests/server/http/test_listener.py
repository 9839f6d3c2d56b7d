"""Two listeners of one port, as while certificates are reloaded: a failure of the second one
must neither pass for a start nor keep the first from answering."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from diloco_cli.errors import RunFailed
from diloco_cli.server.http import listener
from diloco_cli.server.http.listener import Listener, bind
from tests.server.harness import in_a_loop


async def app(scope: Any, receive: Any, send: Any) -> None:
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"here"})


async def answer(taken: socket.socket) -> bytes:
    reader, writer = await asyncio.open_connection(*taken.getsockname()[:2])
    writer.write(b"GET / HTTP/1.1\r\nhost: here\r\nconnection: close\r\n\r\n")
    try:
        async with asyncio.timeout(20):
            return (await reader.read())[-4:]
    finally:
        writer.close()


@asynccontextmanager
async def listening() -> AsyncIterator[socket.socket]:
    """A port with a listener that answers."""
    taken = bind("127.0.0.1:0")
    first = Listener(app, taken.dup())
    await first.start()
    assert await answer(taken) == b"here"
    yield taken
    await first.end()
    taken.close()


@in_a_loop
async def test_a_listener_that_is_never_started_keeps_nobody_from_answering():
    async with listening() as taken:
        second = Listener(app, taken.dup())
        assert [await answer(taken) for _ in range(2)] == [b"here"] * 2
        await second.end()


@in_a_loop
async def test_a_listener_that_failed_has_not_started_though_its_port_answers():
    def fail() -> None:
        raise OSError("no room for its threads")

    async with listening() as taken:
        second = Listener(app, taken.dup())
        second.on_startup(fail)
        with pytest.raises(RunFailed, match=r"does not answer.*: no room for its threads"):
            await second.start()
        assert await answer(taken) == b"here"


@in_a_loop
async def test_a_listener_that_was_given_up_ends(monkeypatch: pytest.MonkeyPatch):
    async with listening() as taken:
        second = Listener(app, taken.dup())
        with monkeypatch.context() as patched, pytest.raises(RunFailed):
            patched.setattr(listener, "START_SECONDS", 0.0)
            await second.start()
        async with asyncio.timeout(20):
            await second.serving
        assert await answer(taken) == b"here"
