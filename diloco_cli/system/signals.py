"""Ctrl-C and its kin, remembered until a loop looks."""

from __future__ import annotations

import contextlib
import queue
import signal
from types import FrameType


class Signals:
    """Catches the signals that ask a command to stop; use as a context manager.

    The first asks for an orderly end, the second for a quick one. Nothing is done inside
    the handler, so no work is ever torn in two.
    """

    KINDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self) -> None:
        self.count = 0
        self.first: int | None = None
        # Not an Event: a handler that sets it while the same thread enters `wait` hangs.
        self._rings: queue.SimpleQueue[None] = queue.SimpleQueue()

    def __enter__(self) -> Signals:
        self._before = {kind: signal.signal(kind, self._caught) for kind in self.KINDS}
        return self

    def __exit__(self, *_: object) -> None:
        for kind, handler in self._before.items():
            signal.signal(kind, handler)

    def pause(self, seconds: float) -> None:
        """Sleeps until a signal comes, or the time is over."""
        with contextlib.suppress(queue.Empty):
            self._rings.get(timeout=seconds)

    @property
    def impatient(self) -> bool:
        return self.count > 1

    @property
    def name(self) -> str:
        return signal.Signals(self.first).name if self.first else ""

    @property
    def exit_code(self) -> int:
        return 128 + (self.first or 0)

    def _caught(self, number: int, _: FrameType | None) -> None:
        self.count += 1
        self.first = self.first or number
        self._rings.put(None)
