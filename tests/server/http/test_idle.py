"""The sweeper from inside; the attacks of tests/security see it from outside."""

from __future__ import annotations

import gc
import os
import socket
from collections import Counter

from diloco_cli.server.http.idle import IdleConnections, connections, cut


def test_whoever_comes_while_the_connections_are_listed_is_not_forgotten():
    met = {("10.0.0.1", 1)}
    newcomer = ("10.0.0.2", 2)

    def clock() -> float:
        met.add(newcomer)  # Asked, and was let in, between two lines of the sweeper.
        return 0.0

    with socket.create_server(("127.0.0.1", 0)) as listening:
        sweeper = IdleConnections(listening.getsockname()[1], met, clock=clock)
        assert sweeper.sweep() == []
    assert met == {newcomer}, "who is gone is forgotten, who has just come is not"


def opened() -> Counter[tuple[int, int]]:
    """What the descriptors of this process stand for, and how often."""
    found: Counter[tuple[int, int]] = Counter()
    for name in os.listdir("/dev/fd"):
        try:
            status = os.fstat(int(name))
        except OSError:
            continue  # The listing's own.
        found[status.st_dev, status.st_ino] += 1
    return found


def test_only_connections_to_the_port_are_listed_and_nothing_stays_open(tmp_path):
    with (
        open(tmp_path / "file", "wb"),
        socket.create_server(("127.0.0.1", 0)) as listening,
        socket.create_server(("127.0.0.1", 0)) as another,
    ):
        port = listening.getsockname()[1]
        gc.collect()  # What other tests left; what is collected later only makes it less.
        before = opened()
        for one in (listening, another):
            with socket.create_connection(one.getsockname()) as client, one.accept()[0] as ours:
                found = list(connections(port))
                expected = [(client.getsockname(), ours.fileno())] if one is listening else []
                assert [(each.peer, each.handle) for each in found] == expected
                for each in found:
                    cut(each)
                    assert client.recv(1) == b"" and not list(connections(port))
        assert not opened() - before
