"""What came of it: goodput by three definitions, and what it cost.

time      time spent on steps that were kept ÷ all the regions' time
tokens    tokens in applied updates ÷ tokens of the same time without a fault
members   contributors of a version ÷ regions, on average
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field

from diloco_cli.core.rounds import Receipt
from diloco_cli.sim.network import Lane
from diloco_cli.sim.region import SimulatedRegion
from diloco_cli.sim.scenario import Scenario

Seconds = float


@dataclass(frozen=True, slots=True)
class SimulationOutcome:
    seconds: Seconds
    """Wall-clock of the run."""
    goodput_time: float
    goodput_tokens: float
    participation: float
    uptime: float
    """Share of the time in which some region trained."""
    utilisation: float
    """Share of the time in which a healthy region trained and did not wait."""
    pace: float
    """Versions published ÷ versions that `every` asks for; below 1 the exchange lags."""
    staleness: float
    """Versions that merged work was behind, on average."""
    staleness_counts: Mapping[int, int]
    tokens: float
    """Applied."""
    versions: int
    bytes_up: int
    """That lines have carried by the end, up and down."""
    bytes_down: int
    turned_away: int
    faults: int
    events: int
    timeline: tuple[tuple[Seconds, float, int], ...] = field(repr=False)
    """(time, tokens applied, members) of every version."""

    def as_data(self) -> dict[str, object]:
        data = asdict(self)
        del data["timeline"]
        data["staleness_counts"] = {str(k): n for k, n in sorted(self.staleness_counts.items())}
        return data


class OnTheWay:
    """Bytes that lines have taken on and not carried yet; a run may end before they have."""

    def __init__(self) -> None:
        self._bodies: list[tuple[Seconds, Seconds, int]] = []

    def send(self, lane: Lane, length: int, *, at: Seconds, now: Seconds) -> Lane:
        """Puts a body behind all others of a lane, from a moment on; gives the lane after it."""
        after = lane.send(length, now=at)
        while self._bodies and self._bodies[0][0] <= now:
            heapq.heappop(self._bodies)
        heapq.heappush(self._bodies, (after.free_at, max(at, lane.free_at), length))
        return after

    def left(self, now: Seconds) -> int:
        """How many are not carried at a moment."""
        left = 0.0
        for ends, begins, length in self._bodies:
            if ends > now:
                left += length * min(1.0, (ends - now) / max(ends - begins, 1e-12))
        return math.ceil(left)


class OutcomeCounter:
    """Counts while the simulation runs."""

    def __init__(self, scenario: Scenario, *, training: int) -> None:
        self.scenario, self.training = scenario, training
        self.applied = 0.0
        self.bytes_up = self.bytes_down = self.turned_away = self.faults = self.versions = 0
        self._members = 0
        self._stale: dict[int, int] = {}
        self._up: Seconds = 0.0
        self._since: Seconds = 0.0
        self._down: dict[str, Seconds] = {}
        self._down_seconds: Seconds = 0.0
        self._timeline: list[tuple[Seconds, float, int]] = []

    def published(
        self, fragment: int, version: int, members: Mapping[str, Receipt], *, now: Seconds
    ) -> None:
        share = self.scenario.sizes[fragment] / self.scenario.parameters
        for receipt in members.values():
            self.applied += receipt.tokens * share
            behind = version - 1 - receipt.base
            self._stale[behind] = self._stale.get(behind, 0) + 1
        self.versions += 1
        self._members += len(members)
        self._timeline.append((now, self.applied, len(members)))

    def counted(
        self, region: SimulatedRegion, *, training: bool, now: Seconds, was: bool = True
    ) -> None:
        """Takes note that a region stopped or went on."""
        if training or was:
            if self.training:
                self._up += now - self._since
            self._since = now
            self.training += 1 if training else -1
        if not region.training:
            self._down[region.name] = now
        elif region.name in self._down:
            self._down_seconds += now - self._down.pop(region.name)

    def outcome(
        self, regions: Iterable[SimulatedRegion], *, now: Seconds, events: int
    ) -> SimulationOutcome:
        regions, scenario = list(regions), self.scenario
        now = max(now, 1e-12)
        if self.training:
            self._up += now - self._since
            self._since = now
        down = self._down_seconds + sum(now - since for since in self._down.values())
        # A step under way is time well spent, though not yet a step.
        spent = sum(
            region.productive
            + (now - region.began if region.training and not region.waiting else 0)
            for region in regions
        )
        lost = sum(region.lost_seconds for region in regions)
        whole = len(regions) * now
        fault_free = now * sum(site.tokens / site.step for site in scenario.sites)
        fastest = sorted(site.step for site in scenario.sites)[scenario.sync.quorum - 1]
        possible_rounds = len(scenario.sizes) * now / (scenario.sync.every * fastest)
        merged = sum(self._stale.values())
        return SimulationOutcome(
            seconds=now,
            goodput_time=(spent - lost) / whole,
            goodput_tokens=self.applied / fault_free,
            participation=self._members / (self.versions * len(regions)) if self.versions else 0.0,
            uptime=self._up / now,
            utilisation=min(1.0, spent / (whole - down)) if whole > down else 0.0,
            pace=self.versions / possible_rounds,
            staleness=sum(k * n for k, n in self._stale.items()) / merged if merged else 0.0,
            staleness_counts=dict(self._stale),
            tokens=self.applied,
            versions=self.versions,
            bytes_up=self.bytes_up,
            bytes_down=self.bytes_down,
            turned_away=self.turned_away,
            faults=self.faults,
            events=events,
            timeline=tuple(self._timeline),
        )
