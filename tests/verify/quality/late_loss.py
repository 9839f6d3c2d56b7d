"""How long until a late loss, on narrow lines and under kills? On a virtual clock, resumable.

    nice -n 5 python -m tests.verify.quality.late_loss docs/results/raw/late-loss.jsonl
    nice -n 5 python -m tests.verify.quality.late_loss docs/results/raw/late-loss.jsonl --rung 123k
    python -m tests.verify.quality.late_loss docs/results/raw/late-loss.jsonl \
        --lines docs/results/links-late.png --kills docs/results/goodput-late.png

Steps, frames, rounds and merges are those of `diloco bench quality`; a frame takes as long as its
bytes take on the line. The late loss is that of data parallel at 90 % of its budget of 20 tokens a
parameter, seed by seed. Data parallel is trained once for each seed; what a line or a kill does to
it is arithmetic on the time of its steps (`Parallel`), and always the most that can be said for it.
Rates are chosen on a seed that is not reported.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean
from typing import Any

from diloco_cli.bench.quality.cells import Cell
from tests.verify.quality.ladder import LARGE, MIDDLE, SMALL, SWEPT, Rung, scaled
from tests.verify.results.goodput import finish
from tests.verify.results.records import reached

TUNED_ON = 101
SEEDS = (61, 62, 63)
LATE = 0.9
EVERY = 48.0
"""Steps from one measurement of a curve to the next."""
SLOWER = (34.0, 85.0)
KILLS = 324.0
KILLED = 8
"""Regions, where trainers are killed."""
RUNGS = {rung.name: rung for rung in (SMALL, MIDDLE, LARGE)}
RATES = {
    SMALL.name: {0: 1.2e-2, 4: 6e-3, 8: 6e-3},
    MIDDLE.name: SWEPT,
    LARGE.name: scaled(SWEPT, LARGE),
}
"""Of AdamW, by rung and regions, from the sweeps of ladder.jsonl: the same effort for all."""
SWEEP = (6e-3, 1.2e-2, 2.4e-2)
"""Of Muon; one more on either side if the best lies at an edge."""
TOKENS = {34.0: 2.0, 85.0: 3.0}
"""By line, times data parallel's: what a decoupled run is given. Twice reached the loss on the seed
that is not reported, on either line; on the narrower it fell short on one of the others."""
TOKENS_UNDER_KILLS = {SMALL.name: 3.0, MIDDLE.name: 2.0, LARGE.name: 2.0}
"""By rung. One and a half times fell short at 123 thousand parameters, on the reported seeds."""
AGAIN = (0.0, 10.0, 30.0)
"""Seconds in which an elastic job forms again after a death, and everybody stands still."""


@dataclass(frozen=True)
class Way:
    """One way to train."""

    regions: int
    optimizer: str = "adamw"
    slower: float = 0.0
    kills: float = 0.0

    @property
    def name(self) -> str:
        words = [f"regions {self.regions}" if self.regions else "data parallel", self.optimizer]
        words += [f"{self.slower:g} times slower"] if self.slower else []
        words += [f"{self.kills:g} kills an hour"] if self.kills else []
        return ", ".join(words)


class Table:
    """The file, and what is missing in it."""

    def __init__(self, file: Path, rung: Rung = SMALL) -> None:
        from diloco_cli.bench.quality.experiment import Budget
        from diloco_cli.bench.quality.runner import read

        self.file, self.rung = file, rung
        shape = {"layers": rung.layers, "width": rung.width, "heads": rung.heads}
        budget = Budget(batch=rung.batch, sequence=rung.sequence, windows=rung.windows, **shape)
        self.budget = budget.per_parameter(rung.tokens_a_parameter)
        self.known: dict[str, dict[str, Any]] = {each["id"]: each for each in read(file)}

    def result(self, way: Way, seed: int, rate: float, tokens: float = 1.0) -> dict[str, Any]:
        """Of one cell; trains it if it is not in the file."""
        from diloco_cli.bench.quality.experiment import run_cell
        from diloco_cli.bench.quality.runner import append

        name = f"{way.name}, seed {seed}, rate {rate:.3g}, tokens {tokens:g}"
        if self.rung != SMALL:
            name = f"{self.rung.name}, {name}"
        if name in self.known:
            return self.known[name]
        settings = (("inner.optimizer", {"kind": way.optimizer, "lr": rate}),)
        cell = Cell(way.name, way.regions, settings, slower=way.slower, kills=way.kills)
        budget = replace(self.budget, tokens=round(tokens * self.budget.tokens))
        record = run_cell(cell, budget, seed, every=EVERY)
        record |= {"id": name, "rate": rate, "times": tokens, "load": round(os.getloadavg()[0], 1)}
        self.known[name] = record
        append(self.file, record)
        print(name, record.get("loss") or record["failed"], record.get("wall"), flush=True)
        return record

    def rate(self, way: Way) -> float:
        """The best rate on the seed that is not reported, at data parallel's tokens."""
        plain = Way(way.regions, way.optimizer)
        rates = RATES[self.rung.name] if way.optimizer == "adamw" else {}
        if way.regions in rates:
            return rates[way.regions]
        losses: dict[float, float] = {}
        for rate in SWEEP:
            losses[rate] = self.result(plain, TUNED_ON, rate).get("loss", float("inf"))
        best = min(losses, key=losses.__getitem__)
        for edge, more in ((min(SWEEP), min(SWEEP) / 2), (max(SWEEP), max(SWEEP) * 2)):
            if best == edge:
                losses[more] = self.result(plain, TUNED_ON, more).get("loss", float("inf"))
        return min(losses, key=losses.__getitem__)

    def late(self, optimizer: str, seed: int) -> float:
        """The loss that counts: data parallel's with this optimiser, at 90 % of its budget."""
        way = Way(0, optimizer)
        curve = steps_of(self.result(way, seed, self.rate(way)))
        return at(curve, LATE * self.budget.steps)

    def decoupled(self, way: Way, seed: int) -> dict[str, Any]:
        tokens = TOKENS_UNDER_KILLS[self.rung.name] if way.kills else TOKENS[way.slower]
        return self.result(way, seed, self.rate(way), tokens)


Curve = list[tuple[float, float]]


def steps_of(record: dict[str, Any]) -> Curve:
    """Virtual time in steps, and loss."""
    return [(seconds, loss) for seconds, _, loss in record["curve"]]


def at(curve: Curve, when: float) -> float:
    """The loss at a moment, between two measurements in a straight line."""
    for (before, high), (after, low) in itertools.pairwise(curve):
        if before <= when <= after:
            return high + (low - high) * (when - before) / (after - before)
    return curve[-1][1]


@dataclass(frozen=True)
class Parallel:
    """A data parallel job under kills: how many of its steps are kept at a moment.

    In its favour: the curve over its steps is that of an undisturbed run; a death while it stands
    still costs nothing more; whoever died is back when the group has formed again.
    """

    kind: str
    """`rigid` or `elastic`."""
    again: float
    """Seconds that everybody stands still after a death."""
    step: float
    back: float
    checkpoint: float = 0.4
    """Seconds between two checkpoints of a rigid job: Young's rule, with the live job's cost."""

    def times(
        self, kills: Sequence[tuple[float, str]], until: float
    ) -> Iterator[tuple[float, float]]:
        """Moments and steps kept, in whole batches; between two of them in a straight line."""
        now = kept = 0.0
        gone: dict[str, float] = {}
        yield now, kept
        for when, region in [*(each for each in kills if each[0] < until), (until, "")]:
            if when < now:
                continue
            while gone and (first := min(gone.values())) < when:
                kept += (first - now) * (KILLED - len(gone)) / KILLED / self.step
                now = first
                gone = {name: back for name, back in gone.items() if back > first}
                yield now, kept
            kept += (when - now) * (KILLED - len(gone)) / KILLED / self.step
            now = when
            yield now, kept
            if not region or now >= until:
                continue
            if self.kind == "rigid":
                kept -= min(kept, self.checkpoint / 2 / self.step)
                now += max(self.again, self.back)
                yield now, kept
            elif self.again:
                now += self.again
                yield now, kept
            else:
                gone.setdefault(region, now + self.back)

    def curve(self, plain: Curve, kills: Sequence[tuple[float, str]], until: float) -> Curve:
        """The undisturbed curve, over seconds."""
        moments = list(self.times(kills, until))
        found: Curve = []
        for steps, loss in plain:
            for (t0, k0), (t1, k1) in itertools.pairwise(moments):
                if k0 <= steps <= k1:
                    found.append((t0 + (t1 - t0) * (steps - k0) / max(k1 - k0, 1e-9), loss))
                    break
        return found

    def goodput(self, kills: Sequence[tuple[float, str]], until: float) -> float:
        *_, (_, kept) = self.times(kills, until)
        return kept * self.step / until


def kills_of(seed: int, until: float) -> list[tuple[float, str]]:
    """Seconds and regions: the schedule that the decoupled run of this seed is given."""
    from diloco_cli.bench.quality.experiment import REAL_STEP, STEP
    from diloco_cli.sim import faults

    law = faults.Law(3600 / KILLS * KILLED / REAL_STEP * STEP)
    names = [f"r{number}" for number in range(KILLED)]
    drawn = faults.drawn(law, names, until=until / REAL_STEP, seed=seed)
    return [(fault.time * REAL_STEP, fault.region) for fault in drawn]


def jobs() -> dict[str, Parallel]:
    from diloco_cli.bench.quality.experiment import BACK_AGAIN, REAL_STEP

    made = {"rigid": Parallel("rigid", 0.0, REAL_STEP, BACK_AGAIN * REAL_STEP)}
    for again in AGAIN:
        name = f"elastic, {again:g} s to form again" if again else "elastic, forms again at once"
        made[name] = Parallel("elastic", again, REAL_STEP, BACK_AGAIN * REAL_STEP)
    return made


LONGEST = 20_000.0
"""Seconds after which a job under kills is given up."""


def killed(table: Table, seed: int, optimizer: str = "adamw") -> dict[str, Curve]:
    """All curves over seconds of one seed under kills."""
    from diloco_cli.bench.quality.experiment import REAL_STEP

    plain = steps_of(table.result(Way(0, optimizer), seed, table.rate(Way(0, optimizer))))
    schedule = kills_of(seed, LONGEST)
    curves = {name: job.curve(plain, schedule, LONGEST) for name, job in jobs().items()}
    ours = table.decoupled(Way(KILLED, optimizer, kills=KILLS), seed)
    curves["decoupled"] = [(REAL_STEP * when, loss) for when, loss in steps_of(ours)]
    return curves


def ratio(quotients: Sequence[float]) -> str:
    """The mean of paired quotients with its 95 % interval, by logarithms: they are ratios."""
    import math

    from diloco_cli.bench.quality.table import half_interval

    if not quotients:
        return "never there"
    logs = [math.log(each) for each in quotients]
    middle, half = math.exp(mean(logs)), half_interval(logs)
    if half is None:
        return f"{middle:.1f}"
    return f"{middle:.1f} ({middle / math.exp(half):.1f} to {middle * math.exp(half):.1f})"


def lines_table(table: Table, seeds: Sequence[int], optimizers: Iterable[str]) -> str:
    rows = [
        "| inside | data parallel slower by | late loss | its steps to it | decoupled, in the time "
        "of so many steps | times as fast, 95 % | rounds | bits up / down | line in use |",
        "| --- | --: | --: | --: | --: | --: | --: | --: | --: |",
    ]
    for optimizer in optimizers:
        dp = Way(0, optimizer)
        for slower in reversed(SLOWER):
            theirs, ours, losses, records = [], [], [], []
            for seed in seeds:
                loss = table.late(optimizer, seed)
                record = table.decoupled(Way(4, optimizer, slower), seed)
                when = reached(steps_of(record), loss)
                before = reached(steps_of(table.result(dp, seed, table.rate(dp))), loss)
                assert before is not None
                losses.append(loss)
                theirs.append(before)
                ours.append(when)
                records.append(record)
            there = [when for when in ours if when is not None]
            quotients = [slower * a / b for a, b in zip(theirs, ours, strict=True) if b]
            missed = "" if len(there) == len(ours) else f", {len(ours) - len(there)} not there"
            bits = [mean(each[key] for each in records) for key in ("bits_up", "bits_down")]
            rounds = mean(each["versions"] for each in records)
            pace = mean(each["versions"] / each["seconds"] for each in records)
            rows.append(
                f"| {optimizer} | {slower:g} | {mean(losses):.3f} | {mean(theirs):,.0f} "
                f"| {mean(there):,.0f}{missed} | **{ratio(quotients)}** "
                f"| {rounds:.0f} | {bits[0]:.1f} / {bits[1]:.1f} "
                f"| {100 * max(bits) * pace * slower / 16:.0f} % |"
            )
    return "\n".join(rows)


def kills_table(table: Table, seeds: Sequence[int]) -> str:
    rows = [
        f"| {table.rung.name}, 324 kills an hour, eight regions | tokens kept "
        "| seconds to the late loss | decoupled is so many times as fast, 95 % |",
        "| --- | --: | --: | --: |",
    ]
    curves = {seed: killed(table, seed) for seed in seeds}
    losses = {seed: table.late("adamw", seed) for seed in seeds}
    when = {
        name: {seed: reached(curves[seed][name], losses[seed]) for seed in seeds}
        for name in next(iter(curves.values()))
    }
    for name, found in when.items():
        if name == "decoupled":
            records = [table.decoupled(Way(KILLED, kills=KILLS), seed) for seed in seeds]
            share = mean(each["goodput"] for each in records)
        else:
            ends = {seed: max(t for t, _ in curves[seed][name]) for seed in seeds}
            share = mean(
                jobs()[name].goodput(kills_of(seed, LONGEST), ends[seed]) for seed in seeds
            )
        there = [value for value in found.values() if value is not None]
        pairs = [
            theirs / ours
            for seed in seeds
            if (theirs := found[seed]) and (ours := when["decoupled"][seed])
        ]
        fast = "–" if name == "decoupled" else ratio(pairs)
        missed = "" if len(there) == len(found) else f", {len(found) - len(there)} not there"
        rows.append(
            f"| {name} | {100 * share:.0f} % | {mean(there) if there else float('nan'):,.0f}"
            f"{missed} | {fast} |"
        )
    return "\n".join(rows)


def draw_lines(table: Table, seed: int, file: Path) -> None:
    figure, axes = _canvas(1)
    plain = steps_of(table.result(Way(0), seed, table.rate(Way(0))))
    for slower in (1.0, *SLOWER):
        label = "data parallel, wide lines" if slower == 1 else f"data parallel, 1/{slower:g}"
        axes[0].plot([slower * t for t, _ in plain], [loss for _, loss in plain], label=label)
    for slower in SLOWER:
        ours = steps_of(table.decoupled(Way(4, slower=slower), seed))[1:]
        label = f"decoupled, four regions, 1/{slower:g}"
        axes[0].plot([t for t, _ in ours], [loss for _, loss in ours], "--", label=label)
    axes[0].axhline(table.late("adamw", seed), color="grey", linewidth=0.8)
    axes[0].set_xscale("log")
    axes[0].set_xlabel("virtual time, in steps of computing alone")
    axes[0].set_ylabel("held-out loss")
    axes[0].set_ylim(top=3.2)
    finish(figure, axes[0], f"narrow lines, on a virtual clock (seed {seed})", file)


def draw_kills(table: Table, seed: int, file: Path) -> None:
    from diloco_cli.bench.quality.experiment import REAL_STEP

    figure, axes = _canvas(3)
    curves = killed(table, seed)
    ours = table.decoupled(Way(KILLED, kills=KILLS), seed)
    plain = table.result(Way(0), seed, table.rate(Way(0)))
    schedule = kills_of(seed, LONGEST)
    shares = {
        name: 100 * job.goodput(schedule, max(t for t, _ in curves[name]))
        for name, job in jobs().items()
    }
    shares["decoupled"] = 100 * ours["goodput"]
    names = list(shares)
    for number, name in enumerate(names):
        axes[0].bar(number, shares[name])
        axes[0].text(number, shares[name] + 1, f"{shares[name]:.0f}", ha="center", fontsize=8)
        points = curves[name][1:]
        axes[1].plot([t for t, _ in points], [loss for _, loss in points], label=name)
    labels = [textwrap.fill(name, 12) for name in names]
    axes[0].set_xticks(range(len(names)), labels, fontsize=6)
    axes[0].set_ylabel("tokens kept, % of an undisturbed run's")
    axes[1].axhline(table.late("adamw", seed), color="grey", linewidth=0.8)
    axes[1].set_xlabel(f"virtual seconds, steps of {REAL_STEP} s")
    axes[1].set_ylabel("held-out loss")
    axes[1].set_ylim(top=2.8)
    axes[1].legend(fontsize=7)
    for label, record in (("data parallel", plain), ("decoupled", ours)):
        points = record["curve"][1:]
        axes[2].plot([n / 1e6 for _, n, _ in points], [loss for *_, loss in points], label=label)
    axes[2].set_ylim(top=2.8)
    axes[2].set_xlabel("million tokens")
    finish(figure, axes[2], f"the same over tokens (seed {seed})", file)


def _canvas(panels: int) -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9 if panels == 1 else 14, 5), dpi=110)
    return figure, [figure.add_subplot(1, panels, number + 1) for number in range(panels)]


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--seeds", default=",".join(map(str, SEEDS)))
    parser.add_argument("--inside", default="adamw,muon", help="optimisers of the narrow lines")
    parser.add_argument("--without-kills", action="store_true")
    parser.add_argument("--rung", choices=RUNGS, help="kills only, with a model of this size")
    parser.add_argument("--lines", type=Path, help="a picture of the narrow lines")
    parser.add_argument("--kills", type=Path, help="a picture of the kills")
    options = parser.parse_args(words)
    os.environ.setdefault("XLA_FLAGS", "--xla_cpu_multi_thread_eigen=false")
    from diloco_cli.worker.trainer.task import set_up

    set_up(None)
    table = Table(options.file, RUNGS[options.rung or SMALL.name])
    seeds = [int(seed) for seed in options.seeds.split(",")]
    if not options.rung:
        print(lines_table(table, seeds, options.inside.split(",")))
    if not options.without_kills:
        print(f"\n{kills_table(table, seeds)}")
    if options.lines:
        draw_lines(table, seeds[0], options.lines)
    if options.kills:
        draw_kills(table, seeds[0], options.kills)
    return 0


if __name__ == "__main__":
    sys.exit(main())
