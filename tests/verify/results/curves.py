"""Held-out loss over time, and who reaches a given loss when.

    python -m tests.verify.results.curves slow-dp/chaos.json decoupled/chaos.json --loss 2.2 \
        --png docs/results/links.png --raw docs/results/raw

The first record is what the others are compared with.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from tests.verify.results.goodput import canvas, finish
from tests.verify.results.records import Record, keep, reached

HEAD = (
    "| run | method | seconds to a loss of {loss:g} | times as fast | last loss | after |\n"
    "| --- | --- | ---: | ---: | ---: | ---: |"
)


def table(records: Sequence[Record], loss: float) -> str:
    first = reached(records[0].curve, loss)
    return "\n".join([HEAD.format(loss=loss), *(_row(one, loss, first) for one in records)])


def _row(one: Record, loss: float, first: float | None) -> str:
    took = reached(one.curve, loss)
    last_at, last = one.curve[-1]
    # A run that never got there gives a bound only, and says so.
    ratio = "–"
    if took is not None and took > 0 and first is not None:
        ratio = f"{first / took:.1f}"
    cells = [
        one.name,
        one.label,
        "not reached" if took is None else f"{took:.1f}",
        ratio,
        f"{last:.3f}",
        f"{last_at:.0f} s",
    ]
    return f"| {' | '.join(cells)} |"


def draw(records: Sequence[Record], file: Path, *, loss: float | None, log: bool) -> None:
    figure, axes = canvas()
    for one in records:
        seconds, losses = zip(*one.curve, strict=True)
        axes.plot(seconds, losses, marker="o", markersize=2.5, label=f"{one.label} ({one.name})")
    if loss is not None:
        axes.axhline(loss, color="grey", linestyle="--", linewidth=1)
    if log:
        axes.set_xscale("symlog", linthresh=1.0)
        axes.set_xlim(left=0)
    axes.set_xlabel("seconds")
    axes.set_ylabel("held-out loss, nats a token")
    finish(figure, axes, "held-out loss of the weights of all regions", file)


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="tests.verify.results.curves")
    parser.add_argument("records", type=Path, nargs="+")
    parser.add_argument("--loss", type=float, required=True)
    parser.add_argument("--log", action="store_true", help="seconds on a logarithmic axis")
    parser.add_argument("--png", type=Path)
    parser.add_argument("--raw", type=Path, help="copy the records there")
    asked = parser.parse_args(words)
    records = [Record.load(path) for path in asked.records]
    print(table(records, asked.loss))
    if asked.png:
        draw(records, asked.png, loss=asked.loss, log=asked.log)
    if asked.raw:
        keep(records, asked.raw)


if __name__ == "__main__":
    main()
