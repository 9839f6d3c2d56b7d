"""What does an absence cost, and is a region that comes back better left out? One resumable table.

    nice -n 5 python -m tests.verify.quality.absences docs/results/raw/quality-absences.jsonl

Four regions; something happens to the last. All ways have the same time, so one in which a region
stands still for half of the run has an eighth of the tokens less, and its schedule ends with them.
What is in the file is not run again. "In turns", two regions are there all the time and one of two
others: as much compute as three steady ones.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from diloco_cli.bench.quality.cells import CUT, DISK, DROPPED, MIXED, TURNS, Cell

SEEDS = (41, 42, 43, 44, 45, 46, 47, 48)
TOKENS_A_STEP, STEPS = 16 * 32, 2400


@dataclass(frozen=True)
class Way:
    """A cell, its share of the tokens of all four regions, and what it is held against."""

    cell: Cell
    share: float = 1.0
    against: tuple[str, ...] = ()


EVEN, OUT, REST, FRESH = "even", "left out", "leaves for good", "stands still, comes back"
CUT_OFF = "cut off, comes back"
WAYS = (
    Way(Cell(EVEN, 4)),
    Way(Cell(CUT_OFF, 4, absence=CUT), against=(EVEN, OUT, REST, FRESH)),
    Way(Cell(OUT, 3), 0.75, (EVEN,)),
    Way(Cell("two of four in turns", 4, turns=TURNS), 0.75, (OUT,)),
    Way(Cell(FRESH, 4, absence=CUT, struck="leave"), 0.875, (EVEN,)),
    Way(Cell(REST, 4, absence=(CUT[0], 9.0), struck="leave"), 0.8, (EVEN,)),
    Way(Cell("cut off, adopt: replace", 4, DROPPED, absence=CUT), against=(EVEN,)),
    Way(Cell("mixed speeds, told", 4, speeds=MIXED), against=(EVEN,)),
    Way(
        Cell("mixed speeds, untold", 4, speeds=MIXED, told=False),
        against=(EVEN, "mixed speeds, told"),
    ),
    Way(Cell("killed, disk kept", 4, absence=DISK, struck="kill-trainer"), against=(EVEN,)),
    Way(
        Cell("killed, disk lost", 4, absence=DISK, struck="kill-region"),
        against=(EVEN, "killed, disk kept"),
    ),
)


def told(records: Iterable[dict[str, Any]]) -> str:
    """A row for each pair that is compared; changes are taken seed by seed."""
    from diloco_cli.bench.quality.table import half_interval

    by: dict[str, dict[int, float]] = {}
    for each in records:
        if "loss" in each:
            by.setdefault(each["cell"], {})[each["seed"]] = each["loss"]
    lines = ["| | seeds | loss | change | against |", "| --- | --: | --: | --: | --- |"]
    for way in WAYS:
        mine = by.get(way.cell.name, {})
        if not mine:
            continue
        for against in way.against or ("",):
            other = by.get(against, {})
            gaps = [100 * (mine[seed] / other[seed] - 1) for seed in mine if seed in other]
            half = half_interval(gaps)
            change = f"{mean(gaps):+.2f}" + (f" ± {half:.2f}" if half else "") if gaps else "–"
            lines.append(
                f"| {way.cell.name} | {len(gaps) or len(mine)} | {mean(mine.values()):.4f} "
                f"| {change}{' %' if gaps else ''} | {against or '–'} |"
            )
    return "\n".join(lines)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--seeds", default=",".join(map(str, SEEDS)))
    parser.add_argument("--only", default="", help="ways whose name begins so")
    parser.add_argument("--steps", type=int, default=STEPS)
    parser.add_argument("--table", action="store_true", help="train nothing, print what is there")
    options = parser.parse_args(words)
    os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")
    from diloco_cli.worker.trainer.task import set_up

    set_up(None)
    from diloco_cli.bench.quality.experiment import Budget
    from diloco_cli.bench.quality.runner import read, run_cells

    if not options.table:
        for seed in map(int, options.seeds.split(",")):
            for way in WAYS:
                if way.cell.name.startswith(options.only):
                    # A batch of 16 for four regions: three have as many sequences each.
                    batch = 4 * max(1, way.cell.regions)
                    tokens = round(TOKENS_A_STEP * options.steps * way.share)
                    setting = {"batch": batch, "sequence": 32, "lr": 6e-3, "windows": 2048}
                    budget = Budget(tokens=tokens, **setting)
                    run_cells([way.cell], [seed], budget, options.file, print)
    print(told(read(options.file)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
