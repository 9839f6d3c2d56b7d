"""A server behind its HTTP calls, without sockets."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import httpx

from diloco_cli.server.http.asgi import Guarded, make_app
from diloco_cli.server.settings import ServerSettings
from diloco_cli.wire.frame import open_frame
from diloco_cli.wire.messages import EPOCH_HEADER, RUN_HEADER, WIRE_HEADER, contribution_path
from tests.server.harness import Bench, close_server


@contextmanager
def app_of(bench: Bench) -> Iterator[Guarded]:
    """The HTTP routes of a bench's server."""
    app = make_app(bench.server, events=bench.folder / "events.jsonl", url=lambda: "http://here")
    try:
        yield app
    finally:
        app.audit.close()


@asynccontextmanager
async def client_of(bench: Bench) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a bench's server, without sockets."""
    headers = {RUN_HEADER: bench.run, WIRE_HEADER: "1"}
    with app_of(bench) as app:
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(
            transport=transport, base_url="http://here", headers=headers
        ) as client:
            yield client


@asynccontextmanager
async def served(
    folder: Path, settings: ServerSettings | None = None, *, joined: bool = False
) -> AsyncIterator[tuple[Bench, httpx.AsyncClient]]:
    """A bench behind its HTTP routes; `joined`: its regions have joined."""
    bench = Bench(folder, settings)
    if joined:
        await bench.join()
    async with client_of(bench) as client:
        yield bench, client
    await close_server(bench.server)


async def put(
    client: httpx.AsyncClient, data: Any, *, epoch: int = 1, path: str = "", length: int = 0
) -> httpx.Response:
    if not path:
        about = open_frame(data).header
        path = contribution_path(about.fragment, about.region, about.base, about.clock)
    headers = {EPOCH_HEADER: str(epoch)}
    if length:
        headers["content-length"] = str(length)
    return await client.put(path, content=data, headers=headers)


def error(response: httpx.Response) -> dict[str, Any]:
    """The error of an answer, which has all its parts."""
    found = response.json()["error"]
    assert set(found) == {"code", "message", "hint"} and found["message"]
    return found
