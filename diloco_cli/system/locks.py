"""A lock file that names its holder.

The kernel releases it with the process, however that ends; the file itself stays. Its
content, the holder's pid, is for messages and means nothing while the lock is free.
"""

from __future__ import annotations

import fcntl
import math
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

POLL_SECONDS = 0.05


class Busy(Exception):
    """Another process, or another lock object of this one, holds the file."""

    def __init__(self, path: Path, pid: str) -> None:
        super().__init__(f"{path} is held by process {pid}")
        self.path = path
        self.pid = pid
        """The holder's, or "unknown"."""


class FileLock:
    """One holder at a time. Errors of the system rise as OSError."""

    def __init__(self, path: Path, *, mode: int = 0o644) -> None:
        self.path, self._mode = path, mode
        self._handle = -1

    def acquire(self, *, wait: float = 0.0) -> None:
        """Takes the lock; raises Busy if another holds it after `wait` seconds."""
        handle = os.open(self.path, os.O_RDWR | os.O_CREAT, self._mode)
        try:
            _lock(handle, self.path, wait)
            os.ftruncate(handle, 0)
            os.pwrite(handle, f"{os.getpid()}\n".encode(), 0)
        except BaseException:
            os.close(handle)
            raise
        self._handle = handle

    def release(self) -> None:
        """Gives the lock back; does nothing if it is not held."""
        handle, self._handle = self._handle, -1
        if handle >= 0:
            os.close(handle)

    @contextmanager
    def held(self, *, wait: float = 0.0) -> Iterator[None]:
        """Holds the lock for a block; see `acquire`."""
        self.acquire(wait=wait)
        try:
            yield
        finally:
            self.release()

    def holder(self) -> str | None:
        """Says which process holds the lock: its pid, "unknown", or None while it is free."""
        try:
            handle = os.open(self.path, os.O_RDWR)
        except OSError:
            return None
        try:
            # Shared: two that look at a free lock must not take each other for its holder.
            fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return None
        except BlockingIOError:
            return _pid_in(handle)
        finally:
            os.close(handle)

    def is_free(self) -> bool:
        return self.holder() is None


def _lock(handle: int, path: Path, wait: float) -> None:
    if math.isinf(wait):
        return fcntl.flock(handle, fcntl.LOCK_EX)
    # Whoever only looks holds it for a moment, too, so one refusal says nothing.
    deadline = time.monotonic() + max(wait, POLL_SECONDS)
    while True:
        try:
            return fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= deadline:
                raise Busy(path, _pid_in(handle)) from None
        time.sleep(POLL_SECONDS)


def _pid_in(handle: int) -> str:
    text = os.pread(handle, 32, 0).decode(errors="replace").strip()
    return text if text.isdigit() else "unknown"
