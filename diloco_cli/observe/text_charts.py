"""Curves and rounds drawn with letters, for a terminal. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from diloco_cli.observe.history import RoundRecord, Seconds

BARS = "▁▂▃▄▅▆▇█"
CALLED, GATHERING, PUBLISHED, ADOPTED = "╶░◆○"
BEGINNING = 0.1
"""Share of a falling curve that sets no scale: a loss falls most before it is of interest."""
TURNS = 4
"""Rounds of each fragment that fit into the picture of them."""
LEAST_SPAN, MOST_SPAN = 5.0, 3600.0


def sparkline(values: Sequence[float | None], width: int, *, falls: bool = False) -> str:
    """A curve in so many letters, the newest last; a gap is a blank.

    Of a curve that `falls` the beginning may stand above the scale.
    """
    cells = _cells(values, width)
    late = cells[int(len(cells) * BEGINNING) :] if falls else cells
    scale = [value for value in late if value is not None]
    if len(scale) < 2:
        return ""
    low, high = min(scale), max(scale)
    top = len(BARS) - 1

    def letter(value: float | None) -> str:
        if value is None:
            return " "
        share = (value - low) / (high - low) if high > low else 0.5
        return BARS[min(top, max(0, round(share * top)))]

    return "".join(map(letter, cells))


def _cells(values: Sequence[float | None], width: int) -> list[float | None]:
    """As many means as there is room for, without the gap before the first value."""
    first = next((index for index, value in enumerate(values) if value is not None), len(values))
    rest = values[first:]
    each = len(rest) / width if len(rest) > width else 1.0
    count = min(width, len(rest))
    cells: list[float | None] = []
    for number in range(count):
        part = rest[int(number * each) : max(int(number * each) + 1, int((number + 1) * each))]
        known = [value for value in part if value is not None and math.isfinite(value)]
        cells.append(statistics.fmean(known) if known else None)
    return cells


def span_of(rounds: Sequence[RoundRecord]) -> Seconds:
    """How much time a picture of the last rounds covers: some turns, whatever they take."""
    calls: dict[int, list[Seconds]] = {}
    for record in rounds:
        calls.setdefault(record.fragment, []).append(record.called)
    turns = [
        after - before
        for times in calls.values()
        for before, after in zip(times[-TURNS:], times[-TURNS + 1 :], strict=False)
        if after > before
    ]
    usual = statistics.median(turns) if turns else LEAST_SPAN
    return min(MOST_SPAN, max(LEAST_SPAN, TURNS * usual))


def lane(rounds: Sequence[RoundRecord], now: Seconds, span: Seconds, width: int) -> str:
    """The rounds of one fragment over the last `span` seconds: called, gathering, published, taken
    over by regions."""
    cells = [" "] * width

    def column(at: Seconds) -> int:
        return math.floor((at - (now - span)) / span * (width - 1))

    def put(at: Seconds, letter: str) -> None:
        if 0 <= (place := column(at)) < width:
            cells[place] = letter

    for record in rounds:
        ends = record.published if record.published is not None else now
        for place in range(max(0, column(record.called)), min(width, column(ends) + 1)):
            cells[place] = GATHERING
        put(record.called, CALLED)
        for at in record.adopted.values():
            if 0 <= (place := column(at)) < width and cells[place] == " ":
                cells[place] = ADOPTED
        if record.published is not None:
            put(record.published, PUBLISHED)
    return "".join(cells).rstrip()
