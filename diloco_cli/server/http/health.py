"""`/healthz` on a port of its own, without credentials: for probes that cannot show any.

It says whether contributions can be acknowledged, and if not, why. Nothing else is served, in
plain HTTP/1.1, one request to a connection.
"""

from __future__ import annotations

import asyncio
import json
import socket
from contextlib import suppress

from diloco_cli.server.rounds.state import State

PATH = b"/healthz"
MOST_BYTES = 4096
SECONDS = 5.0
MOST_AT_ONCE = 32


def health_of(state: State) -> tuple[int, dict[str, object]]:
    """The status code and the document of `/healthz`."""
    failed = f"{type(state.failure).__name__}: {state.failure}" if state.failure else ""
    trouble = state.trouble or failed
    return (503 if trouble else 200), {"ok": not trouble, "trouble": trouble}


class HealthPort:
    """Answers probes for as long as the server lives."""

    def __init__(self, state: State, taken: socket.socket) -> None:
        self._state, self._taken = state, taken
        self._room = asyncio.Semaphore(MOST_AT_ONCE)
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._answer, sock=self._taken, limit=MOST_BYTES)

    async def end(self) -> None:
        if self._server:
            self._server.close()

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._room.locked():
            # Waiting, it would keep a descriptor, and strangers could take all that there are.
            writer.transport.abort()
            return
        with suppress(
            OSError, TimeoutError, asyncio.IncompleteReadError, asyncio.LimitOverrunError
        ):
            async with self._room, asyncio.timeout(SECONDS):
                head = await reader.readuntil(b"\r\n\r\n")
                writer.write(self._reply(head))
                await writer.drain()
        writer.close()

    def _reply(self, head: bytes) -> bytes:
        words = head.split(b"\r\n", 1)[0].split(b" ")
        known = len(words) == 3 and words[0] in (b"GET", b"HEAD")
        known = known and words[1].partition(b"?")[0] == PATH
        status, document = health_of(self._state) if known else (404, {"ok": False})
        body = json.dumps(document).encode() + b"\n"
        start = (
            f"HTTP/1.1 {status} \r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\ncache-control: no-store\r\nconnection: close\r\n\r\n"
        )
        return start.encode() + (b"" if words[0] == b"HEAD" else body)
