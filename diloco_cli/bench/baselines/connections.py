"""Who is connected: the members of a data-parallel job, and what was last received from each.

One lock guards everything. A connection has a thread for each direction; the receiving
threads enter what arrives, and the reducer's own thread waits for what it needs.
"""

from __future__ import annotations

import queue
import socket
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from diloco_cli.bench.baselines.accounts import News
from diloco_cli.bench.baselines.messages import (
    GRADIENT,
    TALK,
    MessageHead,
    MessageSocket,
    Words,
)
from diloco_cli.errors import WireError

SILENCE = 120.0
"""Seconds after which a member that owes us something counts as dead."""
HELLO_SECONDS = 10.0


class Cancelled(Exception):
    """The job was cancelled."""


class MemberConnection:
    """Everything about one connection; whoever holds the reducer's lock may look and change."""

    def __init__(self, line: MessageSocket, hello: Words) -> None:
        self.line, self.hello = line, hello
        self.region: str = hello["hello"]
        self.alive = True
        self.gradient = memoryview(bytearray(hello["bytes"]))
        self.arrived = 0
        """Bytes of the current attempt."""
        self.loss: float | None = None
        """Comes after the last chunk, so it also says that the gradient is complete."""
        self.loaded: int | None = None
        self.given: int | None = None
        self.results: Words | None = None
        self.heard = time.monotonic()
        self._mail: queue.SimpleQueue[tuple[MessageHead, bytes | memoryview | dict] | None] = (
            queue.SimpleQueue()
        )

    def start(
        self,
        *,
        state: Callable[[MessageHead, bytes], None],
        heard: Callable[[MemberConnection, MessageHead, Words], None],
        gone: Callable[[MemberConnection], None],
    ) -> None:
        """Begins to send and to receive."""

        def receive() -> None:
            try:
                while True:
                    self._receive(state, heard)
            except (OSError, WireError, ValueError, KeyError):
                gone(self)

        for work in (receive, self._write):
            threading.Thread(target=work, name=f"member {self.region}", daemon=True).start()

    def _receive(
        self,
        state: Callable[[MessageHead, bytes], None],
        heard: Callable[[MemberConnection, MessageHead, Words], None],
    ) -> None:
        head = self.line.head()
        words: Words = {}
        if head.kind == TALK:
            words = self.line.words(head)
        elif head.kind == GRADIENT:
            self.line.chunk(head, self.gradient)
        else:
            data = bytearray(head.length)
            self.line.read(memoryview(data))
            state(head, bytes(data))
        self.heard = time.monotonic()
        heard(self, head, words)

    def send(self, head: MessageHead, data: bytes | memoryview) -> None:
        self._mail.put((head, data))

    def tell(self, **words: Any) -> None:
        self._mail.put((MessageHead(TALK), words))

    def close(self) -> None:
        self.alive = False
        self._mail.put(None)
        self.line.close()

    def _write(self) -> None:
        try:
            while mail := self._mail.get():
                head, data = mail
                if isinstance(data, dict):
                    self.line.say(**data)
                else:
                    self.line.send(head, data)
        except OSError:
            pass  # The receiving thread hears of it too, and tells.


class MemberConnections:
    def __init__(self, *, silence: float) -> None:
        self.silence = silence
        self.changed = threading.Condition(threading.RLock())
        self.members: dict[str, MemberConnection] = {}
        """Members that take part in steps."""
        self.waiting: dict[str, MemberConnection] = {}
        """Members that are ready to."""
        self.boots: dict[str, int] = {}
        self.last_boots: dict[str, int] = {}
        """Which start of a region we last heard of."""
        self.stopped: set[str] = set()
        self.step = self.attempt = 0
        self.news: list[News] = []
        """lost, hello, loaded, stepped."""
        self.cost = self.took = 0.0
        """Of the last checkpoint: seconds that training stood, and until it was on disk."""
        self.off = False
        self.receivers: list[MemberConnection] = []
        self.paused_at = 0.0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._acceptor = threading.Thread(target=self._accept, name="accept", daemon=True)

    def open(self) -> None:
        self._acceptor.start()

    def close(self) -> None:
        with self.changed:
            self.off = True
            self.changed.notify_all()
        # Closing alone does not wake a thread that waits in `accept`.
        socket.create_connection(("127.0.0.1", self.port)).close()
        if self._acceptor.is_alive():
            self._acceptor.join(10)
        self._listener.close()
        self.drop([*self.members.values(), *self.waiting.values()])

    def expect(self, region: str, boot: int) -> None:
        """Lets this start of a region in, and no earlier one."""
        with self.changed:
            self.boots[region] = boot

    def tell(self, region: str, **words: Any) -> None:
        with self.changed:
            if member := self.members.get(region) or self.waiting.get(region):
                member.tell(**words)

    def note(self, what: str, region: str, **more: Any) -> None:
        self.news.append((time.monotonic(), what, region, more))

    def until(
        self, happened: Callable[[], bool], owing: Callable[[], list[MemberConnection]]
    ) -> None:
        """Waits, with the lock held; who owes us something and says nothing counts as dead."""
        began = time.monotonic()
        while not happened():
            if self.off:
                raise Cancelled
            self.changed.wait(min(1.0, self.silence))
            limit = time.monotonic() - self.silence
            if began < limit:
                self.drop([member for member in owing() if member.heard < limit])

    def drop(self, members: Iterable[MemberConnection]) -> None:
        with self.changed:
            for member in members:
                if member.alive:
                    self.note("lost", member.region)
                member.close()
                for group in (self.members, self.waiting):
                    if group.get(member.region) is member:
                        del group[member.region]
            self.changed.notify_all()

    def _accept(self) -> None:
        while True:
            end, _ = self._listener.accept()
            if self.off:
                end.close()
                return
            threading.Thread(target=self._handshake, args=(end,), name="hello", daemon=True).start()

    def _handshake(self, end: socket.socket) -> None:
        end.settimeout(HELLO_SECONDS)
        line = MessageSocket(end)
        try:
            hello = line.words(line.head())
            member = MemberConnection(line, hello)
            end.settimeout(None)
        except (OSError, WireError, ValueError, KeyError):
            return line.close()
        region = member.region
        with self.changed:
            if self.off or hello["boot"] != self.boots.get(region):
                return line.close()
            self.drop([s for s in (self.members.get(region), self.waiting.get(region)) if s])
            self.waiting[region], self.last_boots[region] = member, hello["boot"]
            self.note("hello", region, start=hello["start"], compile=hello["compile"])
            member.start(
                state=self._forward, heard=self._heard, gone=lambda member: self.drop([member])
            )
            self.changed.notify_all()

    def _heard(self, member: MemberConnection, head: MessageHead, words: Words) -> None:
        with self.changed:
            now = (self.step, self.attempt)
            if head.kind == GRADIENT:
                if (head.step, head.attempt) == now:
                    member.arrived = head.at + head.length
            elif "sent" in words:
                if (words["sent"], words["attempt"]) == now:
                    member.loss = words["loss"]
            elif "saved" in words:
                self.cost, self.took = words["blocked"], words["took"]
            elif "loaded" in words:
                member.loaded = words["loaded"]
                stood = time.monotonic() - self.paused_at
                took = words.get("seconds", stood)
                self.note("loaded", member.region, step=member.loaded, seconds=took)
            elif "given" in words:
                member.given = words["given"]
            elif "stopped" in words:
                member.results = words
                self.stopped.add(member.region)
            self.changed.notify_all()

    def _forward(self, head: MessageHead, data: bytes) -> None:
        """Passes a survivor's state on to those who join, chunk by chunk."""
        with self.changed:
            for receiver in self.receivers:
                receiver.send(head, data)
