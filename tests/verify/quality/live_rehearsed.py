"""Does a live run reach the loss that its rehearsal foretells? The same spec both ways.

    python -m tests.verify.quality.live_rehearsed build/live.jsonl --seeds 71,72,73

Live: `diloco run`, real processes, sockets, frames and disks, with steps of a fifth of a second, so
that a heartbeat is as short beside a round as in a real run. Rehearsed: `diloco bench quality`'s
way, on a virtual clock. The global weights of both are measured on the same held-out text.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

STEP_SECONDS = 0.2
REGIONS = 2
STEPS = 600
DEADLINE = 1800.0


def written(spec: Any, folder: Path) -> Path:
    """The spec as a file that sets the pace of the regions."""
    said = spec.model_dump(mode="json", exclude_unset=True)
    said["chaos"] = {"step_seconds": STEP_SECONDS}
    path = folder / "live.yaml"
    path.write_text(yaml.safe_dump(said, sort_keys=False))
    return path


def lived(spec: Any, folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Runs it; gives the weights at the end and the run's summary."""
    from safetensors.numpy import load_file

    diloco, run = [sys.executable, "-m", "diloco_cli"], folder / "run"
    with (folder / "live.log").open("wb") as log:
        for words in (
            ["run", str(written(spec, folder)), "--dir", str(run)],
            ["pull", str(run), "--out", str(folder / "weights.safetensors")],
        ):
            done = subprocess.run(
                [*diloco, *words], stdout=log, stderr=subprocess.STDOUT, timeout=DEADLINE
            )
            if done.returncode:
                tail = (folder / "live.log").read_text()[-2000:]
                raise SystemExit(f"diloco {words[0]} ended with {done.returncode}:\n{tail}")
    summary = json.loads((run / "summary.json").read_text())
    return load_file(folder / "weights.safetensors"), summary


def compared(seed: int, steps: int = STEPS) -> dict[str, Any]:
    """Both losses of one seed, and that of the weights before the first step."""
    from diloco_cli.bench.quality.cells import Cell
    from diloco_cli.bench.quality.experiment import (
        Budget,
        evaluate,
        heldout_of,
        run_cell,
        spec_of,
    )
    from diloco_cli.models import models

    budget = Budget(tokens=16 * 32 * steps, batch=16, sequence=32, lr=6e-3, windows=2048)
    cell = Cell(f"regions {REGIONS}", REGIONS)
    spec, began = spec_of(cell, budget, seed), time.monotonic()
    parts = heldout_of(spec, budget.windows)

    def loss(weights: dict[str, Any]) -> float:
        return sum(evaluate(spec, weights, part) for part in parts) / 2

    rehearsed = run_cell(cell, budget, seed)
    with tempfile.TemporaryDirectory(prefix="live-") as folder:
        weights, summary = lived(spec, Path(folder))
    return {
        "id": f"live and rehearsed, seed {seed}, {steps} steps",
        "cell": cell.name,
        "seed": seed,
        "first": round(loss(models.build(spec.model).init(seed)), 6),
        "live": round(loss(weights), 6),
        "rehearsed": rehearsed["loss"],
        "applied": summary["tokens"]["applied"],
        "budget": budget.tokens,
        "rounds": [summary["outer_steps"] / spec.sync.fragments, rehearsed["versions"]],
        "seconds": round(time.monotonic() - began, 1),
    }


def told(records: Sequence[dict[str, Any]]) -> str:
    """The comparison in a sentence; the noise is that of other seeds."""
    from diloco_cli.bench.quality.table import half_interval

    changes = [100 * (each["live"] / each["rehearsed"] - 1) for each in records]
    half = half_interval(changes)
    spread = f" ± {half:.2f}" if half is not None else ""
    return (
        f"live against rehearsed: {statistics.fmean(changes):+.2f}{spread} %, {len(changes)} seeds"
    )


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("file", type=Path, help="where a line for each seed goes")
    parser.add_argument("--seeds", default="71,72,73")
    parser.add_argument("--steps", type=int, default=STEPS)
    options = parser.parse_args(words)
    from diloco_cli.bench.quality.runner import append, read
    from diloco_cli.worker.trainer.task import set_up

    set_up(None)
    known = {record["id"]: record for record in read(options.file)}
    for seed in map(int, options.seeds.split(",")):
        if f"live and rehearsed, seed {seed}, {options.steps} steps" in known:
            continue
        record = compared(seed, options.steps)
        append(options.file, record)
        known[record["id"]] = record
        print(json.dumps(record), flush=True)
    print(told(list(known.values())))
    return 0


if __name__ == "__main__":
    sys.exit(main())
