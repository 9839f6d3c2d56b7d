"""Pictures of rehearsals, as PNG files. Needs matplotlib, which comes with the extra `plot`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from diloco_cli.bench.published.verdict import Verdict
from diloco_cli.errors import SpecError
from diloco_cli.sim.sweep import SimulatedCell
from diloco_cli.system.outputs import writing


def plot_verdict(verdict: Verdict, file: Path) -> None:
    """Draws a preset's rows over its columns, and the published ones as crosses."""
    figure, axes = canvas()
    places = range(len(verdict.columns))
    for name, row in verdict.rows.items():
        (line,) = axes.plot(places, row, marker="o", markersize=3, label=name)
        if name in verdict.paper:
            axes.plot(places, verdict.paper[name], "x", color=line.get_color())
    axes.set_xticks(list(places), verdict.columns)
    cells = [value for row in verdict.rows.values() for value in row if value > 0]
    if cells and max(cells) > 100 * min(cells):
        axes.set_yscale("log")
    _finish(figure, axes, f"{verdict.name}: {verdict.about}\n(crosses: published)", file)


def plot_outcomes(cells: Sequence[SimulatedCell], file: Path) -> None:
    """Draws tokens applied over time for each rehearsal, beside those without a fault."""
    figure, axes = canvas()
    for cell in cells:
        times = [point[0] for point in cell.outcome.timeline]
        tokens = [point[1] for point in cell.outcome.timeline]
        axes.plot(times, tokens, label=cell.label)
    if cells:
        sites, end = cells[0].scenario.sites, cells[0].outcome.seconds
        rate = sum(site.tokens / site.step for site in sites)
        axes.plot([0, end], [0, rate * end], "--", color="grey", label="without a fault")
    axes.set_xlabel("seconds")
    axes.set_ylabel("tokens applied")
    _finish(figure, axes, "tokens in applied updates", file)


def canvas(height: float = 5.5) -> tuple[Any, Any]:
    """An empty picture, or word that nothing here can draw one."""
    try:
        import matplotlib
    except ImportError:
        raise SpecError(
            "Plots need matplotlib, which is not installed.",
            hint="pip install 'diloco-cli[plot]', or leave --plot out: --format json has the data.",
        ) from None
    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, height), dpi=110)
    return figure, figure.add_subplot()


def _finish(figure: Any, axes: Any, title: str, file: Path) -> None:
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=7)
    save(figure, file)


def save(figure: Any, file: Path) -> None:
    """Writes a picture."""
    figure.tight_layout()
    with writing(file, "--plot"):
        figure.savefig(file, format="png")
