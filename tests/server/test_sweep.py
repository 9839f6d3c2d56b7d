"""The sweeper from inside; the attacks of tests/security see it from outside."""

from __future__ import annotations

import socket

from diloco_cli.server.sweep import Sweeper


def test_whoever_comes_while_the_connections_are_listed_is_not_forgotten():
    met = {("10.0.0.1", 1)}
    newcomer = ("10.0.0.2", 2)

    def clock() -> float:
        met.add(newcomer)  # Asked, and was let in, between two lines of the sweeper.
        return 0.0

    with socket.create_server(("127.0.0.1", 0)) as listening:
        sweeper = Sweeper(listening.getsockname()[1], met, clock=clock)
        assert sweeper.sweep() == 0
    assert met == {newcomer}, "who is gone is forgotten, who has just come is not"
