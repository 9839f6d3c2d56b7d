"""How fast is this link, and what follows from it?

    rate      bytes per second of all its connections, from what they moved last
    lifetime  how long connections live before they break, if they do
    part      what a connection moves in `aim` seconds, a quarter of a lifetime at most
    lanes     connections at once: as many as find parts worth a request of their own
    seconds   how long a body may take before it is given up

A part that breaks off is sent again from its beginning, so parts are short beside the
time a connection lives. Where nothing is known yet, parts start small and grow.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable

from diloco_cli.net.options import Options

log = logging.getLogger(__name__)

LEAST_PART_BYTES = 256_000
"""Below this a request costs more than it carries."""

NEAR_SECONDS = 0.005
"""A round trip on a local network: there one connection fills the line, and more are in its way."""

NEAR_LANES = 2
"""Enough to read and check the next part while one is on its way."""

AIM_SECONDS = 0.5
"""What a part should take: long beside a round trip, short beside a connection's life."""

SHORTEST_AIM = 0.05
FRAGILE_SECONDS = 60.0
"""A link whose connections live shorter than this is not trusted with long bodies."""

SAME_BREAK = 0.2
"""Seconds; connections that break so soon after each other broke together."""

GROWTH = 4.0
"""How much larger the next part may be than what was moved last."""

PATIENCE = 4.0
"""A body may take so many times as long as the measured rate says."""

MOST_GIVEN = 64.0
"""How many times the usual a body may take on a link so slow that none has arrived yet."""

WORTH_MEASURING = 64_000
"""Bytes; what is shorter says more about latency than about rate."""


class Throughput:
    """What is known about one direction of a link. Any thread may use it."""

    def __init__(
        self,
        name: str,
        options: Options,
        *,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        """`name` says in the log what is measured, once it is."""
        self.name = name
        self.part_bytes, self.most_lanes = options.part_bytes, options.lanes
        self.least = min(LEAST_PART_BYTES, self.part_bytes)
        self.rate: float | None = None
        self.total = 0
        """Bytes moved so far, those of bodies that broke off too."""
        self._timeouts = options.timeouts
        self._grown = float(self.least)
        self._lifetime, self._given = math.inf, 1.0
        self._since: float | None = None
        self._round_trip = math.inf
        self._now = now
        self._lock = threading.Lock()

    @property
    def lifetime(self) -> float:
        """Seconds between two breaks, or since the last one if that is longer already."""
        if self._since is None or math.isinf(self._lifetime):
            return math.inf
        return max(self._lifetime, self._now() - self._since)

    @property
    def aim(self) -> float:
        """How long a part should take."""
        return max(SHORTEST_AIM, min(AIM_SECONDS, self.lifetime / 4))

    def short(self, size: int) -> bool:
        """Whether a body of this size is so short on this link that it travels in one piece."""
        if self.rate is None or size > self.part_bytes:
            return False
        return self.lifetime >= FRAGILE_SECONDS or size <= self.aim * self.rate

    def answered(self, seconds: float) -> None:
        """Takes note of how long a call without a body took."""
        self._round_trip = min(self._round_trip, seconds)

    def moved(self, size: int, seconds: float, *, lanes: int = 1) -> None:
        """Takes note of what arrived over one connection while `lanes` were in use."""
        with self._lock:
            self.total += size
        if size < min(WORTH_MEASURING, self.least):
            return
        rate = lanes * size / max(seconds, 1e-6)
        with self._lock:
            first = self.rate is None
            if self.rate is None:
                self.rate = rate
            elif rate > self.rate or seconds >= self.aim / 2:
                # A part that was over at once says more about the round trip than about the rate.
                self.rate = (self.rate + rate) / 2
            self._grown = max(self._grown, GROWTH * size)
            if self._since is None:
                self._since = self._now()
        if first:
            log.info(f"{self.name}: {self}")

    def broke(self, *, slow: bool = False) -> None:
        """Takes note of a body that did not arrive; `slow`: because its time was over."""
        with self._lock:
            now = self._now()
            lived = now - self._since if self._since is not None else AIM_SECONDS
            self._since = now
            if lived < SAME_BREAK:
                return
            self._lifetime = lived if math.isinf(self._lifetime) else (self._lifetime + lived) / 2
            self._grown = max(self.least, self.part() / 2)
            if slow and self.rate is not None:
                self.rate /= 2
            elif slow:
                # Given up too early each time, a body would never arrive and nothing be measured.
                self._given = min(2 * self._given, MOST_GIVEN)

    def lanes(self, size: int) -> int:
        """How many connections a body of this size is worth."""
        if self.rate is None:
            return 1
        most = NEAR_LANES if self._round_trip < NEAR_SECONDS else self.most_lanes
        worth = math.floor(self.aim * self.rate / self.least)
        return max(1, min(most, self.most_lanes, worth, math.ceil(size / self.least)))

    def part(self, lanes: int = 1) -> int:
        """How long the next part should be while `lanes` connections are in use."""
        if self.rate is None:
            return self.least
        fitting = min(self.part_bytes, self._grown, self.aim * self.rate / lanes)
        return int(max(self.least, fitting))

    def seconds(self, size: int, *, lanes: int = 1) -> float:
        """How long a body may take over one of `lanes` connections before it is given up."""
        if self.rate is None:
            return self._given * self._timeouts.transfer(size)
        return self._timeouts.answer + PATIENCE * size * lanes / self.rate

    def __str__(self) -> str:
        """For people: the rate and what follows from it."""
        if self.rate is None:
            return "nothing measured yet"
        return (
            f"{self.rate / 1e6:.3g} MB/s, {self.lanes(self.part_bytes)} connections, "
            f"parts of {self.part(self.lanes(self.part_bytes)) / 1e6:.3g} MB; "
            f"{self.part_bytes / 1e6:.3g} MB are given up after "
            f"{self.seconds(self.part_bytes):.0f} s"
        )
