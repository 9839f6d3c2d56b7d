"""HTTP/2 and HTTP/1.1 on one port, in this process.

granian runs embedded: its Rust threads move the bytes, the application runs on our event
loop, so the state has one owner and no lock. We bind the socket ourselves: granian would
share a port with any other process that shares it, and a taken port must be an error.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import threading
import time
from contextlib import suppress
from typing import Any

import psutil
from granian._granian import SocketHolder
from granian.constants import HTTPModes, Interfaces
from granian.http import HTTP2Settings
from granian.server.embed import Server

from diloco_cli.errors import RunFailed, SpecError

BACKLOG = 1024

# Windows bound the bytes on the way in one direction: at 100 ms, 64 MiB are 5 Gbit/s.
# Measured with 1 MiB, granian's default: 12.5 MB/s at 50 ms, whatever the line can do.
HTTP2 = HTTP2Settings(
    initial_stream_window_size=64 << 20,
    initial_connection_window_size=256 << 20,
    max_frame_size=256 << 10,
    max_send_buffer_size=4 << 20,
    max_headers_size=64 << 10,
)


def bind(listen: str, *, prefer: int = 0) -> socket.socket:
    """Takes HOST:PORT, or says why it cannot be had.

    With port 0 the port `prefer` is tried first, so that a server that was killed comes
    back where its regions look for it.
    """
    host, _, port = listen.rpartition(":")
    host = host.strip("[]") or "127.0.0.1"
    try:
        wanted = int(port)
        kind, *_, where = socket.getaddrinfo(host, wanted, type=socket.SOCK_STREAM)[0]
    except (ValueError, OverflowError, socket.gaierror) as error:
        raise SpecError(
            f"server.listen: {listen} is no address to listen on: {error}.",
            hint="It looks like 127.0.0.1:8080, or 0.0.0.0:0 for any free port.",
        ) from None
    if wanted == 0 and prefer:
        with suppress(OSError):
            return _bound(kind, (where[0], prefer, *where[2:]))
    try:
        return _bound(kind, where)
    except OSError as error:
        raise SpecError(
            f"server.listen: {listen} cannot be used: {error.strerror}.",
            hint=f"Stop what listens there, or set server.listen to another port ({host}:0 "
            "takes a free one).",
        ) from None


def _bound(kind: int, where: Any) -> socket.socket:
    taken = socket.socket(kind, socket.SOCK_STREAM)
    try:
        # Connections of the last server linger in TIME_WAIT; they are no reason to fail.
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        # Connections inherit it. Without, the end of a streamed answer waits 40 ms for an
        # acknowledgement that the client delays.
        taken.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        taken.bind(where)
        taken.listen(BACKLOG)
    except BaseException:
        taken.close()
        raise
    return taken


def url_of(taken: socket.socket) -> str:
    """Where this machine reaches the socket."""
    host, port = _reached(taken)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _reached(taken: socket.socket) -> tuple[str, int]:
    host, port = taken.getsockname()[:2]
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(str(host), str(host)), port


class Listener(Server):
    """Serves one ASGI application on a socket that is already bound."""

    def __init__(self, app: Any, taken: socket.socket) -> None:
        self._taken = taken
        self._host, self._port = _reached(taken)
        self._others = _threads()
        self._serving: asyncio.Task[None] | None = None
        super().__init__(
            app,
            port=self._port,
            interface=Interfaces.ASGINL,
            http=HTTPModes.auto,
            websockets=False,
            backlog=BACKLOG,
            http2_settings=HTTP2,
            log_enabled=False,
        )

    def _init_shared_socket(self) -> None:
        holder: Any = SocketHolder  # Its arguments are not in granian's own type hints.
        # It closes the socket in the end, so the socket is no longer ours.
        self._ssp, self._shd = None, holder(self._taken.detach(), False, BACKLOG)

    @property
    def serving(self) -> asyncio.Task[None]:
        """Ends when nothing is listened to any more."""
        assert self._serving is not None
        return self._serving

    async def start(self) -> None:
        """Returns once requests are answered."""
        self._serving = asyncio.create_task(self.serve())
        deadline = time.monotonic() + 10.0
        while not await _healthy(self._host, self._port):
            if self._serving.done() or time.monotonic() > deadline:
                where = f"{self._host}:{self._port}"
                raise RunFailed(f"The server on {where} does not answer its own requests.")
            await asyncio.sleep(0.01)

    async def end(self, *, seconds: float = 2.0) -> None:
        """Stops listening, tells clients to go, and cuts those that do not hear."""
        self._taken.close()
        if self._serving is None:
            return
        self.stop()
        await asyncio.wait({self._serving}, timeout=0.2)
        # A client that sleeps between two calls never answers the farewell.
        self._cut()
        await asyncio.wait({self._serving}, timeout=seconds)
        self._serving.cancel()
        # The interpreter must not end while granian's threads still call into it.
        deadline = time.monotonic() + seconds
        while _threads() - self._others and time.monotonic() < deadline:
            await asyncio.sleep(0.01)

    def _cut(self) -> None:
        for connection in psutil.Process().net_connections("tcp"):
            mine = connection.laddr and connection.laddr.port == self._port
            if mine and connection.status == psutil.CONN_ESTABLISHED and connection.fd >= 0:
                with suppress(OSError), socket.socket(fileno=os.dup(connection.fd)) as cut:
                    cut.shutdown(socket.SHUT_RDWR)


def _threads() -> set[int]:
    """Threads of this process that Python did not start."""
    if sys.platform != "linux":
        return set()
    pythons = {thread.native_id for thread in threading.enumerate()}
    return {int(name) for name in os.listdir("/proc/self/task")} - pythons


async def _healthy(host: str, port: int) -> bool:
    try:
        reader, writer = await asyncio.open_connection(host, port)
    except OSError:
        return False
    try:
        writer.write(b"GET /healthz HTTP/1.1\r\nhost: diloco\r\nconnection: close\r\n\r\n")
        async with asyncio.timeout(2.0):
            return (await reader.readline()).startswith(b"HTTP/1.1 200")
    except (OSError, TimeoutError):
        return False
    finally:
        writer.close()
