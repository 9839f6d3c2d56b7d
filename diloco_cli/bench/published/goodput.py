"""Presets about failures and uneven speeds: how much of the time is well spent."""

from __future__ import annotations

import math
from dataclasses import replace

from diloco_cli.bench.published.verdict import PublishedGoal, Verdict
from diloco_cli.sim.faults import Law, drawn
from diloco_cli.sim.network import Link
from diloco_cli.sim.outcome import SimulationOutcome
from diloco_cli.sim.scenario import Recovery, RegionSite, Scenario, ServerSite, even
from diloco_cli.sim.simulator import simulate
from diloco_cli.spec.schema import GraceSpec, SyncSpec

YEAR = 365.25 * 86400
IDEAL = ServerSite(
    merge_values=math.inf, check_values=math.inf, commit=0.0, lease=1e9, glance=0.001
)
"""A server that costs no time: what is asked for is the effect of the failures alone."""

TABLE1 = {
    "dp-rigid": [72, 57, 38, 27, 18],
    "dp-elastic": [88, 80, 69, 58, 40],
    "M=2": [94, 88, 80, 70, 54],
    "M=4": [96, 93, 89, 82, 73],
    "M=8": [98, 96, 94, 88, 80],
    "M=16": [99, 98, 96, 93, 86],
}
"""Goodput in percent (arXiv 2604.21428, table 1; a chip fails once a year)."""

CHIPS = (150_000, 300_000, 600_000, 1_200_000, 2_400_000)
RIGID = (8.0, 87.0)
ELASTIC = (10.0, 25.2)
"""Seconds a step, seconds a learner stands still after a failure; both fitted."""
LEARNER_SECONDS = 400_000.0
"""Of each cell, all learners together."""


def decoupled_table1(seed: int = 0, seconds: float = LEARNER_SECONDS) -> Verdict:
    """Goodput at 150 k to 2.4 M chips: one job, rigid or elastic, and 2 to 16 learners."""
    kinds = {"dp-rigid": (1, RIGID), "dp-elastic": (1, ELASTIC)}
    kinds |= {f"M={learners}": (learners, ELASTIC) for learners in (2, 4, 8, 16)}
    rows = {
        name: [
            100 * goodput(chips, learners, *fitted, seed=seed, seconds=seconds / learners)
            for chips in CHIPS
        ]
        for name, (learners, fitted) in kinds.items()
    }
    off = {
        (name, place): abs(row[place] - TABLE1[name][place])
        for name, row in rows.items()
        for place in range(len(CHIPS))
    }
    misses = tuple(
        f"{name} at {CHIPS[place]:,} chips: {rows[name][place]:.1f}, "
        f"published {TABLE1[name][place]}"
        for (name, place), points in off.items()
        if points > 4
    )
    return Verdict(
        "decoupled-table1",
        "goodput in percent over chips, a failure a year and chip; 30 cells of the paper",
        ("150k", "300k", "600k", "1.2M", "2.4M"),
        rows,
        {name: [float(cell) for cell in row] for name, row in TABLE1.items()},
        (
            PublishedGoal("cells within 4 points", sum(points <= 4 for points in off.values()), 30),
            PublishedGoal("largest difference", max(off.values()), 4.0, lower=True, unit="points"),
        ),
        misses,
        (
            f"fitted: rigid steps of {RIGID[0]:g} s and {RIGID[1]:g} s of standstill a failure, "
            f"elastic steps of {ELASTIC[0]:g} s and {ELASTIC[1]:g} s; the paper gives neither",
            "a learner finishes the step in which chips fail, then stands still; failures of that "
            "step, and while it stands still, cost nothing more",
            "failures are exponential and independent; goodput is time on kept steps ÷ all time",
            f"from events: {seconds:,.0f} learner-seconds of every cell, seed {seed}; 4 fragments "
            "every 96 steps instead of 24 every 24: fewer events, and learners never wait for any",
        ),
    )


def goodput(
    chips: int, learners: int, step: float, still: float, *, seed: int, seconds: float
) -> float:
    names = [f"learner-{number:02d}" for number in range(learners)]
    law = Law(YEAR * learners / chips)
    scenario = Scenario(
        "table1",
        tuple(RegionSite(name, step, 1.0, chips=chips // learners) for name in names),
        even(5e9, 4),
        SyncSpec(fragments=4, every=96),
        seconds,
        server=replace(IDEAL, glance=1.0),
        encode_values=math.inf,
        recovery=Recovery(detect=0.0, restart=still, at_boundary=True),
        faults=tuple(drawn(law, names, until=seconds, seed=seed)),
        seed=seed,
    )
    return simulate(scenario).goodput_time


HETERO = {"quorum 8, no overlap": [84.0], "quorum 1, no grace": [100.0], "quorum 1, grace": [100.0]}


def hetero(seed: int = 0, seconds: float = 900.0) -> Verdict:
    """Eight learners, half of them 18 % slower, steps that vary by a tenth."""
    outcomes = {
        "quorum 8, no overlap": _hetero(SyncSpec(**_PAPER, overlap=0, quorum=8), seed, seconds),
        "quorum 1, no grace": _hetero(
            SyncSpec(**_PAPER, grace=GraceSpec(kind="none")), seed, seconds
        ),
        "quorum 1, grace": _hetero(SyncSpec(**_PAPER), seed, seconds),
    }
    rows = {
        name: [100 * outcome.utilisation, 100 * outcome.participation, outcome.staleness]
        for name, outcome in outcomes.items()
    }
    nan = float("nan")
    off = max(abs(rows[name][0] - cell[0]) for name, cell in HETERO.items())
    alone, together = (rows[f"quorum 1, {name}"][1] for name in ("no grace", "grace"))
    return Verdict(
        "hetero",
        "eight learners, 18 % between fast and slow, a tenth of jitter",
        ("goodput %", "participation %", "staleness"),
        rows,
        {name: [*cell, nan, nan] for name, cell in HETERO.items()},
        (
            PublishedGoal("largest difference in goodput", off, 3.0, lower=True, unit="points"),
            PublishedGoal("participation that grace adds", together - alone, 20.0, unit="points"),
        ),
        assumptions=(
            "steps of 1.00 and 1.18 s, normally distributed by a tenth, drawn anew each step",
            "24 fragments every 24 steps, adopt: replace as in the paper",
            "a server and links that cost no time",
            "the paper's quality column is not simulated: 25.7 without grace, 37.0 with it on "
            "vision; what grace changes here is how many take part in a version",
        ),
    )


_PAPER = {"fragments": 24, "every": 24, "adopt": "replace"}


def _hetero(sync: SyncSpec, seed: int, seconds: float) -> SimulationOutcome:
    sites = tuple(
        RegionSite(f"learner-{n}", 1.0 if n % 2 else 1.18, 1.0, Link(delay=0.0005), jitter=0.1)
        for n in range(8)
    )
    return simulate(
        Scenario(
            "hetero",
            sites,
            even(5e9, 24),
            sync,
            seconds,
            server=IDEAL,
            encode_values=math.inf,
            seed=seed,
        )
    )


DAYS, INTERRUPTIONS, GPUS = 54, 419, 16_384


def llama3(seed: int = 0) -> Verdict:
    """16,384 GPUs for 54 days with 419 interruptions: one job, or 2 to 16 regions."""
    rows, counted = {}, 0
    for regions in (1, 2, 4, 8, 16):
        outcome = _llama3(regions, seed)
        name = "one synchronous job" if regions == 1 else f"{regions} regions"
        counted = counted or outcome.faults
        rows[name] = [100 * outcome.goodput_time, 100 * outcome.uptime, float(outcome.faults)]
    nan = float("nan")
    spread = abs(counted - INTERRUPTIONS) / math.sqrt(INTERRUPTIONS)
    return Verdict(
        "llama3",
        "16,384 GPUs, 54 days, an interruption every 3.09 hours",
        ("goodput %", "uptime %", "interruptions"),
        rows,
        {"one synchronous job": [90.0, nan, float(INTERRUPTIONS)]},
        (
            PublishedGoal(
                "goodput of one job, reported as above 90", rows["one synchronous job"][0], 90.0
            ),
            PublishedGoal("interruptions, distance to 419", spread, 2.0, lower=True, unit="sigma"),
            PublishedGoal("goodput of 8 regions", rows["8 regions"][0], 98.0),
        ),
        assumptions=(
            "an interruption stops its region for 15 minutes and costs what was trained since a "
            "checkpoint, written every 5 minutes: chosen, not published",
            "exponential failures; interruptions while a region is down cost nothing more",
            "a long exchange (every 4,000 steps of 6 s) and leases of hours, so that 54 days take "
            "seconds; goodput in time does not depend on them",
        ),
    )


def _llama3(regions: int, seed: int) -> SimulationOutcome:
    names = [f"region-{number:02d}" for number in range(regions)]
    seconds = DAYS * 86400.0
    law = Law(seconds / INTERRUPTIONS * regions)
    return simulate(
        Scenario(
            "llama3",
            tuple(RegionSite(name, 6.0, 1.0, chips=GPUS // regions) for name in names),
            even(405e9, 4),
            SyncSpec(fragments=4, every=4000),
            seconds,
            server=IDEAL,
            encode_values=math.inf,
            recovery=Recovery(detect=60.0, restart=840.0, checkpoint=300.0),
            faults=tuple(drawn(law, names, until=seconds, seed=seed)),
            seed=seed,
        )
    )
