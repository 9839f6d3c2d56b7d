"""Will it do? What a run needs, what to expect of it, what holds it up, what to change.

needs        closed form, from the spec's own model, fragments and codecs
expectation  a simulation of some exchanges over the links that were given
advice       the mildest changes with which the lines suffice, each with its price
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from diloco_cli.assemble import fragment_sizes
from diloco_cli.models import Described, models
from diloco_cli.net.options import DEFAULTS
from diloco_cli.net.transfer.throughput import PATIENCE, Throughput
from diloco_cli.observe.units import seconds
from diloco_cli.plan.advice import Advice, advised, followed, pasted
from diloco_cli.plan.devices import (
    LIKELY_MFU,
    DeviceNeeds,
    DeviceVerdict,
    NamedDevice,
    alike,
    device_needs,
    likely_steps,
    verdicts,
)
from diloco_cli.plan.needs import (
    Bound,
    MemoryNeeds,
    TrafficNeeds,
    bounds,
    exchange,
    memory,
    traffic,
)
from diloco_cli.sim.outcome import SimulationOutcome
from diloco_cli.sim.scenario import Scenario
from diloco_cli.sim.simulator import simulate
from diloco_cli.sim.world import World, scenario_of
from diloco_cli.spec.schema import RunSpec

Seconds = float
CYCLES = 12
"""Exchanges of the whole model that are simulated."""
MOST_STEPS = 100_000
"""Inner steps of all regions that are simulated to see so many over lines that take long."""


@dataclass(frozen=True, slots=True)
class TimeOut:
    name: str
    seconds: Seconds
    why: str


@dataclass(frozen=True, slots=True)
class Plan:
    spec: RunSpec
    scenario: Scenario
    target: float
    memory: MemoryNeeds
    devices: list[DeviceNeeds]
    """Of every region, each of its devices."""
    verdicts: list[DeviceVerdict]
    """Whether they fit; none where no device was named."""
    needs: TrafficNeeds
    expected: SimulationOutcome
    bounds: list[Bound]
    advice: list[Advice]
    better: SimulationOutcome | None
    """What to expect once the advice is taken."""
    unbroken: float
    """Share of the time that a region is not down or doing lost steps again."""
    time_outs: list[TimeOut]
    assumptions: list[str]

    @property
    def goodput(self) -> float:
        """Share of the regions' time that failures leave."""
        return self.expected.goodput_time * self.unbroken

    @property
    def tokens_per_day(self) -> float:
        return tokens_per_day(self.expected) * self.unbroken

    @property
    def day(self) -> tuple[float, float]:
        """Bytes that one region sends and fetches in a day, as simulated."""
        share = 86400 / self.expected.seconds / len(self.scenario.sites) * self.unbroken
        return self.expected.bytes_up * share, self.expected.bytes_down * share

    @property
    def days(self) -> float:
        rate = self.tokens_per_day
        return self.spec.budget.tokens / rate if rate else math.inf

    @property
    def problems(self) -> list[str]:
        """What is wrong, whether or not something can be changed about it; one clause each."""
        large = [verdict for verdict in self.verdicts if not verdict.fits]
        found = [
            f"too large for {large[0].device.name}: {names} need{'s' * (',' not in names)} "
            f"{needs.total / 1e9:.3g} GB on each device, of {large[0].device.memory / 1e9:.3g} GB"
            for names, needs in alike(verdict.needs for verdict in large)
        ]
        if not self.expected.versions:
            found.append(
                f"nothing comes of it: not one version within {seconds(self.expected.seconds)}, as "
                f"one exchange of the model takes {seconds(exchange(self.scenario))}"
            )
        held_up = self.bounds[0].load > 1 or self.unbroken < 0.9
        if held_up and not self.advice:
            found.append(self.binding)
        return [*found, *_impossible(self)]

    @property
    def binding(self) -> str:
        """What holds the run up, in words."""
        worst = self.bounds[0]
        if worst.load > 1:
            return f"{worst.words}: rounds come at {1 / worst.load:.0%} of the pace asked for"
        if self.unbroken < 0.9:
            return f"failures: {1 - self.unbroken:.0%} of the regions' time is lost to them"
        return (
            "the regions' own speed: no line and no core is short "
            f"(the busiest is used to {worst.load:.0%}: {worst.words})"
        )


def _impossible(plan: Plan) -> Iterator[str]:
    """Speeds that the devices cannot have."""
    speeds = {site.name: site.step for site in plan.scenario.sites}
    model = models.build(plan.spec.model)
    if not isinstance(model, Described):
        return
    for verdict in plan.verdicts:
        name, peak = verdict.needs.region, verdict.device.peak
        inner = plan.spec.inner_of(name)
        asked = model.step_flops(inner.batch, inner.sequence) / speeds[name]
        if peak is not None and asked > peak * verdict.needs.devices:
            yield (
                f"{name} cannot be that fast: {asked:.3g} flop/s are asked of "
                f"{verdict.needs.devices} × {verdict.device.name}, which do "
                f"{peak * verdict.needs.devices:.3g} at best"
            )


def tokens_per_day(outcome: SimulationOutcome) -> float:
    """Once under way: the first third, in which fragments are called for the first time, is not
    counted."""
    points = [point for point in outcome.timeline if point[0] >= outcome.seconds / 3]
    if len(points) < 2 or points[-1][0] <= points[0][0]:
        return outcome.tokens / outcome.seconds * 86400
    (began, first, _), (ended, last, _) = points[0], points[-1]
    return (last - first) / (ended - began) * 86400


def plan(
    spec: RunSpec, world: World, *, target: float = 0.95, device: NamedDevice | None = None
) -> Plan:
    """Answers everything about a run before it begins."""
    notes: list[str] = []
    if device and world.step is None and world.flops is None:
        steps = likely_steps(spec, device)
        world = replace(world, steps={**steps, **world.steps})
        if steps:
            slowest = max(steps, key=lambda name: steps[name])
            notes.append(
                f"a step takes {steps[slowest]:.3g} s in {slowest}: {LIKELY_MFU:.0%} of what its "
                f"devices can do at best (or give --step or --flops)"
            )
    # Some exchanges are too short to meet rare failures, so those are computed.
    calm = replace(world, mtbf=math.inf, server_mtbf=math.inf)
    scenario, assumptions = _simulated(spec, calm)
    needs = traffic(scenario, target)
    advice = advised(spec, scenario, target)
    return Plan(
        spec,
        scenario,
        target,
        memory(spec, scenario),
        device_needs(spec, device),
        verdicts(spec, device) if device else [],
        needs,
        simulate(scenario),
        bounds(scenario, needs, world.cores),
        advice,
        simulate(_simulated(followed(spec, advice), calm)[0]) if advice else None,
        unbroken(world),
        time_outs(spec, scenario, needs),
        [
            *notes,
            *assumptions,
            f"{CYCLES} exchanges of the model were simulated, seed {world.seed}",
        ],
    )


def unbroken(world: World) -> float:
    """What failures leave of a region's time; half a checkpoint's distance is done again."""
    recovery = world.recovery
    lost = recovery.detect + recovery.restart + recovery.checkpoint / 2
    return 1 / (1 + lost / world.mtbf)


def _simulated(spec: RunSpec, world: World) -> tuple[Scenario, list[str]]:
    sizes = fragment_sizes(spec)
    # How long to look is not known before the sites are.
    first = replace(world, duration=world.duration or 1e-9)
    scenario, assumptions = scenario_of(spec, sizes, first)
    cycle = spec.sync.every * max(site.step for site in scenario.sites)
    # What lines and disk take for one exchange may be longer than its steps.
    whole = min(CYCLES * exchange(scenario), MOST_STEPS / sum(1 / s.step for s in scenario.sites))
    duration = world.duration or max(CYCLES * cycle, whole)
    longer, _ = scenario_of(spec, sizes, replace(world, duration=duration))
    return replace(longer, budget=math.inf), assumptions


# Time-outs


def time_outs(spec: RunSpec, scenario: Scenario, needs: TrafficNeeds) -> list[TimeOut]:
    """What the run will wait for, and how long, from the code that waits."""
    waits, lease = DEFAULTS.timeouts, spec.server.lease
    limits = [
        TimeOut("connect", waits.connect, "for a connection; fixed"),
        TimeOut("answer", waits.answer, "for an answer, without the time a body takes; fixed"),
        TimeOut("lease", lease, "of silence until a region counts as gone (server.lease)"),
        TimeOut("heartbeat", lease / 4, "between two at most: a quarter of the lease"),
    ]
    slow = min(scenario.sites, key=lambda site: site.link.rate)
    for way, size in (("up", needs.fragment_up), ("down", needs.fragment_down)):
        gauge = Throughput(way, DEFAULTS)
        limits.append(
            TimeOut(
                f"fragment {way}, at first",
                gauge.seconds(int(size)),
                f"{waits.slowest_bytes_per_second / 1e3:.0f} kB/s are assumed until the link is "
                "measured",
            )
        )
        if math.isfinite(slow.link.rate):
            gauge.rate = slow.link.rate / 8
            limits.append(
                TimeOut(
                    f"fragment {way}, then",
                    gauge.seconds(int(size)),
                    f"{PATIENCE:g} times what {size / 1e6:.3g} MB take at the measured rate, and "
                    "an answer",
                )
            )
    return limits


def as_data(plan: Plan) -> dict[str, object]:
    """The whole answer as plain data."""
    from diloco_cli.plan import needs

    expected = plan.expected
    return {
        "run": plan.spec.name,
        "parameters": plan.scenario.parameters,
        "fragments": list(plan.scenario.sizes),
        "step_seconds": {site.name: site.step for site in plan.scenario.sites},
        "target": plan.target,
        "memory": needs.as_data(plan.memory),
        "devices": [
            {**needs.as_data(one), "total": one.total, **_fits(plan, one)} for one in plan.devices
        ],
        "problems": plan.problems,
        "traffic": needs.as_data(plan.needs),
        "expected": {
            **expected.as_data(),
            "goodput": plan.goodput,
            "bytes_per_day": {"up": plan.day[0], "down": plan.day[1]},
            "tokens_per_day": plan.tokens_per_day,
            "days_to_budget": plan.days,
        },
        "binding": plan.binding,
        "bounds": [needs.as_data(bound) for bound in plan.bounds],
        "advice": [needs.as_data(advice) for advice in plan.advice],
        "spec_lines": pasted(plan.spec, plan.advice),
        "with_advice": plan.better.as_data() if plan.better else None,
        "time_outs": [needs.as_data(time_out) for time_out in plan.time_outs],
        "assumptions": plan.assumptions,
    }


def _fits(plan: Plan, one: DeviceNeeds) -> dict[str, object]:
    found = next((each for each in plan.verdicts if each.needs.region == one.region), None)
    return {"fits": found.fits, "remedy": found.remedy} if found else {"fits": None}
