"""Goodput under kills, as a table and as bars: one group for each schedule.

    python -m tests.verify.results.goodput build/chaos/*/chaos.json --png docs/results/goodput.png \
        --raw docs/results/raw

Refuses runs that were not given the same faults as the rest of their group.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.verify.results.records import ORDER, Record, by_schedule, keep, read

HEAD = (
    "| kills an hour | method | hit | tokens | time | participation | back after, p50 / p95 | "
    "held-out loss | at tokens |\n"
    "| ---: | --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"
)


def table(records: Sequence[Record]) -> str:
    return "\n".join([HEAD, *(_row(one) for one in records)])


def _row(one: Record) -> str:
    goodput, recovery, loss = (one.said[key] for key in ("goodput", "recovery", "loss"))
    back = f"{recovery['p50']:.1f} / {recovery['p95']:.1f} s" if recovery.get("count") else "–"
    cells = [
        f"{one.kills_an_hour:.0f}",
        one.label,
        str(one.kills),
        *(_percent(goodput[key]) for key in ("tokens", "time", "participation")),
        back,
        "–" if loss["heldout"] is None else f"{loss['heldout']:.3f}",
        f"{one.said['tokens']['applied']:,.0f}",
    ]
    return f"| {' | '.join(cells)} |"


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{share:.1%}".replace("%", " %")


def check(groups: Sequence[Sequence[Record]]) -> None:
    """A method that stands alone was given other faults than those it is compared with."""
    methods = {one.method for group in groups for one in group}
    for group in groups:
        missing = methods - {one.method for one in group}
        if missing:
            names = ", ".join(str(one.path) for one in group)
            raise SystemExit(
                f"error: {names}: no run of {', '.join(sorted(missing))} was given these faults\n"
                "hint: inflict one schedule on all: diloco chaos SPEC --schedule FILE --method …"
            )


def draw(groups: Sequence[Sequence[Record]], file: Path) -> None:
    figure, axes = canvas()
    width = 0.8 / max(len(group) for group in groups)
    for method in ORDER:
        places, heights = [], []
        for number, group in enumerate(groups):
            for place, one in enumerate(group):
                if one.method == method:
                    places.append(number + (place - (len(group) - 1) / 2) * width)
                    heights.append(100 * one.said["goodput"]["tokens"])
        if places:
            label = next(one.label for group in groups for one in group if one.method == method)
            bars = axes.bar(places, heights, width * 0.92, label=label)
            axes.bar_label(bars, fmt="%.0f", fontsize=9)
    rates = [f"{group[0].kills_an_hour:.0f} kills an hour" for group in groups]
    axes.set_xticks(range(len(groups)), rates)
    axes.set_ylim(0, 105)
    axes.set_ylabel("tokens in the weights ÷ fault-free tokens, %")
    first = groups[0][0].said
    finish(figure, axes, f"{first['regions']} regions, {first['seconds']:.0f} s, SIGKILLs", file)


def canvas() -> tuple[Any, Any]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 5.5), dpi=110)
    return figure, figure.add_subplot()


def finish(figure: Any, axes: Any, title: str, file: Path) -> None:
    axes.set_title(title, fontsize=10)
    axes.grid(alpha=0.3)
    axes.set_axisbelow(True)
    axes.legend(fontsize=8)
    figure.tight_layout()
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, format="png")


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="tests.verify.results.goodput")
    parser.add_argument("records", type=Path, nargs="+")
    parser.add_argument("--png", type=Path)
    parser.add_argument("--raw", type=Path, help="copy the records there")
    asked = parser.parse_args(words)
    records = read(asked.records)
    groups = by_schedule(records)
    check(groups)
    print(table(records))
    if asked.png:
        draw(groups, asked.png)
    if asked.raw:
        keep(records, asked.raw)


if __name__ == "__main__":
    main()
