"""A link put between those who call and one server: the part that runs in the event loop.

    client ── up ──▶ server        OPEN, bytes, END      a connection's two flows
    client ◀─ down ─ server        OPENED, bytes, END    travel the two roads

A connection costs a round trip before its first byte, as it does on a real link. Three
things differ from real life. The kernel greets a client at once, so during an outage a
client's `connect` succeeds and then hears nothing. Connections are at full speed from
their first byte. And no packet is ever lost: a link breaks connections or none at all.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import socket
import struct
from dataclasses import dataclass, replace

from diloco_cli.chaos.emulator.lane import ConnectionSignal, EmulatedLane, Flow
from diloco_cli.sim.network import Link

Address = tuple[str, int]

AT_ONCE = struct.pack("ii", 1, 0)
"""SO_LINGER on, 0 s: closing throws unsent bytes away and tells the other end with a reset."""

LEAST_BUFFER = 64 << 10
MOST_BUFFER = 1 << 20


@dataclass(frozen=True, slots=True)
class LinkTraffic:
    """What has passed so far, in bytes of the connections."""

    up: int
    """From clients, entered the link; also what was lost on the way by a reset."""

    up_arrived: int
    down: int
    down_arrived: int
    connections: int
    """Ever accepted."""

    open: int
    resets: int
    """Connections that were broken on purpose."""


class EmulatedConnection:
    """One client, one call of ours to the server, and a flow each way."""

    def __init__(self, crossing: EmulatedLink, client: socket.socket) -> None:
        self._crossing = crossing
        self._client = client
        self._server: socket.socket | None = None
        self._calling: asyncio.Task[None] | None = None
        self._up = Flow(crossing.up, self)
        self._down = Flow(crossing.down, self)
        self._done: set[Flow] = set()
        self._up.source = self._down.sink = client
        crossing.up.say(self._up, ConnectionSignal.OPEN)

    def heard(self, flow: Flow, mark: ConnectionSignal) -> None:
        """Does what the near end did, at the far end."""
        if mark is ConnectionSignal.OPEN:
            self._calling = self._crossing.loop.create_task(self._call())
        elif mark is ConnectionSignal.OPENED:
            self._up.listen()
        elif mark is ConnectionSignal.END:
            flow.end()
        else:
            self.abort()

    def ended(self, flow: Flow) -> None:
        """Closes for good once both sides have said that they are done."""
        self._done.add(flow)
        if len(self._done) == 2:
            self._close()

    def failed(self, flow: Flow) -> None:
        """Tells the sender that nobody takes its bytes: the news travels back like any other."""
        flow.close()
        back = self._down if flow is self._up else self._up
        if back.closed:
            self.abort()
        else:
            back.road.say(back, ConnectionSignal.BROKEN)

    def abort(self) -> None:
        """Breaks both sides at once; what is on the way is lost."""
        for end in (self._client, self._server):
            if end is not None:
                with contextlib.suppress(OSError):
                    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, AT_ONCE)
        self._close()

    async def _call(self) -> None:
        server = tuned(socket.socket(self._crossing.family), self._crossing.link)
        try:
            await self._crossing.loop.sock_connect(server, self._crossing.target)
        except BaseException as error:
            server.close()
            if not isinstance(error, OSError):
                raise
            self._down.road.say(self._down, ConnectionSignal.BROKEN)
            return
        self._server = self._up.sink = self._down.source = server
        self._down.road.say(self._down, ConnectionSignal.OPENED)
        self._down.listen()

    def _close(self) -> None:
        if self._calling is not None:
            self._calling.cancel()
        for flow in (self._up, self._down):
            flow.close()
        for end in (self._client, self._server):
            if end is not None:
                end.close()
        self._crossing.left(self)


class EmulatedLink:
    """The two roads, the connections on them, and what is done to them."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, link: Link, back: Link, target: Address
    ) -> None:
        self.loop = loop
        self.link = link
        resolved = socket.getaddrinfo(*target, type=socket.SOCK_STREAM)[0]
        self.family, self.target = resolved[0], resolved[4]
        self.up = EmulatedLane(loop, _steady(link))
        self.down = EmulatedLane(loop, _steady(back))
        self._listener: socket.socket | None = None
        self._connections: set[EmulatedConnection] = set()
        self._accepted = 0
        self._resets = 0
        self._timers: list[asyncio.TimerHandle] = []
        self._out = False
        self._schedule(link)

    def traffic(self) -> LinkTraffic:
        return LinkTraffic(
            up=self.up.entered,
            up_arrived=self.up.arrived,
            down=self.down.entered,
            down_arrived=self.down.arrived,
            connections=self._accepted,
            open=len(self._connections),
            resets=self._resets,
        )

    def accept_from(self, listener: socket.socket) -> None:
        """Takes in whoever calls there."""
        self._listener = listener
        self.loop.add_reader(listener, self._accept)

    def accept_nobody(self) -> None:
        """Hangs up: whoever calls now is refused by the kernel."""
        if self._listener is not None:
            self.loop.remove_reader(self._listener)
            self._listener.close()
            self._listener = None

    def shape(self, link: Link, back: Link) -> None:
        """Makes it another link from now on, with its own outages and resets."""
        self.link = link
        self.up.shape(_steady(link))
        self.down.shape(_steady(back))
        self._schedule(link)

    def reset_all(self) -> int:
        """Breaks every connection; says how many there were."""
        broken = list(self._connections)
        self._resets += len(broken)
        for connection in broken:
            connection.abort()
        return len(broken)

    def left(self, connection: EmulatedConnection) -> None:
        self._connections.discard(connection)

    def close(self) -> None:
        self.accept_nobody()
        for timer in self._timers:
            timer.cancel()
        for connection in list(self._connections):
            connection.abort()
        self.up.close()
        self.down.close()

    def _accept(self) -> None:
        assert self._listener is not None
        with contextlib.suppress(BlockingIOError, InterruptedError, ConnectionAbortedError):
            while True:
                client, _ = self._listener.accept()
                self._accepted += 1
                self._connections.add(EmulatedConnection(self, tuned(client, self.link)))

    def _schedule(self, link: Link) -> None:
        for timer in self._timers:
            timer.cancel()
        if self._out:
            self._outage(False)
        now = self.loop.time()
        self._timers = [
            self.loop.call_at(now + at, self._outage, out)
            for begin, end in link.outages
            for at, out in ((begin, True), (end, False))
        ]
        if link.reset_every is not None:
            self._timers.append(self.loop.call_at(now + link.reset_every, self._reset, link, now))

    def _outage(self, out: bool) -> None:
        self._out = out
        for road in (self.up, self.down):
            if out:
                road.stop("outage")
            else:
                road.go("outage")

    def _reset(self, link: Link, began: float) -> None:
        self.reset_all()
        due = link.next_reset(now=self.loop.time() - began)
        assert due is not None
        self._timers[-1] = self.loop.call_at(began + due, self._reset, link, began)


def _steady(link: Link) -> Link:
    """The link without its outages: the crossing stops the roads' clocks itself."""
    return replace(link, outages=())


def tuned(end: socket.socket, link: Link) -> socket.socket:
    """Keeps the kernel's own buffers small beside the link's, so that senders feel the link."""
    end.setblocking(False)
    end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if not math.isinf(link.rate):
        size = int(min(MOST_BUFFER, max(LEAST_BUFFER, link.rate / 8 * 0.02)))
        end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, size)
        end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, size)
    return end
