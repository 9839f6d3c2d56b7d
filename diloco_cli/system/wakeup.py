"""Something happened: wake up, or leave.

A bell says only *that* there is news; what it is stands in the mailbox. It rings when
the other side writes to our pipe, when a signal arrives, and when one of our own
threads has finished something. The end of the pipe means that the other side is gone.
"""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import threading
from collections.abc import Callable
from types import FrameType

LAST_MOMENT = 60.0
"""Seconds after which a process that was told to leave and cannot is ended."""


class Wakeup:
    """Wakes one thread; may be rung from any thread and from signal handlers."""

    def __init__(self) -> None:
        # A SimpleQueue may be filled from inside a signal handler; an Event would deadlock
        # if the signal came while the main thread was about to wait for it.
        self._rings: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.leaving = ""
        """Why to leave, in words; empty while there is no reason."""

    def ring(self) -> None:
        self._rings.put(None)

    def leave(self, why: str) -> None:
        self.leaving = self.leaving or why
        self.ring()

    def rung(self) -> bool:
        """Says whether it rang since it was last asked."""
        heard = False
        with contextlib.suppress(queue.Empty):
            while True:
                self._rings.get_nowait()
                heard = True
        return heard

    def wait(self, seconds: float) -> bool:
        """Waits for a ring, which `rung` then still knows of; says whether there was one."""
        try:
            self._rings.get(timeout=max(0.0, seconds))
        except queue.Empty:
            return False
        self.ring()
        return True


def end_at_once(number: int) -> None:
    os._exit(128 + number)


def leave_on_signals(
    bell: Wakeup, *signals: signal.Signals, again: Callable[[int], None] = end_at_once
) -> None:
    """The first signal asks to leave in order; a second one ends the process, or does `again`."""

    def handler(number: int, frame: FrameType | None) -> None:
        if bell.leaving:
            again(number)
        else:
            bell.leave(f"told to stop by {signal.Signals(number).name}")

    for each in signals:
        signal.signal(each, handler)


def listen(bell: Wakeup, handle: int, *, gone: str) -> None:
    """Rings for everything that arrives on a pipe; its end asks to leave, because of `gone`."""

    def read() -> None:
        with contextlib.suppress(OSError):
            while os.read(handle, 4096):
                bell.ring()
        bell.leave(gone)

    threading.Thread(target=read, name="bell", daemon=True).start()


def ring_pipe(handle: int, word: str) -> None:
    """Rings at the other end of a pipe; a full or broken one has heard enough."""
    with contextlib.suppress(BlockingIOError, BrokenPipeError, ValueError):
        os.write(handle, f"{word}\n".encode())
