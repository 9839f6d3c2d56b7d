"""Cells become a table: means over seeds, how far the seeds are apart, and the goals."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from diloco_cli.bench.figure import Figure
from diloco_cli.bench.quality.cells import GOALS, Cell, QualityGoal

if TYPE_CHECKING:
    from diloco_cli.bench.quality.experiment import CellRecord


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
    interval: float | None
    """Half of that mean's 95 % interval, by Student's t over the seeds; None for one seed."""
    ema: float
    """Loss of the average of the last rounds."""
    goodput: float
    members: float
    versions: float
    bits_up: float
    bits_down: float
    failed: int = 0


def rows(cells: Sequence[Cell], records: Iterable[CellRecord]) -> list[Row]:
    """Averages over seeds; changes are taken seed by seed, so what seeds share cancels out."""
    by_cell: dict[str, dict[int, CellRecord]] = {}
    for record in records:
        by_cell.setdefault(record["cell"], {})[record["seed"]] = record
    return [_row(cell, by_cell) for cell in cells if cell.name in by_cell]


def _row(cell: Cell, by_cell: dict[str, dict[int, CellRecord]]) -> Row:
    mine = by_cell[cell.name]
    done = {seed: record for seed, record in mine.items() if "loss" in record}
    other = by_cell.get(cell.against, {}) if cell.against else {}
    changes = [
        record["loss"] / other[seed]["loss"] - 1
        for seed, record in done.items()
        if "loss" in other.get(seed, {})
    ]

    def mean(key: str) -> float:
        return statistics.fmean(record[key] for record in done.values()) if done else float("nan")

    return Row(
        cell=cell.name,
        seeds=tuple(sorted(done)),
        loss=mean("loss"),
        against=cell.against,
        change=statistics.fmean(changes) if changes else None,
        interval=half_interval(changes),
        ema=statistics.fmean(record.get("ema", record["loss"]) for record in done.values())
        if done
        else float("nan"),
        goodput=mean("goodput"),
        members=mean("members"),
        versions=mean("versions"),
        bits_up=mean("bits_up"),
        bits_down=mean("bits_down"),
        failed=len(mine) - len(done),
    )


def half_interval(changes: Sequence[float]) -> float | None:
    """Half of the 95 % interval of a mean; None for fewer than two."""
    if len(changes) < 2:
        return None
    from scipy.stats import t

    error = statistics.stdev(changes) / len(changes) ** 0.5
    return float(t.ppf(0.975, len(changes) - 1)) * error


def markdown(table: Sequence[Row]) -> str:
    """The table as a page shows it."""
    lines = [
        "| cell | seeds | loss | average's | change | against | goodput | members | rounds "
        "| bits up / down |",
        "| --- | --- | --: | --: | --: | --- | --: | --: | --: | --: |",
    ]
    for row in table:
        bits = f"{row.bits_up:.1f} / {row.bits_down:.1f}" if row.bits_up else "–"
        seeds = ", ".join(map(str, row.seeds)) + (f" ({row.failed} failed)" if row.failed else "")
        lines.append(
            f"| {row.cell} | {seeds} | {row.loss:.4f} | {row.ema:.4f} | {percent(row)} "
            f"| {row.against or '–'} "
            f"| {row.goodput:.2f} | {row.members:.2f} | {row.versions:.0f} | {bits} |"
        )
    return "\n".join(lines) + "\n"


def percent(row: Row) -> str:
    if row.change is None:
        return "–"
    interval = "" if row.interval is None else f" ± {100 * row.interval:.2f}"
    return f"{100 * row.change:+.2f}{interval} %"


def verdicts(records: Iterable[CellRecord]) -> list[Figure]:
    """Every goal that the records can judge, as `bench` shows figures; by seeds that both have."""
    known = {(record["cell"], record["seed"]): record for record in records if "loss" in record}
    figures = []
    for goal in GOALS:
        seeds = [
            seed for cell, seed in known if cell == goal.cell and (goal.against, seed) in known
        ]
        if seeds:
            figures.append(_verdict(goal, seeds, known))
    return figures


def _verdict(
    goal: QualityGoal, seeds: Sequence[int], known: dict[tuple[str, int], CellRecord]
) -> Figure:
    """Judges the worse end of the 95 % interval; of one seed nothing can be said."""
    ours, theirs = (
        [known[name, seed][goal.figure] for seed in seeds] for name in (goal.cell, goal.against)
    )
    ratios = [mine / other for mine, other in zip(ours, theirs, strict=True)]
    half = half_interval(ratios)
    lower, reference = goal.figure != "goodput", statistics.fmean(theirs)
    worse = statistics.fmean(ratios) + (1 if lower else -1) * (half or 0.0)
    end = "" if half is None else f", {'upper' if lower else 'lower'} end of 95 %"
    name = f"{goal.figure}, {goal.cell} / {goal.against}, {len(seeds)} seeds{end}"
    limit = None if half is None else goal.limit
    return Figure(name, worse * reference, goal.unit, reference, limit, lower=lower)


def plot(table: Sequence[Row], file: Path) -> None:
    """Draws every cell's change of loss with its interval, group by group."""
    from diloco_cli.bench.published.plot import canvas, save

    shown = [row for row in table if row.change is not None and row.change < 0.5]
    figure, axes = canvas(height=1.2 + 0.26 * len(shown))
    places = range(len(shown))
    changes = [100 * (row.change or 0.0) for row in shown]
    halves = [100 * (row.interval or 0.0) for row in shown]
    axes.errorbar(changes, places, xerr=halves, fmt="o", markersize=4, capsize=3)
    axes.axvline(0, color="grey", linewidth=0.8)
    names = [f"{row.cell}  (vs {row.against})" for row in shown]
    axes.set_yticks(list(places), names, fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel("change of held-out loss, % (mean over seeds, bars: 95 % intervals)")
    axes.grid(alpha=0.3)
    save(figure, file)
