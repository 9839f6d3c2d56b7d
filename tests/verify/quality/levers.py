"""What closes the gap of eight regions to data parallel? One setting at a time.

    nice -n 19 python -m tests.verify.quality.levers docs/results/raw/quality-levers.jsonl
    python -m tests.verify.quality.levers docs/results/raw/quality-levers.jsonl --rung 25k --table

20 tokens per parameter, on seeds that are not reported elsewhere: what data parallel may do to get
better is tried for it, too. What is in the file is not run again.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

from diloco_cli.bench.quality.cells import Cell, Settings
from tests.verify.quality.ladder import MIDDLE, SMALL, TUNED_ON, Rung


@dataclass(frozen=True)
class Lever:
    """One way to train, and what makes it different from the first of its kind."""

    regions: int
    what: str = ""
    rate: float = 0.0
    """Inner, if not the plain one's."""
    batch: float = 1.0
    """Times the sequences of a step of all regions together."""
    inner: Mapping[str, Any] | None = None
    """Of the inner optimiser."""
    settings: Settings = ()

    def name(self, rates: Mapping[int, float]) -> str:
        words = [f"regions {self.regions}" if self.regions else "data parallel", self.what]
        return ", ".join([*filter(None, words), f"rate {self.rate or rates[self.regions]:g}"])


def outer(lr: float, momentum: float, warmup: int = 100) -> Settings:
    step = {"kind": "nesterov", "lr": lr, "momentum": momentum, "warmup": warmup, "ema": 0.05}
    return (("outer", step),)


def averaged(lr: float, momentum: float) -> Settings:
    """Plain means of the regions' work, which are shorter than any of them."""
    return (("merge.kind", "mean"), *outer(lr, momentum))


def every(steps: int, lr: float, momentum: float) -> Settings:
    """Rounds that follow each other faster, and an outer step that fits them."""
    return (("sync.every", steps), *outer(lr, momentum, 0))


def beta1(share: float, regions: int = 8) -> Lever:
    return Lever(regions, f"beta1 {share:g}", inner={"beta1": share})


def beta2(share: float, regions: int = 8, rate: float = 0.0) -> Lever:
    return Lever(regions, f"beta2 {share:g}", rate, inner={"beta2": share})


LESS = {"beta1": 0.5}
LEVERS = (
    Lever(0),
    Lever(0, rate=1.2e-2),
    Lever(0, "half the batch", batch=0.5),
    Lever(0, "half the batch", 4e-3, 0.5),
    *(beta2(share, 0) for share in (0.95, 0.98, 0.996, 0.9987)),
    *(beta1(share, 0) for share in (0.8, 0.5, 0.0)),
    Lever(8),
    beta2(0.9987),
    beta2(0.996),
    beta2(0.9987, rate=6e-3),
    Lever(8, "every 12", settings=(("sync.every", 12),)),
    Lever(8, "every 48", settings=(("sync.every", 48),)),
    Lever(8, "half the batch", 2e-3, 0.5),
    Lever(8, "twice the batch", batch=2),
    Lever(8, "twice the batch, every 12", 4e-3, 2, settings=(("sync.every", 12),)),
    Lever(8, "outer 0.6 and 0.9", settings=outer(0.6, 0.9)),
    *(beta1(share) for share in (0.8, 0.5, 0.0)),
    Lever(8, "mean, outer 0.7 and 0.9", settings=averaged(0.7, 0.9)),
    Lever(8, "beta1 0.5, mean, outer 0.7 and 0.9", inner=LESS, settings=averaged(0.7, 0.9)),
    Lever(8, "beta1 0.5, every 12, outer 0.7 and 0.6", inner=LESS, settings=every(12, 0.7, 0.6)),
    Lever(8, "muon, beta 0.7", inner={"kind": "muon", "beta": 0.7, "beta1": 0.65}),
    Lever(8, "muon, beta 0.98", inner={"kind": "muon", "beta": 0.98}),
    Lever(8, "muon, beta1 0.5", inner={"kind": "muon", "beta": 0.95, "beta1": 0.5}),
    Lever(
        8,
        "muon, every 12, outer 0.7 and 0.6",
        inner={"kind": "muon", "beta1": 0.5},
        settings=every(12, 0.7, 0.6),
    ),
    Lever(8, "outer 0.3 and 0.9", settings=outer(0.3, 0.9)),
    Lever(8, "outer 0.5 and 0.8", settings=outer(0.5, 0.8)),
)
SCREENED = (
    Lever(0),
    *(beta1(share, 0) for share in (0.95, 0.8, 0.65, 0.5, 0.0)),
    Lever(0, "beta1 0.5, clip 3", inner=LESS, settings=(("inner.clip", 3.0),)),
    Lever(8),
    *(beta1(share) for share in (0.95, 0.8, 0.65, 0.5, 0.0)),
    Lever(8, "clip 0.3", settings=(("inner.clip", 0.3),)),
    Lever(8, "clip 3", settings=(("inner.clip", 3.0),)),
    Lever(8, "outer 0.3 and 0.9", settings=outer(0.3, 0.9)),
    Lever(8, "outer 0.5 and 0.8", settings=outer(0.5, 0.8)),
    Lever(8, "outer 0.5 and 0.9", settings=outer(0.5, 0.9)),
    Lever(8, "outer 0.7 and 0.6 from the first round", settings=outer(0.7, 0.6, 0)),
    Lever(8, "outer 0.4 and 0.9 from the first round", settings=outer(0.4, 0.9, 0)),
    Lever(8, "mean, outer 0.4 and 0.9", settings=averaged(0.4, 0.9)),
    Lever(8, "mean, outer 0.7 and 0.9", settings=averaged(0.7, 0.9)),
    Lever(8, "mean, outer 1 and 0.9", settings=averaged(1.0, 0.9)),
    Lever(8, "beta1 0.5, mean, outer 0.7 and 0.9", inner=LESS, settings=averaged(0.7, 0.9)),
    Lever(8, "every 12, outer 0.7 and 0.6", settings=every(12, 0.7, 0.6)),
    Lever(8, "every 12, outer 0.4 and 0.8", settings=every(12, 0.4, 0.8)),
    Lever(8, "every 6, outer 0.7 and 0.6", settings=every(6, 0.7, 0.6)),
    Lever(8, "beta1 0.5, every 12, outer 0.7 and 0.6", inner=LESS, settings=every(12, 0.7, 0.6)),
    Lever(8, "beta1 0.5, every 12, outer 0.4 and 0.8", inner=LESS, settings=every(12, 0.4, 0.8)),
    Lever(8, "beta1 0.5, every 6, outer 0.7 and 0.6", inner=LESS, settings=every(6, 0.7, 0.6)),
)


@dataclass(frozen=True)
class Sweep:
    """Levers of one size of model."""

    rung: Rung
    seeds: Sequence[int]
    rates: Mapping[int, float]
    """Inner, of the plain ones, by regions."""
    levers: Sequence[Lever]

    def id(self, lever: Lever, seed: int) -> str:
        name = lever.name(self.rates)
        return name if self.rung == MIDDLE else f"{self.rung.name}, {name}, seed {seed}"

    def cells(self) -> Iterator[tuple[Lever, int]]:
        return ((lever, seed) for lever in self.levers for seed in self.seeds)


SWEEPS = {
    MIDDLE.name: Sweep(MIDDLE, (TUNED_ON,), {0: 6e-3, 8: 3e-3}, LEVERS),
    SMALL.name: Sweep(SMALL, (TUNED_ON, 102), {0: 1.2e-2, 8: 6e-3}, SCREENED),
}


def run(sweep: Sweep, lever: Lever, seed: int) -> dict[str, Any]:
    """Trains one and gives its record."""
    from diloco_cli.bench.quality.experiment import Budget, run_cell

    rate = lever.rate or sweep.rates[lever.regions]
    optimizer = {"kind": "adamw", "lr": rate, **(lever.inner or {})}
    settings: list[tuple[str, Any]] = [("inner.optimizer", optimizer), *lever.settings]
    rung = sweep.rung
    shape = {"layers": rung.layers, "width": rung.width, "heads": rung.heads}
    batch = round(rung.batch * lever.batch)
    budget = Budget(batch=batch, sequence=rung.sequence, windows=rung.windows, **shape)
    budget = budget.per_parameter(rung.tokens_a_parameter)
    name = lever.name(sweep.rates)
    record = run_cell(Cell(name, lever.regions, tuple(settings)), budget, seed)
    return record | {"id": sweep.id(lever, seed), "load": round(os.getloadavg()[0], 1)}


def told(sweep: Sweep, records: Iterable[dict[str, Any]]) -> str:
    """A row for each; changes are against the first of its kind."""
    known = {each["id"]: each for each in records if "loss" in each}
    lines = [
        "| | loss | change | averaged | rounds | bits up / down |",
        "| --- | --: | --: | --: | --: | --: |",
    ]
    for lever in sweep.levers:
        pairs = [
            (known.get(sweep.id(lever, seed)), known.get(sweep.id(Lever(lever.regions), seed)))
            for seed in sweep.seeds
        ]
        both = [(mine, plain) for mine, plain in pairs if mine and plain]
        if not both:
            continue
        mine = [record for record, _ in both]
        change = mean(100 * (record["loss"] / plain["loss"] - 1) for record, plain in both)
        words = "–" if lever == Lever(lever.regions) else f"{change:+.2f} %"
        up, down = (mean(record[key] for record in mine) for key in ("bits_up", "bits_down"))
        lines.append(
            f"| {lever.name(sweep.rates)} | {mean(record['loss'] for record in mine):.4f} "
            f"| {words} | {mean(record['ema'] for record in mine):.4f} "
            f"| {mine[0]['versions'] or '–'} "
            f"| {f'{up:.1f} / {down:.1f}' if lever.regions else '–'} |"
        )
    return "\n".join(lines)


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--rung", choices=SWEEPS, default=MIDDLE.name)
    parser.add_argument("--only", default="", help="levers whose name matches this pattern")
    parser.add_argument("--table", action="store_true", help="train nothing, print what is there")
    options = parser.parse_args(words)
    os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")
    from diloco_cli.bench.quality.runner import append, read
    from diloco_cli.worker.trainer.task import set_up

    set_up(None)
    sweep = SWEEPS[options.rung]
    known = {record["id"]: record for record in read(options.file)}
    for lever, seed in () if options.table else sweep.cells():
        name = sweep.id(lever, seed)
        if name in known or not re.search(options.only, name):
            continue
        known[name] = run(sweep, lever, seed)
        append(options.file, known[name])
        print(name, known[name].get("loss") or known[name]["failed"], flush=True)
    print(told(sweep, known.values()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
