"""A rate limit for uploads, shared by all connections of a client."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Throttle:
    """Lets bytes pass at `rate` bits per second; any thread may take."""

    def __init__(
        self,
        rate: float,
        *,
        now: Callable[[], float] = time.monotonic,
        wait: Callable[[float], object] = time.sleep,
    ) -> None:
        if not rate > 0:
            raise ValueError(f"a rate limit of {rate:g} bit/s lets nothing pass")
        self.bytes_per_second = rate / 8
        self._now, self._wait = now, wait
        self._free_at = now()
        self._lock = threading.Lock()

    @property
    def piece(self) -> int:
        """How many bytes to take at a time: a twentieth of a second."""
        return int(max(1 << 10, min(1 << 18, self.bytes_per_second / 20)))

    def take(self, count: int) -> None:
        """Returns when `count` more bytes may be sent."""
        with self._lock:
            start = max(self._now(), self._free_at)
            self._free_at = start + count / self.bytes_per_second
        pause = start - self._now()
        if pause > 0:
            self._wait(pause)
