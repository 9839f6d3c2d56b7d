"""What does a run need: memory, bytes, line rates, cores? In closed form, nothing allocated.

A region exchanges the whole model once in `every` steps, a fragment at a time. With
overlap its training never waits, and a line is wide enough when it carries that volume in
that time. Without overlap every exchange stands in the way, and a line is wide enough when
the waiting is a small share of the time.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

from diloco_cli.sim import measured
from diloco_cli.sim.scenario import RegionSite, Scenario
from diloco_cli.spec.schema import RunSpec

Seconds = float
FLOAT = 4
"""Bytes of a weight: everything is trained and merged in float32."""


@dataclass(frozen=True, slots=True)
class MemoryNeeds:
    """Bytes, of one trainer and of the server."""

    device: float
    """Weights, gradients and the optimiser's averages; activations come on top."""
    activations: float
    """Roughly, of one micro-batch without recomputation."""
    host: float
    """Anchors, and a checkpoint while it is written."""
    server: float
    """Weights, momentum and published weights, and one round in the making."""
    server_disk: float


def memory(spec: RunSpec, scenario: Scenario) -> MemoryNeeds:
    size, largest = scenario.parameters, max(scenario.sizes)
    optimizer = spec.inner.optimizer
    averages = {"adamw": 2, "sgd": 1 if optimizer.get("momentum", 0.9) else 0}
    state = averages.get(str(optimizer.get("kind")), 2)
    return MemoryNeeds(
        device=FLOAT * size * (2 + state),
        activations=_activations(spec),
        host=FLOAT * size * (1 + 1 + state) + 2 * FLOAT * largest,
        server=FLOAT * size * 3 + 6 * FLOAT * largest,
        server_disk=FLOAT * size * 3 * 2
        + len(scenario.sites) * size * scenario.up_bits / 8
        + 4 * size * scenario.down_bits / 8,
    )


def _activations(spec: RunSpec) -> float:
    from diloco_cli.models import Described, models

    model, inner = models.build(spec.model), spec.inner
    tokens = inner.batch * inner.sequence / inner.accumulate
    return model.activation_bytes(tokens) if isinstance(model, Described) else 0.0


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
    found = [
        Bound(
            "merging",
            needs.merge_cores / cores,
            f"the server merges on {cores} core{'s' * (cores > 1)} and needs "
            f"{needs.merge_cores:.2g}",
        )
    ]
    for site in scenario.sites:
        found += _line(site, needs)
    for name, need in (("into", needs.server_in), ("out of", needs.server_out)):
        rate = scenario.hub.link.rate
        if math.isfinite(rate):
            words = f"the line {name} the server has {gbit(rate)} and needs {gbit(need)}"
            found.append(Bound(f"line {name} the server", need / rate, words))
    return sorted(found, key=lambda bound: -bound.load)


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


def as_data(thing: Any) -> dict[str, Any]:
    return {
        key: value if not isinstance(value, float) or math.isfinite(value) else None
        for key, value in asdict(thing).items()
    }
