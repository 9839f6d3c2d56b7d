"""Bytes of many connections travel one road: a lane of a link, between real sockets.

    source ──recv, if the queue has room──▶ on the way ──when due──▶ backlog ──send──▶ sink
       ▲                                                                                │
       └──────────── confirmed one delay later; until then it counts against the window ┘

A road reads from a source only what its lane takes now, in turns, a few milliseconds of
line at a time. So nobody's bulk delays another's heartbeat by more than the queue, and a
sender that is too quick feels its own socket fill up. A receiver that stalls holds at
most one window of its own connection and nobody else's.

Opening, closing and breaking a connection travel the same road behind the bytes: during
an outage the far end does not learn of them either.

Everything here runs in one event loop's thread.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
import math
import socket
from collections import deque
from typing import Protocol

from diloco_cli.sim.network import Lane, Link

Payload = bytes | memoryview

TURN = 0.002
"""Seconds of line one connection gets before it is another's turn."""

PACKET = 1448
"""Bytes; the smallest turn."""

GULP = 256 << 10
"""Bytes; the largest turn, a read that costs more to copy than to ask for."""


class ConnectionSignal(enum.Enum):
    """What a connection says without bytes."""

    OPEN = "I want to talk"
    OPENED = "you may talk"
    END = "I have nothing more to say"
    BROKEN = "this connection is no more"


class FlowOwner(Protocol):
    """The connection a flow belongs to: what it does about what its flows tell."""

    def heard(self, flow: Flow, mark: ConnectionSignal) -> None: ...

    def ended(self, flow: Flow) -> None: ...

    def failed(self, flow: Flow) -> None: ...


class Flow:
    """One direction of one connection."""

    def __init__(self, road: EmulatedLane, ends: FlowOwner) -> None:
        self.road = road
        self.ends = ends
        self.source: socket.socket | None = None
        self.sink: socket.socket | None = None
        self.held = 0
        """Bytes taken from the source that the sink has not confirmed."""

        self.closed = False
        self._backlog: deque[Payload] = deque()
        self._waiting = False
        self._ending = False

    def listen(self) -> None:
        """Waits until the source has something to say."""
        if self.source is not None and not self.closed:
            self.road.loop.add_reader(self.source, self._readable)

    def deliver(self, data: Payload) -> None:
        """Hands bytes to the sink, or keeps them until it takes them."""
        if self.closed:
            return
        self._backlog.append(data)
        if not self._waiting:
            self._flush()

    def end(self) -> None:
        """Tells the sink that nothing follows what it was given."""
        self._ending = True
        if not self._backlog:
            self._finish()

    def close(self) -> None:
        """Forgets everything; the sockets are their owner's to close afterwards."""
        self.closed = True
        self.road.forget(self)
        self._backlog.clear()
        if self.source is not None:
            self.road.loop.remove_reader(self.source)
        if self.sink is not None:
            self.road.loop.remove_writer(self.sink)

    def _readable(self) -> None:
        assert self.source is not None
        self.road.loop.remove_reader(self.source)
        self.road.offer(self)

    def _flush(self) -> None:
        assert self.sink is not None
        try:
            while self._backlog:
                data = self._backlog[0]
                count = self.sink.send(data)
                self.road.delivered(self, count)
                if count < len(data):
                    self._backlog[0] = memoryview(data)[count:]
                else:
                    self._backlog.popleft()
        except (BlockingIOError, InterruptedError):
            if not self._waiting:
                self._waiting = True
                self.road.loop.add_writer(self.sink, self._flush)
            return
        except OSError:
            self.ends.failed(self)
            return
        if self._waiting:
            self._waiting = False
            self.road.loop.remove_writer(self.sink)
        if self._ending:
            self._finish()

    def _finish(self) -> None:
        assert self.sink is not None
        with contextlib.suppress(OSError):  # It may have gone in the meantime.
            self.sink.shutdown(socket.SHUT_WR)
        self.ends.ended(self)


class EmulatedLane:
    """One direction of a link, with everything that is on it."""

    def __init__(self, loop: asyncio.AbstractEventLoop, link: Link) -> None:
        self.loop = loop
        self.entered = 0
        self.arrived = 0
        self._lane = Lane(link)
        self._ready: deque[Flow] = deque()
        self._way: deque[tuple[float, Flow, Payload | ConnectionSignal]] = deque()
        self._confirming: deque[tuple[float, Flow, int]] = deque()
        self._parked: set[Flow] = set()
        self._began = loop.time()
        self._stops: set[str] = set()
        self._stopped: float | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._due = math.inf

    @property
    def link(self) -> Link:
        return self._lane.link

    def shape(self, link: Link) -> None:
        """Makes this another link for all that enters from now on."""
        self._lane = self._lane.over(link)
        self._wake(0.0)

    def stop(self, why: str) -> None:
        """Stops the road's clock: nothing enters, moves or arrives."""
        if not self._stops:
            self._stopped = self.loop.time()
        self._stops.add(why)

    def go(self, why: str) -> None:
        """Takes one reason to stand still away; without any the clock runs on."""
        self._stops.discard(why)
        if self._stopped is not None and not self._stops:
            self._began += self.loop.time() - self._stopped
            self._stopped = None
            self._wake(0.0)

    def offer(self, flow: Flow) -> None:
        """Gives a flow whose source has something to say its place in the turn."""
        self._ready.append(flow)
        self._wake(0.0)

    def say(self, flow: Flow, mark: ConnectionSignal) -> None:
        """Sends a mark along, behind what is on the way."""
        self._lane = self._lane.send(0, now=self._now())
        self._way.append((self._lane.last, flow, mark))
        self._wake(0.0)

    def delivered(self, flow: Flow, count: int) -> None:
        """Notes what a sink took; the source may send as much again one delay later."""
        self.arrived += count
        self._confirming.append((self._now() + self.link.delay, flow, count))
        if flow in self._parked:
            self._wake(self._confirming[0][0])

    def forget(self, flow: Flow) -> None:
        """Waits for nothing more of a flow that is closed; what is on the way is dropped."""
        self._parked.discard(flow)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self.stop("closed")

    def _now(self) -> float:
        return (self.loop.time() if self._stopped is None else self._stopped) - self._began

    def _wake(self, due: float) -> None:
        """Moves on at `due` on the road's clock, or as soon as possible after it."""
        if due >= self._due or self._stopped is not None:
            return
        if self._timer is not None:
            self._timer.cancel()
        self._due = due
        self._timer = self.loop.call_at(self._began + due, self._move)

    def _move(self) -> None:
        self._timer, self._due = None, math.inf
        if self._stopped is not None:
            return
        now = self._now()
        while self._way and self._way[0][0] <= now:
            _, flow, what = self._way.popleft()
            self._arrive(flow, what)
        while self._confirming and self._confirming[0][0] <= now:
            _, flow, count = self._confirming.popleft()
            self._confirm(flow, count)
        while self._ready and self._lane.opens() <= now:
            self._take_turn(self._ready.popleft(), now)
        self._plan()

    def _plan(self) -> None:
        if self._way:
            self._wake(self._way[0][0])
        if self._ready:
            self._wake(self._lane.opens())
        if self._parked and self._confirming:
            self._wake(self._confirming[0][0])

    def _arrive(self, flow: Flow, what: Payload | ConnectionSignal) -> None:
        if isinstance(what, ConnectionSignal):
            if not flow.closed:
                flow.ends.heard(flow, what)
        else:
            flow.deliver(what)

    def _confirm(self, flow: Flow, count: int) -> None:
        flow.held -= count
        if flow in self._parked and flow.held < self.link.capacity:
            self._parked.discard(flow)
            self._ready.append(flow)

    def _take_turn(self, flow: Flow, now: float) -> None:
        room = self.link.capacity - flow.held
        if flow.closed or flow.source is None:
            return
        if room <= 0:
            self._parked.add(flow)
            return
        try:
            data = flow.source.recv(min(room, self._turn()))
        except (BlockingIOError, InterruptedError):
            flow.listen()
            return
        except OSError:
            self.say(flow, ConnectionSignal.BROKEN)
            return
        if not data:
            self.say(flow, ConnectionSignal.END)
            return
        flow.held += len(data)
        self.entered += len(data)
        self._lane = self._lane.send(len(data), now=now)
        self._way.append((self._lane.last, flow, data))
        self._ready.append(flow)

    def _turn(self) -> int:
        return int(min(GULP, max(PACKET, self.link.rate / 8 * TURN)))
