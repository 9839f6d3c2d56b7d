"""Many simulations: every combination of the values that are varied.

--vary regions=2,4,8 --vary link=0.5,1,2Gbit --vary sync.every=12,24
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from diloco_cli.errors import SpecError
from diloco_cli.sim.outcome import SimulationOutcome
from diloco_cli.sim.scenario import Scenario
from diloco_cli.sim.simulator import simulate
from diloco_cli.sim.world import World, scenario_of, with_regions
from diloco_cli.spec.quantities import FLOPS, SPAN
from diloco_cli.spec.schema import RunSpec

WORLD_KEYS = ("regions", "link", "step", "flops", "mtbf", "restart", "seed")
MOST = 1000


@dataclass(frozen=True, slots=True)
class SimulatedCell:
    """One combination and what came of it."""

    varied: dict[str, str]
    scenario: Scenario
    outcome: SimulationOutcome
    assumptions: list[str]

    @property
    def label(self) -> str:
        return " ".join(f"{key}={value}" for key, value in self.varied.items()) or "as given"


def parse_vary(words: Sequence[str]) -> dict[str, list[str]]:
    """Reads KEY=VALUE,VALUE; a unit after the last value counts for those without one."""
    axes: dict[str, list[str]] = {}
    for word in words:
        key, given, values = word.partition("=")
        listed = [value.strip() for value in values.split(",") if value.strip()]
        if not given or not listed or (key not in WORLD_KEYS and "." not in key):
            raise SpecError(
                f"--vary {word} is not understood.",
                hint=f"Vary {', '.join(WORLD_KEYS)}, or a key of the spec: --vary sync.every=12,24",
            )
        unit = re.search(r"[A-Za-z].*$", listed[-1])
        if unit and key in ("link", "step", "mtbf", "restart"):
            listed = [v if re.search(r"[A-Za-z]", v) else v + unit[0] for v in listed]
        axes[key] = listed
    count = 1
    for values in axes.values():
        count *= len(values)
    if count > MOST:
        raise SpecError(f"--vary asks for {count:,} simulations; {MOST:,} are the most at once.")
    return axes


def sweep(
    load: Callable[[Sequence[str]], tuple[RunSpec, tuple[int, ...]]],
    world: World,
    axes: dict[str, list[str]],
) -> Iterator[SimulatedCell]:
    """Simulates every combination; `load` returns the spec with some keys overridden, and the
    sizes of its fragments."""
    for chosen in itertools.product(*axes.values()):
        varied = dict(zip(axes, chosen, strict=True))
        overrides = [f"{key}={value}" for key, value in varied.items() if "." in key]
        (spec, sizes), changed = load(overrides), world
        for key, value in varied.items():
            spec, changed = _changed(spec, changed, key, value)
        scenario, assumptions = scenario_of(spec, sizes, changed)
        yield SimulatedCell(varied, scenario, simulate(scenario), assumptions)


def _changed(spec: RunSpec, world: World, key: str, value: str) -> tuple[RunSpec, World]:
    try:
        if key == "regions":
            return with_regions(spec, int(value)), world
        if key == "link":
            # A rate alone keeps the round trip that --link gave.
            rest = [link.partition("/")[2] for link in world.links if "=" not in link]
            words = value if "/" in value or not rest else f"{value}/{rest[-1]}"
            return spec, replace(world, links=(words,))
        if key == "restart":
            recovery = replace(world.recovery, restart=SPAN.read(value))
            return spec, replace(world, recovery=recovery)
        if key in ("step", "mtbf"):
            return spec, replace(world, **{key: SPAN.read(value)})
        if key == "flops":
            return spec, replace(world, flops=FLOPS.read(value))
        return spec, replace(world, seed=int(value)) if key == "seed" else world
    except ValueError:
        raise SpecError(f"--vary {key}={value}: {value!r} is no number.") from None
