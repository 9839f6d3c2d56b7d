"""How well does the simulator foretell a run that was made?

    python -m tests.verify.foretell.run FOLDER

The run's own events say how long a step took in each region and how long the bodies were;
with nothing else the simulator predicts rounds, bytes and tokens, which are then compared.
"""

from __future__ import annotations

import json
import statistics
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

from diloco_cli.assemble import fragment_sizes, load_run
from diloco_cli.sim.network import parse_link
from diloco_cli.sim.simulator import simulate
from diloco_cli.sim.world import World, scenario_of

Event = dict[str, Any]
JITTER = World().jitter


def compare(folder: Path, link: str) -> dict[str, tuple[float, float]]:
    """Figures of the run and as predicted, from the second version of everything to the end."""
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    spec = load_run(folder / "spec.resolved.yaml").spec
    published = [event for event in events if event["kind"] == "published"]
    began = max(_second(published, number) for number in range(spec.sync.fragments))
    ended = next(event["time"] for event in events if event["kind"] == "run-ended")
    inside = [event for event in events if began <= event["time"] <= ended]
    seconds = ended - began
    steps = {region.name: _step(inside, region.name) for region in spec.regions}
    scenario, _ = scenario_of(spec, fragment_sizes(spec), World(step=1.0))
    sites = tuple(
        replace(site, step=steps[site.name], link=parse_link(link), jitter=JITTER)
        for site in scenario.sites
    )
    warm = 3 * spec.sync.every * max(steps.values())
    scenario = replace(scenario, sites=sites, budget=float("inf"))
    before, after = (simulate(replace(scenario, duration=d)) for d in (warm, warm + seconds))
    seen = {
        "versions": float(len(_of(inside, "published"))),
        "MB up": sum(event["bytes"] for event in _of(inside, "accepted")) / 1e6,
        "MB down": sum(e["bytes"] for e in _of(inside, "published")) * len(steps) / 1e6,
        "tokens applied": _tokens(published, ended) - _tokens(published, began),
        "participation": statistics.mean(len(e["members"]) for e in _of(inside, "published"))
        / len(steps),
    }
    foretold = {
        "versions": float(after.versions - before.versions),
        "MB up": (after.bytes_up - before.bytes_up) / 1e6,
        "MB down": (after.bytes_down - before.bytes_down) / 1e6,
        "tokens applied": after.tokens - before.tokens,
        "participation": after.participation,
    }
    return {name: (seen[name], foretold[name]) for name in seen}


def _of(events: list[Event], kind: str) -> list[Event]:
    return [event for event in events if event["kind"] == kind]


def _second(published: list[Event], fragment: int) -> float:
    return next(e["time"] for e in published if e["fragment"] == fragment and e["version"] == 2)


def _tokens(published: list[Event], at: float) -> float:
    return [event["tokens"] for event in published if event["time"] <= at][-1]


def _step(events: list[Event], region: str) -> float:
    points = [(e["step"], e["time"]) for e in _of(events, "adopted") if e["region"] == region]
    (first, began), (last, ended) = points[0], points[-1]
    return (ended - began) / (last - first)


if __name__ == "__main__":
    for name, (seen, foretold) in compare(
        Path(sys.argv[1]), *sys.argv[2:] or ["1Gbit/2ms"]
    ).items():
        print(
            f"{name:<16} {seen:12,.2f} seen {foretold:12,.2f} foretold {foretold / seen - 1:+8.1%}"
        )
