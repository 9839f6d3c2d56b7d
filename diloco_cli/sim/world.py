"""A run spec and what no spec says become a scenario.

How fast a region steps, how wide its link is and how often it dies are facts about the
world. Whatever is left out is assumed, and every assumption is written down.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from diloco_cli.errors import SpecError
from diloco_cli.sim import faults, measured
from diloco_cli.sim.network import Link, parse_link
from diloco_cli.sim.scenario import Recovery, RegionSite, Scenario, ServerSite
from diloco_cli.spec.schema import RegionSpec, RunSpec

Seconds = float
CYCLES = 100
"""Exchanges of the whole model that are simulated when no duration is given."""
LEAST_STEP, MOST_STEP = 1e-6, 1e9
"""Seconds of an inner step that can be simulated."""
MOST_STEPS, MOST_DRAWN = 3 * 10**8, 10**6
"""Inner steps of all regions, and failures, that one simulation may have."""
CORE_FLOPS = 40e9
"""What one core of a laptop sustains: 8.1 k tokens/s of the quickstart's model, as it prints."""


@dataclass(frozen=True, slots=True)
class World:
    """What a spec does not say."""

    step: Seconds | None = None
    """One inner step of a region at full speed."""
    steps: Mapping[str, Seconds] = field(default_factory=dict)
    """Steps of single regions as they were measured, slowed down or not."""
    flops: float | None = None
    """Sustained by one region; steps then take 6 × parameters × tokens ÷ this."""
    links: tuple[str, ...] = ()
    """RATE/RTT for all regions, or REGION=RATE/RTT for one."""
    server_link: str = ""
    mtbf: Seconds = math.inf
    """Of one region."""
    shape: float = 1.0
    kind: faults.Kind = "kill-trainer"
    server_mtbf: Seconds = math.inf
    recovery: Recovery = field(default_factory=Recovery)
    jitter: float = 0.05
    """Of real machines; without any, all regions would step at the same moments."""
    cores: int = 1
    """That the server merges on."""
    duration: Seconds | None = None
    trace: Path | None = None
    seed: int = 0


def scenario_of(spec: RunSpec, sizes: tuple[int, ...], world: World) -> tuple[Scenario, list[str]]:
    """Returns the scenario, and in words what had to be assumed.

    `sizes` are the parameters of every fragment, as `assemble.fragment_sizes` counts them.
    """
    assumptions: list[str] = []
    sites = tuple(_site(spec, region, sum(sizes), world) for region in spec.regions)
    _refuse_steps(sites, world)
    if estimate := _estimated_step(spec, sites, world):
        assumptions.append(estimate)
    if not world.links:
        assumptions.append("links of any rate and no delay (give --link)")
    duration = world.duration or CYCLES * spec.sync.every * max(site.step for site in sites)
    _refuse_more(sites, world, duration)
    names = [site.name for site in sites]
    wide = parse_link(world.server_link) if world.server_link else Link()
    scenario = Scenario(
        name=spec.name,
        sites=sites,
        sizes=sizes,
        sync=spec.sync,
        duration=duration,
        up_bits=measured.bits(spec.wire.up, measured.BITS_UP),
        down_bits=measured.bits(spec.wire.down, measured.BITS_DOWN),
        server=ServerSite(
            wide,
            # Heartbeats between two steps say nothing new: a twentieth of a step is often enough.
            max(spec.server.lease, max(site.step for site in sites) / 5),
            merge_values=world.cores * measured.MERGE_VALUES.value,
            check_values=world.cores * measured.CHECK_VALUES.value,
            forget=spec.server.forget_seconds,
        ),
        recovery=world.recovery,
        faults=tuple(_faults(world, names, duration)),
        budget=float(spec.budget.tokens),
        seed=world.seed,
    )
    assumptions.append(
        f"{spec.wire.up['kind']} up takes {scenario.up_bits:g} bits per parameter, "
        f"{spec.wire.down['kind']} down {scenario.down_bits:g} ({measured.WIRE})"
    )
    return scenario, assumptions


def pace_of(spec: RunSpec) -> Seconds:
    """The step that the spec's `chaos` imposes; 0 where it imposes none."""
    return (spec.chaos.step_seconds if spec.chaos else None) or 0.0


def _estimated_step(spec: RunSpec, sites: Sequence[RegionSite], world: World) -> str:
    """How long a step was assumed to take; empty if all steps were given."""
    unknown = [site for site in sites if site.name not in world.steps]
    if world.step is not None or not unknown:
        return ""
    if world.flops is None and pace_of(spec):
        return f"a step takes the {pace_of(spec):g} s of chaos.step_seconds, divided by the speed"
    return (
        f"a step takes {unknown[0].step:.3g} s in {unknown[0].name}: 6 × parameters × tokens at "
        f"{world.flops or CORE_FLOPS:.3g} flop/s"
        + ("" if world.flops else " (one processor core; give --step or --flops)")
    )


def _site(spec: RunSpec, region: RegionSpec, parameters: int, world: World) -> RegionSite:
    inner = spec.inner_of(region.name)
    tokens = inner.batch * inner.sequence
    step = world.step or 6.0 * parameters * tokens / (world.flops or CORE_FLOPS)
    if world.step is None and world.flops is None and pace_of(spec):
        step = pace_of(spec)
    step = world.steps.get(region.name, step / region.speed)
    link = _link(region.name, world.links, [each.name for each in spec.regions])
    limit = spec.wire.bits_per_second or math.inf
    return RegionSite(region.name, step, float(tokens), link, world.jitter, most_up=limit)


def _link(name: str, links: Sequence[str], known: Sequence[str]) -> Link:
    """The link said of this region, or else of all; bodies get the measured share of it."""
    chosen = Link()
    for words in links:
        region, given, link = words.partition("=")
        if not given or "/" in region:  # As in 1Gbit/50ms/window=4MB.
            region, link = "", words
        if region and region not in known:
            raise SpecError(f"--link {words}: there is no region {region!r}.")
        if region in ("", name):
            chosen = parse_link(link)
    return replace(chosen, rate=chosen.rate * measured.LINE_SHARE.value)


def _refuse_steps(sites: Sequence[RegionSite], world: World) -> None:
    """Raises where a step is shorter or longer than any could be, naming what was said."""
    for site in sites:
        if LEAST_STEP <= site.step <= MOST_STEP:
            continue
        told = f"{world.flops or CORE_FLOPS:g} flop/s"
        if world.step is not None:
            told = f"a step of {world.step:g} s at full speed"
        raise SpecError(
            f"With {told} an inner step of {site.name} takes {site.step:.3g} s; between "
            f"{LEAST_STEP:g} and {MOST_STEP:g} s can be simulated.",
            hint="Give another --step or --flops; is it for another model?",
        )


def _refuse_more(sites: Sequence[RegionSite], world: World, duration: Seconds) -> None:
    """Raises where a simulation would not end while somebody waits for it."""
    steps = sum(duration / site.step for site in sites)
    if steps > MOST_STEPS:
        fastest = min(site.step for site in sites)
        raise SpecError(
            f"{duration:.3g} s with steps of {fastest:.3g} s are {steps:.2g} inner steps of all "
            f"regions; {MOST_STEPS:.0e} are the most that can be simulated.",
            hint="Is a region's speed or step right? If so: fewer regions, a smaller sync.every, "
            "or a shorter time (`diloco simulate --duration`).",
        )
    for mean, option, struck in (
        (world.mtbf, "--mtbf", len(sites)),
        (world.server_mtbf, "--server-mtbf", 1),
    ):
        if world.trace is None and struck * duration / mean > MOST_DRAWN:
            raise SpecError(
                f"{option}: with {mean:g} s between two failures there are "
                f"{struck * duration / mean:.2g} of them in {duration:.3g} s; {MOST_DRAWN:.0e} are "
                "the most that can be simulated.",
                hint=f"Give a longer {option}, or a shorter time (`diloco simulate --duration`).",
            )


def _faults(world: World, names: Sequence[str], until: Seconds) -> list[faults.Fault]:
    if world.trace is not None:
        return faults.load(world.trace, names)
    drawn = faults.drawn(
        faults.Law(world.mtbf, world.shape), names, until=until, seed=world.seed, kind=world.kind
    )
    law = faults.Law(world.server_mtbf)
    drawn += faults.drawn(law, (), until=until, seed=world.seed, kind="kill-server")
    return faults.in_order(drawn)


def with_regions(spec: RunSpec, count: int) -> RunSpec:
    """The same run with so many regions: the first of them, or more like them."""
    if not 1 <= count <= 100_000:
        raise SpecError(f"regions={count}: between 1 and 100,000 can be simulated.")
    known = spec.regions
    more = [
        known[number % len(known)].model_copy(update={"name": f"region-{number + 1}"})
        for number in range(len(known), count)
    ]
    return spec.model_copy(update={"regions": (*known[:count], *more)})
