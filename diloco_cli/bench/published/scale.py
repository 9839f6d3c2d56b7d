"""The preset about size: a thousand regions, a million chips."""

from __future__ import annotations

import resource
import sys
import time
from contextlib import suppress
from pathlib import Path

from diloco_cli.bench.published.verdict import PublishedGoal, Verdict
from diloco_cli.sim import measured
from diloco_cli.sim.faults import Law, drawn
from diloco_cli.sim.network import Link
from diloco_cli.sim.scenario import Recovery, RegionSite, Scenario, ServerSite, even
from diloco_cli.sim.simulator import simulate
from diloco_cli.spec.schema import SyncSpec

YEAR = 365.25 * 86400
REGIONS, CHIPS = 1000, 1000
HOURS = 0.5


def planet(seed: int = 0, regions: int = REGIONS, hours: float = HOURS) -> Verdict:
    """A thousand regions of a thousand chips each, half an hour of them."""
    began, used = time.monotonic(), time.process_time()
    names = [f"region-{number:04d}" for number in range(regions)]
    seconds = 3600 * hours
    scenario = Scenario(
        "planet",
        tuple(
            # A tenth between the fastest and the slowest, so that nobody marches in step.
            RegionSite(name, 10.0 + number / regions, 4e6, Link(5e9, 0.05), chips=CHIPS)
            for number, name in enumerate(names)
        ),
        even(100e9, 8),
        SyncSpec(fragments=8, every=32, quorum=regions // 2),
        seconds,
        server=ServerSite(
            Link(regions * 5e9),
            lease=300.0,
            merge_values=1e6 * measured.MERGE_VALUES.value,
            glance=10.0,
        ),
        recovery=Recovery(detect=10.0, restart=50.0, checkpoint=60.0),
        faults=tuple(drawn(Law(YEAR / CHIPS), names, until=seconds, seed=seed)),
        seed=seed,
    )
    outcome = simulate(scenario)
    took, peak = time.monotonic() - began, _peak_gib()
    return Verdict(
        "planet",
        f"{regions:,} regions, {regions * CHIPS:,} chips, {hours:g} hours",
        ("value",),
        {
            "goodput, time %": [100 * outcome.goodput_time],
            "goodput, tokens %": [100 * outcome.goodput_tokens],
            "participation %": [100 * outcome.participation],
            "uptime %": [100 * outcome.uptime],
            "staleness": [outcome.staleness],
            "failures": [float(outcome.faults)],
            "versions": [float(outcome.versions)],
            "petabytes moved": [(outcome.bytes_up + outcome.bytes_down) / 1e15],
            "events": [float(outcome.events)],
            "processor seconds": [time.process_time() - used],
        },
        goals=(
            PublishedGoal("seconds it took", took, 60.0, lower=True, unit="s"),
            PublishedGoal("memory at the peak", peak, 2.0, lower=True, unit="GiB"),
            PublishedGoal(
                "accelerator libraries loaded", float("jax" in sys.modules), 0.0, lower=True
            ),
        ),
        assumptions=(
            "100 B parameters in 8 fragments every 32 steps of 10 to 11 s; quorum half of all",
            "a chip fails once a year; its region stands still for a minute and goes back to a "
            "checkpoint of the last minute",
            "5 Gbit/s and 100 ms to each region; a server of many machines, as wide as all links",
        ),
    )


def _peak_gib() -> float:
    """The most memory this process ever had."""
    with suppress(OSError):  # What getrusage says, Linux hands down from whoever started us.
        lines = Path("/proc/self/status").read_text().splitlines()
        peak = next(line for line in lines if line.startswith("VmHWM:"))
        return int(peak.split()[1]) * 1024 / 2**30
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used * (1 if sys.platform == "darwin" else 1024) / 2**30
