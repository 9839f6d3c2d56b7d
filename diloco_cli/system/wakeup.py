"""Wake a waiting thread: from another thread, a signal handler, or a pipe.

A wake-up says only *that* something happened; the thread then looks for itself. The end of
a pipe means that the process at the other end is gone.
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
"""Seconds after which a process that was told to stop and cannot is ended."""


class Wakeup:
    """Wakes one thread; `wake` and `stop` may be called from signal handlers."""

    def __init__(self) -> None:
        # A SimpleQueue may be filled from inside a signal handler; an Event would deadlock
        # if the signal came while the main thread was about to wait for it.
        self._wakeups: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.stop_reason = ""
        """Why to stop; empty while there is no reason."""

    def wake(self) -> None:
        self._wakeups.put(None)

    def stop(self, why: str) -> None:
        self.stop_reason = self.stop_reason or why
        self.wake()

    def clear(self) -> bool:
        """Says whether there was a wake-up since the last call."""
        woken = False
        with contextlib.suppress(queue.Empty):
            while True:
                self._wakeups.get_nowait()
                woken = True
        return woken

    def wait(self, seconds: float) -> bool:
        """Waits for a wake-up, which `clear` still reports; says whether there was one."""
        try:
            self._wakeups.get(timeout=max(0.0, seconds))
        except queue.Empty:
            return False
        self.wake()
        return True

    def pause(self, seconds: float) -> None:
        """Waits for a wake-up and takes it: the caller looks for itself next."""
        if self.wait(seconds):
            self.clear()


class Signals:
    """Counts the signals that ask a command to stop; use as a context manager.

    The first asks for an orderly end, the second for a quick one. Nothing is done inside
    the handler, so no work is ever torn in two.
    """

    KINDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self) -> None:
        self.count = 0
        self.first: int | None = None
        self._wakeup = Wakeup()

    def __enter__(self) -> Signals:
        heard = (kind for kind in self.KINDS if not is_ignored(kind))
        self._before = {kind: signal.signal(kind, self._handle) for kind in heard}
        return self

    def __exit__(self, *_: object) -> None:
        for kind, handler in self._before.items():
            signal.signal(kind, handler)

    def pause(self, seconds: float) -> None:
        """Sleeps until a signal comes, or the time is over."""
        self._wakeup.pause(seconds)

    @property
    def impatient(self) -> bool:
        return self.count > 1

    @property
    def name(self) -> str:
        return signal.Signals(self.first).name if self.first else ""

    @property
    def exit_code(self) -> int:
        return 128 + (self.first or 0)

    def _handle(self, number: int, _: FrameType | None) -> None:
        self.count += 1
        self.first = self.first or number
        self._wakeup.wake()


def is_ignored(kind: signal.Signals) -> bool:
    """Whether whoever started this process wants it to outlive the terminal, as nohup does."""
    return kind == signal.SIGHUP and signal.getsignal(kind) is signal.SIG_IGN


def exit_at_once(number: int) -> None:
    os._exit(128 + number)


def stop_on_signals(
    wakeup: Wakeup, *signals: signal.Signals, second: Callable[[int], None] = exit_at_once
) -> None:
    """The first signal asks to stop in order; any later one calls `second`.

    A SIGHUP that is ignored already stays so.
    """
    asked = False

    def handler(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        # A reason to stop that is no signal says nothing about how patient a person is.
        if asked:
            return second(number)
        asked = True
        wakeup.stop(f"told to stop by {signal.Signals(number).name}")

    for kind in signals:
        if not is_ignored(kind):
            signal.signal(kind, handler)


def stopping_signals(on_hangup: Callable[[], None]) -> tuple[signal.Signals, ...]:
    """Those that ask a service to stop; SIGHUP only where a terminal can be closed.

    Without one it means what it means to services: look at your files again.
    """
    try:
        os.close(os.open("/dev/tty", os.O_RDWR | os.O_NOCTTY))
    except OSError:
        signal.signal(signal.SIGHUP, lambda number, frame: on_hangup())
        return signal.SIGTERM, signal.SIGINT
    return signal.SIGTERM, signal.SIGINT, signal.SIGHUP


def stop_service_on_signals(wakeup: Wakeup, *, second: Callable[[int], None]) -> None:
    """Stops in order at the first of them, calls `second` at another; SIGHUP may only wake."""
    stop_on_signals(wakeup, *stopping_signals(wakeup.wake), second=second)


def wake_on_input(wakeup: Wakeup, handle: int, *, at_end: str) -> None:
    """Wakes for everything that arrives on a pipe; its end asks to stop, because of `at_end`."""

    def read() -> None:
        with contextlib.suppress(OSError):
            while os.read(handle, 4096):
                wakeup.wake()
        wakeup.stop(at_end)

    threading.Thread(target=read, name="wakeup", daemon=True).start()


def write_wakeup(handle: int, word: str) -> None:
    """Wakes the reader of a pipe; a full pipe wakes it anyway, a broken one has none."""
    with contextlib.suppress(BlockingIOError, BrokenPipeError, ValueError):
        os.write(handle, f"{word}\n".encode())
