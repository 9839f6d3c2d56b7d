"""The far side of a link: a server on loopback whose manners a test chooses."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from typing import Self

PATIENCE = 60.0
"""Seconds after which a test that waits has failed, however busy the machine is."""

Manner = Callable[["Guest"], None]


class Guest:
    """One connection, seen from the server."""

    def __init__(self, shore: Shore, end: socket.socket) -> None:
        self.shore = shore
        self.end = end

    def read(self) -> bytes:
        return self.end.recv(1 << 20)

    def pieces(self) -> Iterator[bytes]:
        while data := self.read():
            yield data


def echo(guest: Guest) -> None:
    for data in guest.pieces():
        guest.end.sendall(data)


def count(guest: Guest) -> None:
    """Says how much it was sent, after the end."""
    guest.end.sendall(str(sum(map(len, guest.pieces()))).encode())


def sleepy(guest: Guest) -> None:
    """Echoes what starts with `!`; reads nothing else before it is woken, then counts."""
    data = guest.read()
    if data.startswith(b"!"):
        guest.end.sendall(data)
        echo(guest)
    else:
        guest.shore.awake.wait(PATIENCE)
        guest.end.sendall(str(len(data) + sum(map(len, guest.pieces()))).encode())


def pour(size: int) -> Manner:
    def pouring(guest: Guest) -> None:
        guest.end.sendall(bytes(size))

    return pouring


class Shore:
    """A listening server, one thread a guest; leaving the `with` block ends them all."""

    def __init__(self, manner: Manner) -> None:
        self.awake = threading.Event()
        self.broken = threading.Event()
        self._manner = manner
        self._listener = socket.create_server(("127.0.0.1", 0))
        # Small, so that a guest who does not read is soon felt.
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 17)
        self.port: int = self._listener.getsockname()[1]
        self._guests: list[socket.socket] = []
        self._threads = [threading.Thread(target=self._welcome, name="shore")]
        self._threads[0].start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.awake.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._threads[0].join(PATIENCE)
        self._listener.close()
        for guest in self._guests:
            with contextlib.suppress(OSError):
                guest.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(PATIENCE)
            assert not thread.is_alive()

    def _welcome(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                end, _ = self._listener.accept()
                self._guests.append(end)
                thread = threading.Thread(target=self._serve, args=(end,), name="guest")
                self._threads.append(thread)
                thread.start()

    def _serve(self, end: socket.socket) -> None:
        with end:
            try:
                self._manner(Guest(self, end))
            except ConnectionError:
                self.broken.set()
