"""One member as its hub sees it: a connection with a thread for each direction."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable
from typing import Any

from diloco_cli.bench.baselines.messages import GRADIENT, TALK, MessageHead, MessageSocket
from diloco_cli.errors import WireError


class MemberConnection:
    """Everything about one connection; whoever holds the hub's lock may look and change."""

    def __init__(self, line: MessageSocket, hello: dict[str, Any]) -> None:
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
        self.parting: dict[str, Any] | None = None
        self.heard = time.monotonic()
        self._mail: queue.SimpleQueue[tuple[MessageHead, bytes | memoryview | dict] | None] = (
            queue.SimpleQueue()
        )

    def start(
        self,
        *,
        state: Callable[[MessageHead, bytes], None],
        heard: Callable[[MemberConnection, MessageHead, dict[str, Any]], None],
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
            threading.Thread(target=work, name=f"seat {self.region}", daemon=True).start()

    def _receive(
        self,
        state: Callable[[MessageHead, bytes], None],
        heard: Callable[[MemberConnection, MessageHead, dict[str, Any]], None],
    ) -> None:
        head = self.line.head()
        words: dict[str, Any] = {}
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
