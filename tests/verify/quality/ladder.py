"""How does the gap to data parallel move with the size of the model? One long, resumable table.

    nice -n 19 python -m tests.verify.quality.ladder docs/results/raw/ladder.jsonl --until 15:00

Every rung is a model at 20 tokens per parameter, or at 5 where its name says so. First each way to
train gets its own inner rate, on a seed that is not reported: from a guess by factors of two in
both directions until the best lies between two that are worse, data parallel by the same rule as
regions; or that of an earlier sweep where a stage says so. Then the other seeds. What is in the
file is not run again; `--weights` keeps what was trained, for `downstream.py`.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import mean
from typing import Any

TUNED_ON = 101
FACTOR = 2.0
MOST_RATES = 6
PLAIN_DOWN = "int8"
"""Codec of the way down of all arms that name none; the spec's default is the one they do name."""


@dataclass(frozen=True)
class Rung:
    """One size, and how many sequences of how many bytes make a step of all regions together."""

    name: str
    layers: int
    width: int
    heads: int
    batch: int
    sequence: int
    tokens_a_parameter: float = 20.0
    windows: int = 2048


@dataclass(frozen=True)
class Arm:
    """One way to train."""

    regions: int
    optimizer: str = "adamw"
    down: str = ""
    """Codec of the way down, if not the plain one; trained at the rate of the arm without it."""
    beta: float | None = None
    """Share of the inner momentum that is kept, if not the optimiser's default."""

    @property
    def name(self) -> str:
        how = f"regions {self.regions}" if self.regions else "data parallel"
        momentum = "" if self.beta is None else f"momentum {self.beta:g}"
        words = [how, self.optimizer, momentum, self.down and f"{self.down} down"]
        return ", ".join(filter(None, words))

    @property
    def inner(self) -> dict[str, Any]:
        """The inner optimiser but for its rate."""
        if self.beta is None:
            return {"kind": self.optimizer}
        keys = ("beta", "beta1") if self.optimizer == "muon" else ("beta1",)
        return {"kind": self.optimizer, **dict.fromkeys(keys, self.beta)}


SMALL = Rung("25k", 1, 32, 1, 8, 32)
MIDDLE = Rung("123k", 2, 64, 2, 16, 64)
LARGE = Rung("282k", 3, 80, 2, 32, 64)
MILLION = Rung("1M", 5, 128, 4, 32, 128)
"""A cell takes 25 to 35 minutes of an idle core, with Muon inside 70."""
SHORT = tuple(
    replace(rung, name=f"{rung.name} at 5", tokens_a_parameter=5.0)
    for rung in (SMALL, MIDDLE, LARGE, MILLION)
)
"""Every size with as few tokens, too: there more seeds of a million can be afforded."""


@dataclass(frozen=True)
class Stage:
    """Arms of a rung, and on which seeds they are reported."""

    rung: Rung
    arms: Sequence[Arm]
    seeds: Sequence[int]
    rates: Mapping[int, float] = field(default_factory=dict)
    """By regions: rates of an earlier sweep, which are not tuned here."""


DP = Arm(0)
SWEPT = {0: 6e-3, 2: 3e-3, 4: 3e-3, 8: 3e-3}
"""Of 123 thousand parameters, on seed 31: the best of three for data parallel, of two for four
regions; two and eight have the rate of four."""
SMALL_SWEPT = {2: 6e-3, 4: 6e-3}
"""Of 25 thousand, by the search of the first stage."""
LESS = 0.5
"""Of the inner momentum 0, 0.5, 0.8 and 0.9 the best at 123 thousand parameters on the seed that
is not reported, for data parallel as for eight regions (levers.py)."""


def scaled(rates: Mapping[int, float], rung: Rung) -> dict[int, float]:
    """Rates of the middle rung in inverse proportion to the width, for all alike."""
    return {regions: rate * MIDDLE.width / rung.width for regions, rate in rates.items()}


STAGES = (
    Stage(SMALL, [DP, Arm(8), Arm(4), Arm(2), Arm(1)], (61, 62, 63, 64, 65)),
    Stage(SMALL, [Arm(4, down="int4"), Arm(8, down="int4")], (61, 62, 63, 64, 65)),
    Stage(MIDDLE, [DP, Arm(8), Arm(4)], (61, 62, 63), rates=SWEPT),
    Stage(MIDDLE, [Arm(2)], (61, 62, 63), rates=SWEPT),
    Stage(MIDDLE, [Arm(8, "muon")], (61, 62, 63)),
    Stage(LARGE, [DP, Arm(8), Arm(4), Arm(2)], (61, 62, 63), rates=scaled(SWEPT, LARGE)),
    *(
        Stage(rung, [DP, Arm(8), Arm(4), Arm(2)], (61, 62, 63), rates=scaled(SWEPT, rung))
        for rung in SHORT[:-1]
    ),
    Stage(SHORT[-1], [DP, Arm(8), Arm(4), Arm(2)], (61,), rates=scaled(SWEPT, MILLION)),
    Stage(MIDDLE, [Arm(0, "muon")], (61, 62, 63)),
    Stage(MIDDLE, [Arm(8, down="int4")], (61, 62, 63), rates=SWEPT),
    Stage(MILLION, [DP, Arm(8), Arm(4), Arm(2)], (61, 62, 63), rates=scaled(SWEPT, MILLION)),
    Stage(MILLION, [Arm(8, "muon")], (61, 62, 63), rates=scaled(SWEPT, MILLION)),
    Stage(
        MILLION,
        [Arm(4, beta=LESS), Arm(2, beta=LESS), Arm(8, beta=LESS), Arm(0, beta=LESS)],
        (61,),
        rates=scaled(SWEPT, MILLION),
    ),
    Stage(LARGE, [Arm(8, "muon")], (61, 62, 63), rates=scaled(SWEPT, LARGE)),
    Stage(LARGE, [DP, Arm(8)], ()),  # Are the rates by width the best ones? A search, no more.
    Stage(MIDDLE, [Arm(1)], (61, 62, 63), rates={1: SWEPT[0]}),
    Stage(MIDDLE, [DP, Arm(8), Arm(4), Arm(2)], (64, 65), rates=SWEPT),
    Stage(LARGE, [Arm(1)], (61, 62, 63), rates=scaled({1: SWEPT[0]}, LARGE)),
    Stage(MIDDLE, [Arm(0, beta=LESS), Arm(8, beta=LESS)], (61, 62, 63)),
    Stage(MIDDLE, [Arm(4, beta=LESS), Arm(2, beta=LESS)], (61, 62, 63), rates=SWEPT),
    Stage(SMALL, [Arm(0, beta=LESS), Arm(8, beta=LESS)], (61, 62, 63, 64, 65)),
    Stage(SMALL, [Arm(4, beta=LESS), Arm(2, beta=LESS)], (61, 62, 63, 64, 65), rates=SMALL_SWEPT),
    Stage(
        LARGE,
        [Arm(0, beta=LESS), Arm(8, beta=LESS), Arm(4, beta=LESS), Arm(2, beta=LESS)],
        (61, 62, 63),
        rates=scaled(SWEPT, LARGE),
    ),
)
GUESSES = {"25k": 1.2e-2, "123k": 6e-3, "282k": SWEPT[0] * MIDDLE.width / LARGE.width}


class Table:
    """The file, and what is missing in it."""

    def __init__(self, file: Path, weights: Path | None, until: float) -> None:
        from diloco_cli.bench.quality.runner import read

        self.file, self.weights, self.until = file, weights, until
        self.known = {record["id"]: record for record in read(file)}

    def result(self, rung: Rung, arm: Arm, seed: int, rate: float) -> dict[str, Any]:
        """Of one cell; trains it if it is not in the file."""
        import numpy as np

        from diloco_cli.bench.quality.cells import Cell
        from diloco_cli.bench.quality.experiment import Budget, run_cell
        from diloco_cli.bench.quality.runner import append
        from diloco_cli.bench.quality.training import Trained

        name = f"{rung.name}, {arm.name}, seed {seed}, rate {rate:.3g}"
        if name in self.known:
            return self.known[name]
        if time.time() > self.until:
            raise TimeoutError
        shape = {"layers": rung.layers, "width": rung.width, "heads": rung.heads}
        budget = Budget(batch=rung.batch, sequence=rung.sequence, windows=rung.windows, **shape)
        settings: list[tuple[str, Any]] = [("inner.optimizer", {**arm.inner, "lr": rate})]
        settings.append(("wire.down", {"kind": arm.down or PLAIN_DOWN}))
        cell = Cell(arm.name, arm.regions, tuple(settings))

        def keep(trained: Trained) -> None:
            if self.weights is not None and seed != TUNED_ON:
                self.weights.mkdir(parents=True, exist_ok=True)
                arrays: dict[str, Any] = dict(trained.weights)
                np.savez(self.weights / f"{name}.npz", **arrays)

        budget = budget.per_parameter(rung.tokens_a_parameter)
        record = run_cell(cell, budget, seed, keep)
        record |= {"id": name, "rung": rung.name, "rate": rate}
        record |= {"load": round(os.getloadavg()[0], 1)}
        self.known[name] = record
        append(self.file, record)
        print(name, record.get("loss") or record["failed"], record.get("wall"), flush=True)
        return record

    def tuned(self, rung: Rung, arm: Arm, guess: float) -> float:
        """The best rate on the seed that is not reported."""
        losses: dict[float, float] = {}

        def loss(rate: float) -> float:
            if rate not in losses:
                record = self.result(rung, arm, TUNED_ON, rate)
                losses[rate] = record.get("loss", float("inf"))
            return losses[rate]

        best = guess
        for rate in (guess, guess / FACTOR, guess * FACTOR):
            if loss(rate) < loss(best):
                best = rate
        while len(losses) < MOST_RATES:
            beside = [best / FACTOR, best * FACTOR]
            if all(rate in losses for rate in beside):
                break
            for rate in beside:
                if loss(rate) < loss(best):
                    best = rate
        return best

    def rate(self, stage: Stage, arm: Arm) -> float:
        plain = Arm(arm.regions, arm.optimizer, beta=arm.beta)
        if arm.regions in stage.rates:
            return stage.rates[arm.regions]
        return self.tuned(stage.rung, plain, guess_of(stage.rung, plain))


def guess_of(rung: Rung, arm: Arm) -> float:
    """Where the search begins: regions want less at equal total batch."""
    return GUESSES[rung.name] / (2 if arm.regions >= 4 else 1)


def cells(table: Table, stages: Sequence[Stage]) -> Iterator[dict[str, Any]]:
    """All results, stage by stage; within one all arms of a seed before the next seed."""
    for stage in stages:
        rates = {arm: table.rate(stage, arm) for arm in stage.arms}
        for seed in stage.seeds:
            for arm in stage.arms:
                yield table.result(stage.rung, arm, seed, rates[arm])


def chosen(rungs: str, ways: str, seeds: Collection[int] = ()) -> list[Stage]:
    """The stages, or the parts of them, whose names match both patterns; of all seeds or these."""
    return [
        replace(
            stage, arms=arms, seeds=[seed for seed in stage.seeds if not seeds or seed in seeds]
        )
        for stage in STAGES
        if re.search(rungs, stage.rung.name)
        and (arms := [arm for arm in stage.arms if re.search(ways, arm.name)])
    ]


COUNTED = {"1": "one region", "2": "two regions", "4": "four regions", "8": "eight regions"}


def in_words(cell: str) -> str:
    """A way to train as a table has it."""
    plain = re.sub(r"^regions (\d)", lambda found: COUNTED[found[1]], cell)
    return plain.replace(", adamw", "")


def place(key: tuple[str, str]) -> tuple[bool, int, bool, int, str]:
    """Where a row stands: by size, plain ways first, then by the number of regions."""
    rung, cell = key
    sizes = [each.name for each in (SMALL, MIDDLE, LARGE, MILLION)]
    regions = re.match(r"regions (\d)", cell)
    plain = cell.endswith("adamw")
    size = sizes.index(rung.removesuffix(" at 5"))
    return rung not in sizes, size, not plain, int(regions[1]) if regions else 0, cell


def told(records: Iterable[dict[str, Any]]) -> str:
    """A row for each rung and arm; what a codec costs is told against the same arm without it."""
    from diloco_cli.bench.quality.table import half_interval

    by: dict[tuple[str, str], dict[int, dict[str, Any]]] = {}
    for each in records:
        if each["seed"] != TUNED_ON and "loss" in each:
            by.setdefault((each["rung"], each["cell"]), {})[each["seed"]] = each
    lines = [
        "| parameters | | rate | seeds | rounds | loss | change | both averaged | against |",
        "| --- | --- | --: | --- | --: | --: | --: | --: | --- |",
    ]
    for rung, cell in sorted(by, key=place):
        mine = by[rung, cell]
        against = re.sub(", int4 down", "", cell) if "down" in cell else DP.name
        other = by.get((rung, against), {}) if cell != against else {}

        def change(key: str, mine: Any = mine, other: Any = other) -> str:
            gaps = [
                100 * (mine[seed][key] / other[seed][key] - 1) for seed in mine if seed in other
            ]
            half = half_interval(gaps)
            words = f"{mean(gaps):+.2f}" + (f" ± {half:.2f} %" if half else " %") if gaps else "–"
            return words.replace("-", "−")

        first = next(iter(mine.values()))
        run = len(mine) > 1 and max(mine) - min(mine) == len(mine) - 1
        seeds = f"{min(mine)} to {max(mine)}" if run else ", ".join(map(str, sorted(mine)))
        loss = mean(each["loss"] for each in mine.values())
        beside = in_words(against) + (", int8 down" if "down" in cell else "")
        lines.append(
            f"| {rung.replace(' at 5', ', 5 tokens')} | {in_words(cell)} | {first['rate']:.3g} "
            f"| {seeds} | {first['versions'] or '–'} | {loss:.4f} | {change('loss')} "
            f"| {change('ema')} | {beside if other else '–'} |"
        )
    return "\n".join(lines)


def clock(words: str) -> float:
    """The next time that a clock shows this, in seconds since the epoch."""
    hour, minute = map(int, words.split(":"))
    now = time.localtime()
    then = time.mktime((*now[:3], hour, minute, 0, 0, 0, -1))
    return then if then > time.time() else then + 86400


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--until", type=clock, default=float("inf"), help="HH:MM; begin no cell")
    parser.add_argument("--weights", type=Path, help="a folder for the weights of what is reported")
    parser.add_argument("--only", default="", help="rungs whose name matches this pattern")
    parser.add_argument("--ways", default="", help="ways to train whose name matches this pattern")
    parser.add_argument("--seeds", type=int, nargs="+", default=(), help="of those reported, these")
    parser.add_argument("--table", action="store_true", help="train nothing, print what is there")
    options = parser.parse_args(words)
    # One thread: cells are small, and whoever else works here has the rest.
    os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")
    from diloco_cli.worker.trainer.task import set_up

    set_up(None)
    table = Table(options.file, options.weights, options.until)
    if options.table:
        print(told(table.known.values()))
        return 0
    try:
        for _ in cells(table, chosen(options.only, options.ways, options.seeds)):
            pass
    except TimeoutError:
        print("Time is up; what is missing is made the next time.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
