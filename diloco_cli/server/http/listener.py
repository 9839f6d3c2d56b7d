"""HTTP/2 and HTTP/1.1 on one port, in this process.

granian runs embedded: its Rust threads move the bytes, the application runs on our event
loop, so the state has one owner and no lock. We bind the socket ourselves: granian would
share a port with any other process that shares it, and a taken port must be an error.
"""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from granian._granian import SocketHolder
from granian.constants import HTTPModes, Interfaces, SSLProtocols
from granian.http import HTTP1Settings, HTTP2Settings
from granian.server.embed import Server

from diloco_cli.errors import RunFailed, SpecError
from diloco_cli.server.http.idle import connections, cut

BACKLOG = 1024

START_SECONDS = 10.0
"""A listener that answers nothing for so long is given up."""

# Windows bound the bytes on the way in one direction: at 100 ms, four connections of 8 MiB each
# are 2.7 Gbit/s, and few kernels buffer as much. Measured with 1 MiB, granian's default: 12.5 MB/s
# at 50 ms, whatever the line can do; with 64 MiB an upload on one machine is a seventh slower,
# because what has arrived is cold when its turn comes, and a sender may fill that much memory.
# What arrives changes threads three times a frame; in frames half as long, an upload costs
# a sixth more. Much longer ones would be memory that is fresh from the system each time.
HTTP2 = HTTP2Settings(
    initial_stream_window_size=8 << 20,
    initial_connection_window_size=32 << 20,
    max_frame_size=512 << 10,
    max_send_buffer_size=4 << 20,
    max_headers_size=64 << 10,
    max_concurrent_streams=100,
)
HTTP1 = HTTP1Settings(header_read_timeout=15_000, max_buffer_size=64 << 10)


def bind(listen: str, *, prefer: int = 0, key: str = "server.listen") -> socket.socket:
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
            f"{key}: {listen} is no address to listen on: {error}.",
            hint="It looks like 127.0.0.1:8080, or 0.0.0.0:0 for any free port.",
        ) from None
    if wanted == 0 and prefer:
        with suppress(OSError):
            return _bound(kind, (where[0], prefer, *where[2:]))
    try:
        return _bound(kind, where)
    except OSError as error:
        raise SpecError(
            f"{key}: {listen} cannot be used: {error.strerror}.",
            hint=f"Stop what listens there, or set {key} to another port ({host}:0 "
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
        # A socket and its duplicates block together, or none does; one that began to would hold
        # up the listener that has another, in whose event loop it waits for connections.
        taken.setblocking(False)
        taken.bind(where)
        taken.listen(BACKLOG)
    except BaseException:
        taken.close()
        raise
    return taken


def url_of(taken: socket.socket, *, scheme: str = "http") -> str:
    """Where this machine reaches the socket."""
    host, port = _reached(taken)
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _reached(taken: socket.socket) -> tuple[str, int]:
    host, port = taken.getsockname()[:2]
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(str(host), str(host)), port


class Listener(Server):
    """Serves one ASGI application on a socket that is already bound.

    `files` are the server's certificate, its key, whom it believes, and whom no longer; with
    them only TLS 1.3 is spoken, and only with who has a certificate.
    """

    def __init__(
        self, app: Any, taken: socket.socket, files: tuple[Path, Path, Path, Path] | None = None
    ) -> None:
        self._taken, self._tls = taken, files is not None
        certificate, key, ca, revoked = files or (None, None, None, None)
        self._host, self._port = _reached(taken)
        self._others, self._own = _threads(), set[int]()
        self._serving: asyncio.Task[None] | None = None
        super().__init__(
            app,
            port=self._port,
            interface=Interfaces.ASGINL,
            http=HTTPModes.auto,
            websockets=False,
            backlog=BACKLOG,
            http1_settings=HTTP1,
            http2_settings=HTTP2,
            log_enabled=False,
            ssl_cert=certificate,
            ssl_key=key,
            ssl_ca=ca,
            ssl_crl=[revoked] if revoked else [],
            ssl_client_verify=files is not None,
            ssl_protocol_min=SSLProtocols.tls13,
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
        deadline = time.monotonic() + START_SECONDS
        healthy = _answers_tls if self._tls else _healthy
        answered = False
        while not (answered or self._serving.done() or time.monotonic() > deadline):
            await asyncio.sleep(0.01)
            answered = await healthy(self._host, self._port)
        # What answered may be the listener before this one, which has the same port.
        if self._serving.done() or not answered:
            raise RunFailed(self._given_up())
        self._own = _threads() - self._others

    def _given_up(self) -> str:
        """Says why it is given up, and lets nothing of it go on."""
        self.stop()
        ended = self._serving if self._serving and self._serving.done() else None
        reason = f": {error}" if ended and (error := ended.exception()) else ""
        return f"The server on {self._host}:{self._port} does not answer its own requests{reason}."

    async def end(self, *, seconds: float = 2.0, alone: bool = True) -> None:
        """Stops listening, tells clients to go, and cuts those that do not hear.

        Not `alone`, another listener has the port already: it goes on with whoever comes later.
        """
        self._taken.close()
        if self._serving is None:
            return
        own = {connection.peer for connection in connections(self._port)} if not alone else None
        self.stop()
        await asyncio.wait({self._serving}, timeout=0.2)
        # A client that sleeps between two calls never answers GOAWAY.
        for connection in connections(self._port):
            if own is None or connection.peer in own:
                cut(connection)
        await asyncio.wait({self._serving}, timeout=seconds)
        self._serving.cancel()
        # The interpreter must not end while granian's threads still call into it.
        deadline = time.monotonic() + seconds
        while self._left(alone) and time.monotonic() < deadline:
            if not alone:
                # It notices with the next connection that it takes, and drops that.
                await _knock(self._host, self._port)
            await asyncio.sleep(0.01)

    def _left(self, alone: bool) -> set[int]:
        """Threads that may still call into Python, or take up a connection."""
        return _threads() - self._others if alone else _threads() & self._own


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
            # 503 is an answer, too: a server whose disk is full has much to say.
            return (await reader.readline()).startswith((b"HTTP/1.1 200", b"HTTP/1.1 503"))
    except (OSError, TimeoutError):
        return False
    finally:
        writer.close()


async def _knock(host: str, port: int) -> None:
    with suppress(OSError):
        _, writer = await asyncio.open_connection(host, port)
        writer.close()


async def _answers_tls(host: str, port: int) -> bool:
    """Whether a handshake gets an answer; we have no certificate to go further."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    # It is our own socket on this host, and nothing is said on it.
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        async with asyncio.timeout(2.0):
            _, writer = await asyncio.open_connection(host, port, ssl=context)
        writer.close()
        return True
    except (OSError, TimeoutError):
        return False
