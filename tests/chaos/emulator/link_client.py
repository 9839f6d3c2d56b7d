"""The near side of a link: how tests call a server through it."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator

from diloco_cli.chaos.emulator.connection import LinkTraffic
from diloco_cli.chaos.emulator.proxy import Proxy, emulated
from diloco_cli.sim.network import Link
from tests.chaos.emulator.far_server import PATIENCE, Manner, Shore

INSTANT = Link()
A_MOMENT = 0.2
"""Seconds in which a byte that is free to pass would have passed; only ever waited for nothing."""


@contextlib.contextmanager
def behind(link: Link | str, manner: Manner) -> Iterator[tuple[Proxy, Shore]]:
    with Shore(manner) as shore, emulated(link, "127.0.0.1", shore.port) as proxy:
        yield proxy, shore


def call(proxy: Proxy) -> socket.socket:
    return socket.create_connection((proxy.host, proxy.port), PATIENCE)


def wait_until(
    proxy: Proxy, condition: Callable[[LinkTraffic], bool], *, seconds: float = 60.0
) -> LinkTraffic:
    """Looks until the traffic is so, and returns it."""
    deadline = time.monotonic() + seconds
    while not condition(traffic := proxy.traffic()):
        assert time.monotonic() < deadline, traffic
        time.sleep(0.001)
    return traffic


def all_of(end: socket.socket) -> bytes:
    return b"".join(iter(lambda: end.recv(1 << 20), b""))


def exchange(end: socket.socket, said: bytes) -> bytes:
    """Sends and reads back as much."""
    sender = threading.Thread(target=end.sendall, args=(said,))
    sender.start()
    answer = b""
    while len(answer) < len(said):
        answer += end.recv(1 << 20)
    sender.join(PATIENCE)
    return answer


@contextlib.contextmanager
def sending(end: socket.socket, size: int, *, last: bool = False) -> Iterator[None]:
    """Sends all the while, whether or not it is ever taken."""

    def send() -> None:
        with contextlib.suppress(OSError):
            end.sendall(bytes(size))
            if last:
                end.shutdown(socket.SHUT_WR)

    sender = threading.Thread(target=send)
    sender.start()
    yield
    sender.join(PATIENCE)
    assert not sender.is_alive()


def silent(end: socket.socket) -> bool:
    """Says that neither bytes nor an end came."""
    end.settimeout(A_MOMENT)
    try:
        end.recv(1)
        return False
    except TimeoutError:
        return True
    finally:
        end.settimeout(PATIENCE)
