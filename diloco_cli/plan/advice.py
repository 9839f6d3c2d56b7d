"""What should change in a spec, why, and at what price?

The mildest changes with which every line suffices come first: a coarser downlink, a longer
period, a coarser uplink, then both. After them, what costs little and helps anyway.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from diloco_cli.plan.needs import gbit, traffic
from diloco_cli.sim import measured
from diloco_cli.sim.scenario import Scenario
from diloco_cli.spec.resolved import resolved
from diloco_cli.spec.schema import RunSpec

MILD_EVERY, USUAL_EVERY, MOST_EVERY = 48, 100, 500
"""Periods that cost hardly anything, that published runs used, and the longest of those."""
MOST_FRAGMENTS = 24
PRICES = {
    "int4": "versions are coarser: rounding of 0.16 of their length, fed back into the next",
    "uniform": "contributions are coarser: 0.29 of their length is sent later, by feedback",
    "sparse": "contributions hold their largest values only; the rest is sent later, by feedback, "
    "and is lost with a region's disk",
    "every": "the loss rises slowly with the period: published runs used 24 to 100, small models "
    "feel it most",
}


@dataclass(frozen=True, slots=True)
class Advice:
    """One key of the spec that should change."""

    key: str
    value: Any
    why: str
    price: str


def advised(spec: RunSpec, scenario: Scenario, target: float) -> list[Advice]:
    """Everything that is worth changing."""
    return [*_for_lines(scenario, target), *_anyway(spec, scenario)]


def followed(spec: RunSpec, advice: Sequence[Advice]) -> RunSpec:
    """The spec with every piece of advice taken."""
    data = resolved(spec)
    for change in advice:
        section, key, *_ = change.key.split(".")
        data[section][key] = change.value
    return RunSpec.model_validate(data)


def pasted(spec: RunSpec, advice: Sequence[Advice]) -> list[str]:
    """The sections that change, each as one line of YAML."""
    import yaml

    data = resolved(followed(spec, advice))
    sections = sorted({change.key.partition(".")[0] for change in advice})
    return [
        f"{name}: "
        + yaml.safe_dump(data[name], default_flow_style=True, width=10_000, sort_keys=False).strip()
        for name in sections
    ]


# Lines


def _for_lines(scenario: Scenario, target: float) -> Iterator[Advice]:
    slowest = min(site.link.rate for site in scenario.sites) / measured.LINE_SHARE.value
    needs = traffic(scenario, target)
    if math.isinf(slowest) or max(needs.need_up, needs.need_down) <= slowest:
        return
    now = scenario
    if needs.need_down > slowest and now.down_bits > measured.BITS_DOWN["int4"].value:
        bits = measured.BITS_DOWN["int4"].value
        now = replace(now, down_bits=bits)
        why = _coarser("down", now.down_bits, scenario.down_bits, needs.need_down)
        yield Advice("wire.down", {"kind": "int4"}, why, PRICES["int4"])
    for kind, most in ((None, MILD_EVERY), ("uniform", USUAL_EVERY), ("sparse", MOST_EVERY)):
        bits = measured.BITS_UP[kind].value if kind else now.up_bits
        if bits > now.up_bits:
            continue
        tried = replace(now, up_bits=bits)
        every = _every(tried, target, slowest)
        if every <= max(most, scenario.sync.every):
            if kind and bits < now.up_bits:
                why = _coarser("up", bits, now.up_bits, needs.need_up)
                yield Advice("wire.up", {"kind": kind}, why, PRICES[kind])
            if every > scenario.sync.every:
                why = f"the model then fits into {gbit(slowest)}, once in {every} steps"
                yield Advice("sync.every", every, why, PRICES["every"])
            return
    yield Advice(
        "sync.every",
        MOST_EVERY,
        f"{gbit(slowest)} is too narrow for this model with any codec; {MOST_EVERY} steps are the "
        "longest period that was published to work",
        "rounds will lag all the same: a wider link, a smaller model or larger batches are better",
    )


def _every(scenario: Scenario, target: float, slowest: float) -> float:
    """The period with which lines suffice; infinite where round trips alone take too long."""
    needs = traffic(scenario, target)
    every = scenario.sync.every * max(1.0, max(needs.need_up, needs.need_down) / slowest)
    return math.ceil(every) if math.isfinite(every) else every


def _coarser(way: str, bits: float, old: float, need: float) -> str:
    return (
        f"{bits:g} bits per parameter {way} instead of {old:g}: the line needs "
        f"{gbit(need * bits / old)} instead of {gbit(need)}"
    )


# Anyway


def _anyway(spec: RunSpec, scenario: Scenario) -> Iterator[Advice]:
    sync, sites = spec.sync, len(scenario.sites)
    if sync.overlap == 0:
        yield Advice(
            "sync.overlap",
            2,
            "training then goes on while fragments travel",
            "steps made meanwhile are based on slightly older weights",
        )
    if sync.quorum == sites > 1:
        yield Advice(
            "sync.quorum",
            max(1, sites // 2),
            f"with a quorum of all {sites}, one dead region stops every round",
            "a round may close without the slowest, whose work then comes one version later",
        )
    even = max(1, min(sync.every, MOST_FRAGMENTS, _worthwhile(scenario)))
    if sync.fragments <= even // 2:
        whole = scenario.parameters * scenario.up_bits / 8e6
        yield Advice(
            "sync.fragments",
            even,
            f"bodies of {whole / even:.3g} MB instead of {whole / sync.fragments:.3g}, so that "
            "the line is used evenly",
            "more and shorter rounds; none in quality",
        )


def _worthwhile(scenario: Scenario) -> int:
    """Bodies below a megabyte cost more round trips than they spread load."""
    return max(1, math.floor(scenario.parameters * scenario.up_bits / 8 / 1e6))
