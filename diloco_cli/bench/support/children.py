"""Processes that take part in a measurement, and end with it however it ends."""

from __future__ import annotations

import multiprocessing
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from multiprocessing import resource_tracker
from multiprocessing.process import BaseProcess
from types import FrameType
from typing import Any


def end_on_signals() -> None:
    """Lets SIGTERM and SIGHUP end a command the way Ctrl-C does: what was begun is taken away."""

    def leave(number: int, _: FrameType | None) -> None:
        raise SystemExit(128 + number)

    for number in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(number) is not signal.SIG_IGN:  # As under nohup.
            signal.signal(number, leave)


def made(target: Callable[..., object], *args: Any) -> BaseProcess:
    """A process that is still to be started; whoever has it can end it, whenever that is."""
    return multiprocessing.get_context("spawn").Process(target=target, args=args, daemon=True)


@contextmanager
def child(target: Callable[..., object], *args: Any) -> Iterator[BaseProcess]:
    """A process that is there until the block ends."""
    process = made(target, *args)
    try:
        start(process)
        yield process
    finally:
        end(process)


def start(process: BaseProcess) -> None:
    """Starts a process that does not receive Ctrl-C, which is for its parent."""
    resource_tracker.ensure_running()  # Started with the first process, it would let Ctrl-C in.
    with _signals_later():
        process.start()


@contextmanager
def _signals_later() -> Iterator[None]:
    """Handles signals after the block: a child whose parent leaves in mid-start has a traceback.

    The mask is what the child inherits. It covers this thread only, and a signal that another
    thread receives is handled in the main thread as well, so the handlers are replaced, too.
    """
    received: list[int] = []
    handlers: dict[int, Any] = {}
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if callable(signal.getsignal(number)):
                handlers[number] = signal.signal(number, lambda came, _: received.append(came))
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for number, handler in handlers.items():
            signal.signal(number, handler)
        for number in received:
            signal.raise_signal(number)


def end(process: BaseProcess) -> None:
    """Ends a process, also one that was about to be started."""
    if process.pid is not None:
        process.kill()
        process.join()
