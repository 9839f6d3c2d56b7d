"""Messages between two hosts of a region that know the same secret.

A message is a JSON object and any number of bytes. Before the first one both sides prove that
they know the secret, each with a number that the other has drawn, so that nothing overheard can
be used again. What follows is neither encrypted nor signed: the network between the hosts of a
region carries gradients and weights in the clear anyway, as JAX sends them.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import json
import secrets
import socket
import struct
from collections.abc import Mapping
from typing import Any

from diloco_cli.errors import LinkError, SpecError, WireError

GREETING = b"diloco hosts 1\n"
NONCE = PROOF = 32
HANDSHAKE_SECONDS = 20.0
LENGTHS = struct.Struct(">IQ")
LONGEST_HEADER = 16 << 20

_SAME_SECRET = (
    "All hosts of a region need the same DILOCO_HOSTS_SECRET, the same token of the region, or "
    "the same run folder; and --coordinator must name host 0 of this region."
)


class ConnectionClosed(LinkError):
    """The other host is gone, or has said all it had to say."""


class HostConnection:
    """A connection whose two ends have proved who they are."""

    def __init__(self, connected: socket.socket) -> None:
        self._socket = connected
        connected.settimeout(None)
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _notice_dead_hosts(connected)

    def send(self, message: Mapping[str, Any], values: Any = b"") -> None:
        """Sends one message; only one thread at a time."""
        header = json.dumps(message, separators=(",", ":")).encode()
        body = memoryview(values).cast("B") if len(values) else memoryview(b"")
        try:
            self._socket.sendall(LENGTHS.pack(len(header), body.nbytes) + header)
            if body.nbytes:
                self._socket.sendall(body)
        except OSError as error:
            raise ConnectionClosed(f"the other host is gone: {error.strerror}") from None

    def receive(self) -> tuple[dict[str, Any], memoryview]:
        """Waits for the next message."""
        length, size = LENGTHS.unpack(_exactly(self._socket, LENGTHS.size))
        if length > LONGEST_HEADER:
            raise WireError(f"A message between hosts begins with {length} bytes of header.")
        message = json.loads(bytes(_exactly(self._socket, length)))
        return message, _exactly(self._socket, size)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()


def connect(address: tuple[str, int], secret: bytes, *, seconds: float) -> HostConnection:
    """Connects to host 0; LinkError while nobody listens there."""
    try:
        connected = socket.create_connection(address, timeout=seconds)
    except OSError as error:
        where, reason = join_address(*address), error.strerror or str(error)
        raise LinkError(
            f"Nobody listens at {where}: {reason}.",
            hint="Is host 0 of this region running, and is this its --coordinator?",
        ) from None
    try:
        connected.settimeout(HANDSHAKE_SECONDS)
        ours = secrets.token_bytes(NONCE)
        connected.sendall(GREETING + ours)
        theirs = bytes(_exactly(connected, NONCE))
        if not _is(_exactly(connected, PROOF), secret, b"listener", ours, theirs):
            raise WireError(
                f"Whoever listens at {join_address(*address)} does not know this region's secret.",
                hint=_SAME_SECRET,
            )
        connected.sendall(_proof(secret, b"caller", ours, theirs))
        return HostConnection(connected)
    except (OSError, ConnectionClosed) as error:
        connected.close()
        raise LinkError(
            f"{join_address(*address)} broke the connection off: {error}.", hint=_SAME_SECRET
        ) from None
    except BaseException:
        connected.close()
        raise


def accept(connected: socket.socket, secret: bytes) -> HostConnection:
    """Lets a caller in that knows the secret; WireError for any other."""
    connected.settimeout(HANDSHAKE_SECONDS)
    if bytes(_exactly(connected, len(GREETING))) != GREETING:
        raise WireError("A caller does not speak this protocol.")
    theirs, ours = bytes(_exactly(connected, NONCE)), secrets.token_bytes(NONCE)
    connected.sendall(ours + _proof(secret, b"listener", theirs, ours))
    if not _is(_exactly(connected, PROOF), secret, b"caller", theirs, ours):
        raise WireError("A caller does not know this region's secret.", hint=_SAME_SECRET)
    return HostConnection(connected)


def split_address(text: str) -> tuple[str, int]:
    """Reads HOST:PORT."""
    host, _, port = text.rpartition(":")
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    if not host or not port.isascii() or not port.isdigit() or not 0 < int(port) < 2**16:
        raise SpecError(
            f"--coordinator {text!r} is not HOST:PORT.",
            hint="The address of host 0 and a free port of it, as in node1:7351.",
        )
    return host, int(port)


def join_address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def _proof(secret: bytes, who: bytes, caller: bytes, listener: bytes) -> bytes:
    return hmac.digest(secret, GREETING + who + caller + listener, hashlib.sha256)


def _is(proof: memoryview, secret: bytes, who: bytes, caller: bytes, listener: bytes) -> bool:
    return hmac.compare_digest(bytes(proof), _proof(secret, who, caller, listener))


def _exactly(connected: socket.socket, size: int) -> memoryview:
    buffer = memoryview(bytearray(size))
    at = 0
    while at < size:
        try:
            got = connected.recv_into(buffer[at:])
        except OSError as error:
            raise ConnectionClosed(f"the other host is gone: {error}") from None
        if not got:
            raise ConnectionClosed("the other host has closed the connection")
        at += got
    return buffer


def _notice_dead_hosts(connected: socket.socket) -> None:
    """A host without power sends nothing: ask every few seconds whether it is there."""
    connected.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for name, value in (("TCP_KEEPIDLE", 10), ("TCP_KEEPINTVL", 5), ("TCP_KEEPCNT", 4)):
        if option := getattr(socket, name, None):
            with contextlib.suppress(OSError):
                connected.setsockopt(socket.IPPROTO_TCP, option, value)
    if option := getattr(socket, "TCP_USER_TIMEOUT", None):
        with contextlib.suppress(OSError):
            connected.setsockopt(socket.IPPROTO_TCP, option, 30_000)
