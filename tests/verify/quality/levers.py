"""What closes the gap of eight regions to data parallel? One setting at a time, on one seed.

    nice -n 19 python -m tests.verify.quality.levers docs/results/raw/quality-levers.jsonl

123 thousand parameters at 20 tokens per parameter, on a seed that is not reported elsewhere: what
data parallel may do to get better is tried for it, too. What is in the file is not run again.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diloco_cli.bench.quality.cells import Cell, Settings
from tests.verify.quality.ladder import MIDDLE, TUNED_ON


@dataclass(frozen=True)
class Lever:
    """One way to train, and what makes it different from the first of its kind."""

    regions: int
    what: str = ""
    rate: float = 0.0
    """Inner, if not the plain one's."""
    batch: float = 1.0
    """Times the sequences of a step of all regions together."""
    beta2: float = 0.0
    beta1: float | None = None
    settings: Settings = ()

    @property
    def name(self) -> str:
        words = [f"regions {self.regions}" if self.regions else "data parallel", self.what]
        return ", ".join([*filter(None, words), f"rate {self.rate or RATES[self.regions]:g}"])


RATES = {0: 6e-3, 8: 3e-3}
OUTER = "outer"


def outer(lr: float, momentum: float, warmup: int = 100) -> Settings:
    step = {"kind": "nesterov", "lr": lr, "momentum": momentum, "warmup": warmup, "ema": 0.05}
    return ((OUTER, step),)


def mean(lr: float, momentum: float) -> Settings:
    return (("merge.kind", "mean"), *outer(lr, momentum))


def every(steps: int, lr: float, momentum: float) -> Settings:
    """Rounds that follow each other faster, and an outer step that fits them."""
    return (("sync.every", steps), *outer(lr, momentum, 0))


LEVERS = (
    Lever(0),
    Lever(0, rate=1.2e-2),
    Lever(0, "half the batch", batch=0.5),
    Lever(0, "half the batch", 4e-3, 0.5),
    Lever(0, "beta2 0.95", beta2=0.95),
    Lever(0, "beta2 0.98", beta2=0.98),
    Lever(0, "beta2 0.996", beta2=0.996),
    Lever(0, "beta2 0.9987", beta2=0.9987),
    *(Lever(0, f"beta1 {beta:g}", beta1=beta) for beta in (0.8, 0.5, 0.0)),
    Lever(8),
    Lever(8, "beta2 0.9987", beta2=0.9987),
    Lever(8, "beta2 0.996", beta2=0.996),
    Lever(8, "beta2 0.9987", 6e-3, beta2=0.9987),
    Lever(8, "every 12", settings=(("sync.every", 12),)),
    Lever(8, "every 48", settings=(("sync.every", 48),)),
    Lever(8, "half the batch", 2e-3, 0.5),
    Lever(8, "twice the batch", batch=2),
    Lever(8, "twice the batch, every 12", 4e-3, 2, settings=(("sync.every", 12),)),
    Lever(8, "outer 0.6 and 0.9", settings=outer(0.6, 0.9)),
    *(Lever(8, f"beta1 {beta:g}", beta1=beta) for beta in (0.8, 0.5, 0.0)),
    Lever(8, "beta1 0.5, mean, outer 0.7 and 0.9", beta1=0.5, settings=mean(0.7, 0.9)),
    Lever(8, "every 6, outer 0.7 and 0.6", settings=every(6, 0.7, 0.6)),
    Lever(8, "beta1 0.5, every 6, outer 0.7 and 0.6", beta1=0.5, settings=every(6, 0.7, 0.6)),
    Lever(8, "beta1 0.5, every 12, outer 0.4 and 0.8", beta1=0.5, settings=every(12, 0.4, 0.8)),
    Lever(8, "mean, outer 0.7 and 0.9", settings=mean(0.7, 0.9)),
    Lever(8, "outer 0.3 and 0.9", settings=outer(0.3, 0.9)),
    Lever(8, "outer 0.5 and 0.8", settings=outer(0.5, 0.8)),
)


def run(lever: Lever, file: Path, known: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """The record of one; trains it if it is not in the file."""
    from diloco_cli.bench.quality.experiment import Budget, run_cell
    from diloco_cli.bench.quality.runner import append

    if lever.name in known:
        return known[lever.name]
    optimizer: dict[str, Any] = {"kind": "adamw", "lr": lever.rate or RATES[lever.regions]}
    if lever.beta2:
        optimizer["beta2"] = lever.beta2
    if lever.beta1 is not None:
        optimizer["beta1"] = lever.beta1
    settings: list[tuple[str, Any]] = [("inner.optimizer", optimizer), *lever.settings]
    shape = {"layers": MIDDLE.layers, "width": MIDDLE.width, "heads": MIDDLE.heads}
    batch = round(MIDDLE.batch * lever.batch)
    budget = Budget(batch=batch, sequence=MIDDLE.sequence, windows=MIDDLE.windows, **shape)
    budget = budget.per_parameter(MIDDLE.tokens_a_parameter)
    record = run_cell(Cell(lever.name, lever.regions, tuple(settings)), budget, TUNED_ON)
    record |= {"id": lever.name, "load": round(os.getloadavg()[0], 1)}
    append(file, record)
    known[lever.name] = record
    print(lever.name, record.get("loss") or record["failed"], record.get("wall"), flush=True)
    return record


def told(records: Iterable[dict[str, Any]]) -> str:
    """A row for each; changes are against the first of its kind."""
    known = {each["id"]: each for each in records}
    lines = [
        "| | loss | change | averaged | rounds | bits up / down |",
        "| --- | --: | --: | --: | --: | --: |",
    ]
    for lever in LEVERS:
        record, plain = known.get(lever.name), known.get(Lever(lever.regions).name)
        if record is None or plain is None or "loss" not in record:
            continue
        change = 100 * (record["loss"] / plain["loss"] - 1)
        words = "–" if record is plain else f"{change:+.2f} %"
        bits = f"{record['bits_up']:.1f} / {record['bits_down']:.1f}" if lever.regions else "–"
        lines.append(
            f"| {lever.name} | {record['loss']:.4f} | {words} | {record['ema']:.4f} "
            f"| {record['versions'] or '–'} | {bits} |"
        )
    return "\n".join(lines)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--only", default="", help="levers whose name matches this pattern")
    parser.add_argument("--table", action="store_true", help="train nothing, print what is there")
    options = parser.parse_args(words)
    os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")
    from diloco_cli.bench.quality.runner import read
    from diloco_cli.worker.trainer.task import set_up

    set_up(None)
    known = {record["id"]: record for record in read(options.file)}
    if not options.table:
        for lever in LEVERS:
            if re.search(options.only, lever.name):
                run(lever, options.file, known)
    print(told(known.values()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
