"""What is to be simulated: who trains how fast, over which links, and what goes wrong.

A scenario holds no model and no data, only their sizes and times, so one for a million
chips is as small as one for two laptops.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field, replace

from diloco_cli.sim import measured
from diloco_cli.sim.faults import Fault
from diloco_cli.sim.network import Link
from diloco_cli.spec.schema import SyncSpec

Seconds = float


@dataclass(frozen=True, slots=True)
class RegionSite:
    """One region."""

    name: str
    step: Seconds
    """One inner step, on average."""
    tokens: float
    """In one inner step."""
    link: Link = field(default_factory=Link)
    jitter: float = 0.0
    """Standard deviation of a step's time, as a share of it."""
    chips: int = 1
    most_up: float = math.inf
    """Bits a second that uploads may take at most."""

    @property
    def upward(self) -> Link:
        """The line as uploads see it."""
        if self.most_up >= self.link.rate:
            return self.link
        return replace(self.link, rate=self.most_up)


@dataclass(frozen=True, slots=True)
class Recovery:
    """How a region comes back after a kill."""

    detect: Seconds = 1.0
    restart: Seconds = 8.0
    """Until it trains again, once the failure is detected; weights of a lost host come on top."""
    shape: float = math.inf
    """Weibull's shape of the time to restart; infinite: always the same."""
    checkpoint: Seconds = 20.0
    """Between two durable points; what was trained since, and is in no frame, is lost."""
    anew: bool = False
    """A kill on the way back begins it anew; otherwise it costs nothing more."""
    at_boundary: bool = False
    """The group finishes its step without the lost chips and loses only time."""


@dataclass(frozen=True, slots=True)
class ServerSite:
    """The server."""

    link: Link = field(default_factory=Link)
    """Shared by all regions, each direction apart."""
    lease: Seconds = 10.0
    merge_values: float = measured.MERGE_VALUES.value
    """Contributed values merged in a second, one round after another."""
    check_values: float = measured.CHECK_VALUES.value
    commit: Seconds = 0.005
    """Until a decision is on the disk."""
    restart: Seconds = 5.0
    """From a crash of the server until it answers again."""
    forget: Seconds = math.inf
    """Silence after which a region is retired; one that is back joins again."""
    glance: Seconds | None = None
    """Shortest time between two looks at the rounds; None: a fiftieth of the fastest step."""


@dataclass(frozen=True, slots=True)
class Scenario:
    name: str
    sites: tuple[RegionSite, ...]
    sizes: tuple[int, ...]
    """Parameters of every fragment."""
    sync: SyncSpec
    duration: Seconds
    up_bits: float = measured.BITS_UP["int4"].value
    down_bits: float = measured.BITS_DOWN["int4"].value
    whole_bits: float = measured.BITS_WHOLE.value
    encode_values: float = measured.ENCODE_VALUES.value
    server: ServerSite = field(default_factory=ServerSite)
    recovery: Recovery = field(default_factory=Recovery)
    faults: tuple[Fault, ...] = ()
    budget: float = math.inf
    """Merged tokens after which it is over before `duration` is."""
    seed: int = 0

    @property
    def parameters(self) -> int:
        return sum(self.sizes)

    @property
    def glance(self) -> Seconds:
        if self.server.glance is not None:
            return self.server.glance
        return min(site.step for site in self.sites) / 50


def even(parameters: float, fragments: int) -> tuple[int, ...]:
    """Sizes of fragments cut as evenly as can be."""
    whole, edges = int(parameters), range(fragments + 1)
    cuts = [whole * edge // fragments for edge in edges]
    return tuple(b - a for a, b in itertools.pairwise(cuts))
