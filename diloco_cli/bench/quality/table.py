"""Cells become a table: means over seeds, how far the seeds are apart, and the goals."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diloco_cli.bench.quality.cells import GOALS, Cell, QualityGoal

Record = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """One way to train, over all seeds."""

    cell: str
    seeds: tuple[int, ...]
    loss: float
    against: str
    """Which cell it is compared with."""
    change: float | None
    """Of the loss, as a share; the mean over seeds of each one's own change."""
    noise: float | None
    """Standard error of that mean: seeds differ by so much."""
    goodput: float
    members: float
    versions: float
    bits_up: float
    bits_down: float
    failed: int = 0


def rows(cells: Sequence[Cell], records: Iterable[Record]) -> list[Row]:
    """Averages over seeds; changes are taken seed by seed, so what seeds share cancels out."""
    found: dict[str, dict[int, Record]] = {}
    for record in records:
        found.setdefault(record["cell"], {})[record["seed"]] = record
    return [_row(cell, found) for cell in cells if cell.name in found]


def _row(cell: Cell, found: dict[str, dict[int, Record]]) -> Row:
    mine = found[cell.name]
    done = {seed: record for seed, record in mine.items() if "loss" in record}
    other = found.get(cell.against, {}) if cell.against else {}
    changes = [
        record["loss"] / other[seed]["loss"] - 1
        for seed, record in done.items()
        if "loss" in other.get(seed, {})
    ]

    def mean(key: str) -> float:
        return statistics.fmean(record[key] for record in done.values()) if done else float("nan")

    several = len(changes) > 1
    return Row(
        cell=cell.name,
        seeds=tuple(sorted(done)),
        loss=mean("loss"),
        against=cell.against,
        change=statistics.fmean(changes) if changes else None,
        noise=statistics.stdev(changes) / len(changes) ** 0.5 if several else None,
        goodput=mean("goodput"),
        members=mean("members"),
        versions=mean("versions"),
        bits_up=mean("bits_up"),
        bits_down=mean("bits_down"),
        failed=len(mine) - len(done),
    )


def markdown(table: Sequence[Row]) -> str:
    """The table as a page shows it."""
    lines = [
        "| cell | seeds | loss | change | against | goodput | members | rounds | bits up / down |",
        "| --- | --- | --: | --: | --- | --: | --: | --: | --: |",
    ]
    for row in table:
        bits = f"{row.bits_up:.1f} / {row.bits_down:.1f}" if row.bits_up else "–"
        seeds = ", ".join(map(str, row.seeds)) + (f" ({row.failed} failed)" if row.failed else "")
        lines.append(
            f"| {row.cell} | {seeds} | {row.loss:.4f} | {percent(row)} | {row.against or '–'} "
            f"| {row.goodput:.2f} | {row.members:.2f} | {row.versions:.0f} | {bits} |"
        )
    return "\n".join(lines) + "\n"


def percent(row: Row) -> str:
    if row.change is None:
        return "–"
    noise = "" if row.noise is None else f" ± {100 * row.noise:.2f}"
    return f"{100 * row.change:+.2f}{noise} %"


def verdicts(records: Iterable[Record]) -> list[dict[str, Any]]:
    """Every goal that the records can judge, as `bench` shows figures; by seeds that both have."""
    known = {(one["cell"], one["seed"]): one for one in records if "loss" in one}
    found = []
    for goal in GOALS:
        seeds = [
            seed for cell, seed in known if cell == goal.cell and (goal.against, seed) in known
        ]
        if seeds:
            found.append(_verdict(goal, seeds, known))
    return found


def _verdict(
    goal: QualityGoal, seeds: Sequence[int], known: dict[tuple[str, int], Record]
) -> dict[str, Any]:
    value, reference = (
        statistics.fmean(known[name, seed][goal.figure] for seed in seeds)
        for name in (goal.cell, goal.against)
    )
    more = goal.figure == "goodput"
    ratio = value / reference
    return {
        "name": f"{goal.figure}, {goal.cell} / {goal.against}, {len(seeds)} seeds",
        **{"value": value, "unit": goal.unit, "reference": reference, "ratio": ratio},
        "goal": goal.limit,
        "met": ratio >= goal.limit if more else ratio <= goal.limit,
        **({} if more else {"better": "lower"}),
    }


def plot(table: Sequence[Row], file: Path) -> None:
    """Draws every cell's change of loss with its noise, group by group."""
    from diloco_cli.bench.published.plot import canvas, save

    shown = [row for row in table if row.change is not None and row.change < 0.5]
    figure, axes = canvas(height=1.2 + 0.26 * len(shown))
    places = range(len(shown))
    changes = [100 * (row.change or 0.0) for row in shown]
    noise = [100 * (row.noise or 0.0) for row in shown]
    axes.errorbar(changes, places, xerr=noise, fmt="o", markersize=4, capsize=3)
    axes.axvline(0, color="grey", linewidth=0.8)
    names = [f"{row.cell}  (vs {row.against})" for row in shown]
    axes.set_yticks(list(places), names, fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("change of held-out loss, % (mean over seeds, bars: standard error)")
    axes.grid(alpha=0.3)
    save(figure, file)
