"""Who is there: the connections of a data-parallel job, and what was last heard on each.

One lock guards everything. Threads of single connections enter what they hear; the hub's
own thread waits until what it needs has been heard.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from diloco_cli.bench.baselines.accounts import News
from diloco_cli.bench.baselines.messages import GRADIENT, MessageHead, MessageSocket
from diloco_cli.bench.baselines.seat import MemberConnection
from diloco_cli.errors import WireError

SILENCE = 120.0
"""Seconds after which a member that owes us something counts as dead."""
HELLO_SECONDS = 10.0


class Over(Exception):
    """The job is called off."""


class MemberConnections:
    def __init__(self, *, silence: float) -> None:
        self.silence = silence
        self.changed = threading.Condition(threading.RLock())
        self.seats: dict[str, MemberConnection] = {}
        """Members that take part in steps."""
        self.waiting: dict[str, MemberConnection] = {}
        """Members that are ready to."""
        self.boots: dict[str, int] = {}
        self.greeted: dict[str, int] = {}
        """Which start of a region we last heard of."""
        self.parted: set[str] = set()
        self.step = self.attempt = 0
        self.news: list[News] = []
        """lost, hello, loaded, stepped."""
        self.cost = self.took = 0.0
        """Of the last checkpoint: seconds that training stood, and until it was on disk."""
        self.off = False
        self.takers: list[MemberConnection] = []
        self.paused_at = 0.0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._door = threading.Thread(target=self._welcome, name="door", daemon=True)

    def open(self) -> None:
        self._door.start()

    def close(self) -> None:
        with self.changed:
            self.off = True
            self.changed.notify_all()
        # Closing alone does not wake a thread that waits in `accept`.
        socket.create_connection(("127.0.0.1", self.port)).close()
        if self._door.is_alive():
            self._door.join(10)
        self._listener.close()
        self.drop([*self.seats.values(), *self.waiting.values()])

    def expect(self, region: str, boot: int) -> None:
        """Lets this start of a region in, and no earlier one."""
        with self.changed:
            self.boots[region] = boot

    def tell(self, region: str, **words: Any) -> None:
        with self.changed:
            if seat := self.seats.get(region) or self.waiting.get(region):
                seat.tell(**words)

    def note(self, what: str, region: str, **more: Any) -> None:
        self.news.append((time.monotonic(), what, region, more))

    def until(
        self, happened: Callable[[], bool], owing: Callable[[], list[MemberConnection]]
    ) -> None:
        """Waits, with the lock held; who owes us something and says nothing counts as dead."""
        began = time.monotonic()
        while not happened():
            if self.off:
                raise Over
            self.changed.wait(min(1.0, self.silence))
            limit = time.monotonic() - self.silence
            if began < limit:
                self.drop([seat for seat in owing() if seat.heard < limit])

    def drop(self, seats: Iterable[MemberConnection]) -> None:
        with self.changed:
            for seat in seats:
                if seat.alive:
                    self.note("lost", seat.region)
                seat.close()
                for group in (self.seats, self.waiting):
                    if group.get(seat.region) is seat:
                        del group[seat.region]
            self.changed.notify_all()

    def _welcome(self) -> None:
        while True:
            end, _ = self._listener.accept()
            if self.off:
                end.close()
                return
            threading.Thread(target=self._greet, args=(end,), name="hello", daemon=True).start()

    def _greet(self, end: socket.socket) -> None:
        end.settimeout(HELLO_SECONDS)
        line = MessageSocket(end)
        try:
            hello = line.words(line.head())
            seat = MemberConnection(line, hello)
            end.settimeout(None)
        except (OSError, WireError, ValueError, KeyError):
            return line.close()
        region = seat.region
        with self.changed:
            if self.off or hello["boot"] != self.boots.get(region):
                return line.close()
            self.drop([s for s in (self.seats.get(region), self.waiting.get(region)) if s])
            self.waiting[region], self.greeted[region] = seat, hello["boot"]
            self.note("hello", region, start=hello["start"], compile=hello["compile"])
            seat.start(state=self._forward, heard=self._heard, gone=lambda seat: self.drop([seat]))
            self.changed.notify_all()

    def _heard(self, seat: MemberConnection, head: MessageHead, words: dict[str, Any]) -> None:
        with self.changed:
            now = (self.step, self.attempt)
            if head.kind == GRADIENT:
                if (head.step, head.attempt) == now:
                    seat.arrived = head.at + head.length
            elif "sent" in words:
                if (words["sent"], words["attempt"]) == now:
                    seat.loss = words["loss"]
            elif "saved" in words:
                self.cost, self.took = words["blocked"], words["took"]
            elif "loaded" in words:
                seat.loaded = words["loaded"]
                stood = time.monotonic() - self.paused_at
                took = words.get("seconds", stood)
                self.note("loaded", seat.region, step=seat.loaded, seconds=took)
            elif "given" in words:
                seat.given = words["given"]
            elif "stopped" in words:
                seat.parting = words
                self.parted.add(seat.region)
            self.changed.notify_all()

    def _forward(self, head: MessageHead, data: bytes) -> None:
        """Passes a survivor's state on to those who join, chunk by chunk."""
        with self.changed:
            for taker in self.takers:
                taker.send(head, data)
