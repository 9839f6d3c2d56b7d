"""What does a run need: memory, bytes, line rates, cores? In closed form, nothing allocated.

A region exchanges the whole model once in `every` steps, a fragment at a time. With
overlap its training never waits, and a line is wide enough when it carries that volume in
that time. Without overlap every exchange stands in the way, and a line is wide enough when
the waiting is a small share of the time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from diloco_cli.plan.devices import averages
from diloco_cli.sim import measured
from diloco_cli.sim.scenario import RegionSite, Scenario
from diloco_cli.spec.schema import RunSpec

Seconds = float
FLOAT = 4
"""Bytes of a weight: everything is trained and merged in float32."""

TRAINER_BYTES, SERVER_BYTES = 0.8e9, 0.23e9
"""What the processes of a region and the server's take for a tiny model: Python, JAX, buffers."""


@dataclass(frozen=True, slots=True)
class MemoryNeeds:
    """Bytes, of one region's host and of the server; devices are in devices.py."""

    host: float
    """Anchors, and a checkpoint while it is written."""
    server: float
    """One fragment in the making, and what the process itself takes."""
    server_disk: float


def memory(spec: RunSpec, scenario: Scenario) -> MemoryNeeds:
    return MemoryNeeds(
        host=host_memory(spec, scenario.sizes),
        server=server_memory(scenario.sizes),
        server_disk=server_disk(
            scenario.sizes, len(scenario.sites), scenario.up_bits, scenario.down_bits
        ),
    )


def host_memory(spec: RunSpec, sizes: Sequence[int]) -> float:
    """Bytes of the memory of one region's host, without what is on its devices."""
    state = max(averages(spec.inner_of(region.name)) for region in spec.regions)
    return FLOAT * sum(sizes) * (1 + 1 + state) + 2 * FLOAT * max(sizes) + TRAINER_BYTES


def server_memory(sizes: Sequence[int]) -> float:
    """Bytes of a server's memory when it merges the largest fragment and one is fetched whole."""
    from diloco_cli.server.versions.held import HELD_BYTES

    old_and_new, whole_frame = 2 * 3, 2
    held = 3 * FLOAT * sum(sizes)
    held = held if held <= HELD_BYTES else 0
    return SERVER_BYTES + held + FLOAT * max(sizes) * (old_and_new + whole_frame)


def server_disk(sizes: Sequence[int], regions: int, up_bits: float, down_bits: float) -> float:
    """Bytes of a server's folder, for a store with the options it has by default."""
    size = sum(sizes)
    stored, set_aside = 2, 1  # Of eight versions; and the newest, if it is not among them.
    merged = (8 + 1) * regions * up_bits / 8  # Kept for `replay`, and those that wait.
    deltas = 8 * down_bits / 8
    return size * (3 * FLOAT * (stored + set_aside) + merged + deltas)


@dataclass(frozen=True, slots=True)
class TrafficNeeds:
    """Of one region, unless it says otherwise."""

    fragment_up: float
    """Bytes of the largest fragment."""
    fragment_down: float
    cycle_up: float
    """Bytes of one exchange of the whole model."""
    cycle_down: float
    cycle_seconds: Seconds
    need_up: float
    """Bits a second for the target."""
    need_down: float
    server_in: float
    """Bits a second, of all regions."""
    server_out: float
    merge_cores: float


def traffic(scenario: Scenario, target: float) -> TrafficNeeds:
    """What travels, and how wide lines must be to keep the target share of the pace."""
    size, largest = scenario.parameters, max(scenario.sizes)
    up, down = scenario.up_bits, scenario.down_bits
    seconds = scenario.sync.every * _pacing(scenario)
    sites = len(scenario.sites)
    need_up, need_down = (_rate(scenario, bits, seconds, target) for bits in (up, down))
    return TrafficNeeds(
        fragment_up=largest * up / 8,
        fragment_down=largest * down / 8,
        cycle_up=size * up / 8,
        cycle_down=size * down / 8,
        cycle_seconds=seconds,
        need_up=need_up,
        need_down=need_down,
        server_in=sites * need_up,
        server_out=sites * need_down,
        merge_cores=target * sites * size / seconds / measured.MERGE_VALUES.value,
    )


def _pacing(scenario: Scenario) -> Seconds:
    """The step of the region that sets the pace: the quorum-th fastest."""
    return sorted(site.step for site in scenario.sites)[scenario.sync.quorum - 1]


def exchange(scenario: Scenario) -> Seconds:
    """What lines, server and its disk take for one exchange of the whole model, without steps."""
    size, largest, count = scenario.parameters, max(scenario.sizes), len(scenario.sites)
    server = scenario.server
    ways = [
        *((scenario.up_bits, site.upward.rate) for site in scenario.sites),
        *((scenario.down_bits, site.link.rate) for site in scenario.sites),
        *((count * bits, server.link.rate) for bits in (scenario.up_bits, scenario.down_bits)),
    ]
    trips = 2 * max(site.link.round_trip for site in scenario.sites)
    looks = largest / scenario.encode_values + largest / server.check_values
    merging = count * size / server.merge_values + 2 * server.commit
    return max(size * bits / rate for bits, rate in ways) + trips + looks + merging


def _rate(scenario: Scenario, bits: float, seconds: Seconds, target: float) -> float:
    volume, share = scenario.parameters * bits, measured.LINE_SHARE.value
    if scenario.sync.overlap:
        return target * volume / seconds / share
    # Both directions one after the other, and two round trips for every fragment.
    allowed = seconds * (1 / target - 1)
    trips = max(2 * site.link.round_trip for site in scenario.sites) * len(scenario.sizes)
    if allowed <= trips:
        return math.inf
    both = scenario.parameters * (scenario.up_bits + scenario.down_bits)
    return both / (allowed - trips) / share


@dataclass(frozen=True, slots=True)
class Bound:
    """Something that may hold a run up: what is needed ÷ what there is."""

    name: str
    load: float
    words: str


def bounds(scenario: Scenario, needs: TrafficNeeds, cores: int) -> list[Bound]:
    """Everything that may hold the run up, the worst first."""
    all_bounds = [
        Bound(
            "merging",
            needs.merge_cores / cores,
            f"the server merges on {cores} core{'s' * (cores > 1)} and needs "
            f"{needs.merge_cores:.2g}",
        )
    ]
    for site in scenario.sites:
        all_bounds += _line(site, needs)
    for name, need in (("into", needs.server_in), ("out of", needs.server_out)):
        rate = scenario.server.link.rate
        if math.isfinite(rate):
            words = f"the line {name} the server has {gbit(rate)} and needs {gbit(need)}"
            all_bounds.append(Bound(f"line {name} the server", need / rate, words))
    return sorted(all_bounds, key=lambda bound: -bound.load)


def _line(site: RegionSite, needs: TrafficNeeds) -> list[Bound]:
    share = measured.LINE_SHARE.value
    ways = {
        "up": (site.upward.rate / share, needs.need_up),
        "down": (site.link.rate / share, needs.need_down),
    }
    limited = " (wire.rate_limit)" if site.upward is not site.link else ""
    return [
        Bound(
            f"{way} of {site.name}",
            need / rate,
            f"the line of {site.name} has {gbit(rate)}{limited if way == 'up' else ''} and needs "
            f"{gbit(need)} {way}",
        )
        for way, (rate, need) in ways.items()
        if math.isfinite(rate)
    ]


def gbit(rate: float) -> str:
    """A rate for people."""
    for size, unit in ((1e12, "Tbit/s"), (1e9, "Gbit/s"), (1e6, "Mbit/s")):
        if rate >= size:
            return f"{rate / size:.3g} {unit}" if math.isfinite(rate) else "no rate is enough"
    return f"{rate / 1e3:.3g} kbit/s"


def as_data(thing: Any) -> dict[str, object]:
    return {
        key: value if not isinstance(value, float) or math.isfinite(value) else None
        for key, value in asdict(thing).items()
    }
