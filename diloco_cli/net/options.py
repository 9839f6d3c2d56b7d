"""How a client talks to its server: one `Options`, taken whole by everything beneath the client."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from diloco_cli.net.credentials import NOBODY, Credentials

Backend = Literal["pyreqwest", "httpx"]

PART_BYTES = 32_000_000
"""The largest part; a body up to this size travels in one piece while the link holds."""

MOST_LANES = 4
"""One connection tops out at what the kernel buffers: at 1 Gbit/s and 50 ms less than half."""


@dataclass(frozen=True)
class Timeouts:
    """How long to wait for the server, in seconds unless said otherwise."""

    connect: float = 5.0
    answer: float = 10.0
    """Between a request and its answer, not counting the time bodies need to travel."""

    slowest_bytes_per_second: float = 128 * 1024
    """A transfer slower than this is given up."""

    probe: float = 10.0
    """pyreqwest: silence after which a connection is checked with an HTTP/2 ping."""

    def transfer(self, size: int) -> float:
        """Says how long a body of `size` bytes may take."""
        return self.answer + size / self.slowest_bytes_per_second


@dataclass(frozen=True)
class Retry:
    """How often to try, and how long to wait in between, in seconds."""

    tries: int = 5
    first: float = 0.5
    most: float = 15.0
    most_retry_after: float = 60.0
    """The longest pause a server may ask for with Retry-After."""

    def pause(self, failures: int, *, retry_after: float = 0.0, chance: float) -> float:
        """Says how long to wait after so many failures; `chance` is within 0 and 1."""
        # Half of it random: regions that lost the server together must not return together.
        grown = min(self.most, self.first * 2 ** min(failures - 1, 60))
        # A pause that the server asked for is lengthened at random, for the same reason.
        return max(
            min(retry_after, self.most_retry_after) * (1 + 0.5 * chance),
            grown * (0.5 + 0.5 * chance),
        )


ONCE = Retry(tries=1)


@dataclass(frozen=True)
class Options:
    timeouts: Timeouts = Timeouts()
    retry: Retry = Retry()
    credentials: Credentials = NOBODY
    backend: Backend = "pyreqwest"
    """Carries bodies: pyreqwest moves them at a third of the processor time."""

    control_backend: Backend = "httpx"
    """Carries short calls: httpx connects sooner, pyreqwest takes half the processor time."""

    part_bytes: int = PART_BYTES
    """Longer bodies travel in parts."""

    lanes: int = MOST_LANES
    """The most connections that carry one body."""

    rate_limit: float | None = None
    """The most that uploads may take, in bits per second."""


DEFAULTS = Options()
