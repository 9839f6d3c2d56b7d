"""Connections that only take up room: who never says anything useful, and who fell silent.

The HTTP server under us gives a connection as long as it likes before its first request, and
between two. So we look at the sockets themselves from time to time:

    nobody has asked on it who may, for `STRANGER_SECONDS`   cut; it cannot be a region
    more than `MOST_STRANGERS` of those at once              the oldest are cut
    nothing came and nothing went for `idle` seconds         cut; a region connects again
"""

from __future__ import annotations

import os
import socket
import struct
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass

SWEEP_SECONDS = 2.0
STRANGER_SECONDS = 20.0
MOST_STRANGERS = 256
IDLE_SECONDS = 150.0
"""Longer than any wait for news, and than the silence between two signs of life of a stream."""

ESTABLISHED = 1
"""As the kernel's TCP_INFO says it."""

Peer = tuple[str, int]


@dataclass(frozen=True)
class OpenConnection:
    peer: Peer
    handle: int
    idle: float
    """Seconds since a byte came or went."""


class IdleConnections:
    """Looks after the connections of one port."""

    def __init__(
        self,
        port: int,
        met: set[Peer],
        *,
        idle: float = IDLE_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._port, self._met, self._idle, self._clock = port, met, idle, clock
        self._since: dict[Peer, float] = {}

    def sweep(self) -> list[Peer]:
        """Cuts what only takes up room; says whose connections those were."""
        met = set(self._met)  # Whoever comes while we look is not gone.
        now, open_now = self._clock(), list(connections(self._port))
        there = {connection.peer for connection in open_now}
        self._since = {peer: self._since.get(peer, now) for peer in there}
        self._met -= met - there
        strangers = [connection for connection in open_now if connection.peer not in self._met]
        strangers.sort(key=lambda connection: self._since[connection.peer])
        spare = max(0, len(strangers) - MOST_STRANGERS)
        late = [
            connection
            for connection in strangers[spare:]
            if now - self._since[connection.peer] > STRANGER_SECONDS
        ]
        idle = [
            connection
            for connection in open_now
            if connection.peer in self._met and connection.idle > self._idle
        ]
        unwanted = strangers[:spare] + late + idle
        for connection in unwanted:
            cut(connection)
        return [connection.peer for connection in unwanted]


def connections(port: int) -> Iterator[OpenConnection]:
    """Lists this process's connections to one of its ports.

    By its own handles: the system's list of all connections has those of everybody, and
    reading it keeps the server from answering for as long as that takes.
    """
    for name in os.listdir("/dev/fd"):
        # Not open any more, no socket, or one that only listens.
        with suppress(OSError), _held(int(name)) as held:
            if held.family in (socket.AF_INET, socket.AF_INET6):
                peer, own = held.getpeername(), held.getsockname()
                if own[1] == port and (idle := _idle(held)) is not None:
                    yield OpenConnection(peer[:2], int(name), idle)


def cut(connection: OpenConnection) -> None:
    """Ends a connection, unless its handle is by now that of another."""
    with suppress(OSError), _held(connection.handle) as held:
        if held.getpeername()[:2] == connection.peer:
            held.shutdown(socket.SHUT_RDWR)


def _held(handle: int) -> socket.socket:
    """The socket behind a handle, kept from becoming another one while it is looked at."""
    copy = os.dup(handle)
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise


def _idle(held: socket.socket) -> float | None:
    """Says for how long nothing came and nothing went; None when one side has ended it."""
    if sys.platform != "linux":
        return 0.0  # How long is not known there; strangers are cut all the same.
    info = held.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 60)
    sent, received = struct.unpack_from("=I", info, 44)[0], struct.unpack_from("=I", info, 52)[0]
    return min(sent, received) / 1000 if info[0] == ESTABLISHED else None
