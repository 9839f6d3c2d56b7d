"""How well does a simulation predict a chaos run? `python -m tests.verify.foretell.chaos FOLDER...`

Each folder is of a `diloco chaos` that was run. The simulator gets its spec, the schedule as
it was inflicted, and how long a region took to come back, on average; nothing of what the
storm cost. Both then say what share of the tokens was applied.
"""

from __future__ import annotations

import argparse
import json
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

from diloco_cli.assemble import fragment_sizes, load_run
from diloco_cli.sim import faults
from diloco_cli.sim.scenario import Recovery
from diloco_cli.sim.simulator import simulate
from diloco_cli.sim.world import World, scenario_of
from diloco_cli.worker.trainer.checkpoints.checkpoint import SHORTEST

WITHIN = 3.0
"""Points between the two that the simulator is held to."""
SEEDS = range(5)
"""Of the steps' jitter."""


def foretold(folder: Path) -> dict[str, Any]:
    record = json.loads((folder / "chaos.json").read_text())
    spec = load_run(folder / "spec.resolved.yaml").spec
    names = [region.name for region in spec.regions]
    struck = [fault for fault in record["faults"] if "skipped" not in fault]
    back = [fault["recovery"] for fault in struck if fault.get("recovery")]
    detect = statistics.mean(one["detect"] for one in back) if back else 0.0
    total = statistics.mean(one["total"] for one in back) if back else 1.0
    recovery = Recovery(detect, total - detect, checkpoint=SHORTEST, anew=True)
    planned = {fault.time: fault for fault in faults.load(folder / "schedule.json", names)}
    inflicted = faults.in_order(
        replace(planned[fault["time"]], time=fault["at"]) for fault in struck
    )
    shares = []
    for seed in SEEDS:
        world = World(recovery=recovery, duration=record["seconds"], seed=seed)
        scenario, _ = scenario_of(spec, fragment_sizes(spec), world)
        scenario = replace(scenario, faults=tuple(inflicted), budget=float("inf"))
        shares.append(simulate(scenario).goodput_tokens)
    return {
        "regions": len(names),
        "kills": len(inflicted),
        "per_hour": round(3600 * len(inflicted) / record["seconds"]),
        "recovery": round(total, 2),
        "measured": round(100 * record["goodput"]["tokens"], 1),
        "foretold": round(100 * statistics.mean(shares), 1),
        "spread": round(100 * (max(shares) - min(shares)), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, prog="python -m tests.verify.foretell.chaos"
    )
    parser.add_argument("folders", nargs="+", type=Path)
    missed = 0
    print("| regions | kills | an hour | back after s | measured % | foretold % | off by |")
    print("| --: | --: | --: | --: | --: | --: | --: |")
    for folder in parser.parse_args().folders:
        found = foretold(folder)
        off = found["foretold"] - found["measured"]
        missed += abs(off) > WITHIN
        keys = ("regions", "kills", "per_hour", "recovery", "measured", "foretold")
        print("| " + " | ".join(str(found[key]) for key in keys) + f" | {off:+.1f} |")
    raise SystemExit(f"{missed} off by more than {WITHIN:g} points" if missed else 0)


if __name__ == "__main__":
    main()
