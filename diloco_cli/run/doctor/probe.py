"""How good is the way to a server that runs? Measured without taking part in its run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from diloco_cli.net.client import Client
from diloco_cli.net.credentials import NOBODY, Credentials
from diloco_cli.net.options import DEFAULTS, Options, Retry
from diloco_cli.observe.status import Status

TRIPS, FETCHES = 20, 3


@dataclass(frozen=True, slots=True)
class Way:
    trips: list[float]
    """Seconds of short questions over a connection that stands."""
    rates: list[float]
    """Bytes a second of the largest fragment, downwards."""
    size: int
    """Bytes that were fetched each time."""
    speeds: Mapping[str, float]
    """Tokens a second of the regions that train there now."""

    @property
    def round_trip(self) -> float:
        return statistics.median(self.trips)

    @property
    def rate(self) -> float:
        """Bits a second."""
        return 8 * statistics.median(self.rates)

    @property
    def words(self) -> str:
        """As `--link` takes it."""
        return f"{self.rate / 1e6:.3f}Mbit/{1000 * self.round_trip:.3f}ms"


def measure(
    url: str,
    say: Callable[[str], None] = lambda text: None,
    *,
    retry: Retry = DEFAULTS.retry,
    credentials: Credentials = NOBODY,
) -> Way:
    """Asks short questions and fetches the largest fragment, several times each."""
    with Client(url, Options(retry=retry, credentials=credentials)) as client:
        run = client.run()
        trips, status = [], client.status()
        for _ in range(TRIPS):
            began = time.monotonic()
            status = client.status()
            trips.append(time.monotonic() - began)
        fragment = max(range(len(run.fragments)), key=lambda number: run.fragments[number])
        latest = client.latest(fragment, wait=0)
        version = latest.version if latest else 0
        rates, size = [], 0
        for _ in range(FETCHES):
            began = time.monotonic()
            size = len(client.whole(fragment, version).data)
            rates.append(size / (time.monotonic() - began))
            say(f"fragment {fragment}, {size / 1e6:.1f} MB: {client.down}")
    return Way(trips, rates, size, _speeds(status))


def _speeds(status: Status) -> dict[str, float]:
    return {
        region.name: region.tokens_per_second
        for region in status.regions
        if region.training and region.tokens_per_second
    }
