"""The curves of a run: the document of `GET /v1/history` in, drawings out."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
from typing import Any

from diloco_cli.observe.metrics import quantile
from diloco_cli.observe.page.charts import Axis, Band, Line, Points, chart, reach
from diloco_cli.observe.units import amount, bytes_, loss, percent, seconds

EARLY = 0.1
"""Share of the run so far whose losses may lie outside the chart."""
MOST_LINES = 8
"""Regions with a line of their own; of more, the middle one and what most lie between is drawn."""
BAND_POINTS = 200

Document = Mapping[str, Any]
Styles = Mapping[str, str]
"""The CSS class of each region's colour."""


def loss_chart(
    history: Document,
    styles: Styles,
    *,
    end: float,
    label: str,
    by_time: bool = False,
    rule: str = "",
) -> str:
    """Held-out loss of the weights and of their average, and each region's training loss, over
    merged tokens or time up to `end`."""
    tokens_at = _TokensAt(history)

    def place(at: float) -> float:
        return at if by_time else tokens_at(at)

    lines, band = _of_regions(history, styles, "loss", place)
    if average := evaluation_points(history, by_time=by_time, of="ema"):
        lines.append(Line("EMA", average, "dash"))
    evaluations = evaluation_points(history, by_time=by_time)
    lines.append(Line("held-out", evaluations, "thick", dots=len(evaluations) <= 200))
    return loss_lines(lines, end=end, label=label, by_time=by_time, band=band, rule=rule)


def evaluation_points(
    history: Document, *, by_time: bool = False, of: str = "evaluations"
) -> Points:
    """The held-out losses over merged tokens or time; with `of` "ema", the average's."""
    return [(at if by_time else tokens, value) for at, tokens, value, _ in history[of]]


def loss_lines(
    lines: list[Line],
    *,
    end: float,
    label: str,
    by_time: bool = False,
    band: Band | None = None,
    rule: str = "",
) -> str:
    """Losses on a log scale, in a range that the fall of the first steps does not set."""
    drawn = [*lines, *(Line("", points) for points in ((band.low, band.high) if band else ()))]
    y = reach([value for line in drawn for value in _after_the_start(line)])
    end = max(1.0, end, *(at for line in lines for at, _ in line.points))
    return chart(
        lines,
        label=label,
        x=Axis(0.0, end),
        y=Axis(y.low, y.high, log=y.low > 0),
        x_text=seconds if by_time else amount,
        y_text=loss,
        height=290,
        band=band,
        rule=rule,
    )


def _after_the_start(line: Line) -> list[float | None]:
    last = max((at for at, _ in line.points), default=0.0)
    later = [value for at, value in line.points if at >= EARLY * last]
    return later if len(later) > 1 else [value for _, value in line.points]


def _of_regions(
    history: Document, styles: Styles, column: str, place: Any = lambda at: at
) -> tuple[list[Line], Band | None]:
    """A line for each region, or the middle one of many and what most lie between."""
    regions = history["regions"]
    if len(regions) <= MOST_LINES:
        return [
            Line(
                name,
                [(place(at), v) for at, v in zip(curves["at"], curves[column], strict=True)],
                styles.get(name, ""),
            )
            for name, curves in regions.items()
        ], None
    spread = _spread(regions.values(), column)
    low, middle, high = (
        [(place(at), values[which]) for at, values in spread] for which in range(3)
    )
    return [Line("median", middle)], Band(low, high)


def _spread(
    regions: Sequence[Mapping[str, Any]] | Any, column: str
) -> list[tuple[float, tuple[float | None, ...]]]:
    """The 10th, 50th and 90th of each hundred regions, over time."""
    regions = list(regions)
    last = max((curves["at"][-1] for curves in regions if curves["at"]), default=0.0)
    cells: dict[int, list[float]] = {}
    for curves in regions:
        for at, value in zip(curves["at"], curves[column], strict=True):
            if value is not None:
                cells.setdefault(int(BAND_POINTS * at / max(last, 1e-9)), []).append(value)
    return [
        (last * cell / BAND_POINTS, tuple(quantile(values, share) for share in (0.1, 0.5, 0.9)))
        for cell, values in sorted(cells.items())
    ]


class _TokensAt:
    """Merged tokens at a time, by the rows of the run."""

    def __init__(self, history: Document) -> None:
        known = known_points(history, "applied")
        self._times, self._tokens = [at for at, _ in known], [tokens for _, tokens in known]

    def __call__(self, at: float) -> float:
        place = bisect_right(self._times, at)
        return self._tokens[place - 1] if place else 0.0


def known_points(history: Document, column: str) -> list[tuple[float, float]]:
    """The rows of the run in which a column is known."""
    return [(at, value) for at, value in run_points(history, column) if value is not None]


def run_points(history: Document, column: str) -> Points:
    run = history["run"]
    return list(zip(run["at"], run.get(column, [None] * len(run["at"])), strict=True))


def speed_chart(history: Document, styles: Styles, *, label: str) -> str:
    """Tokens per second of each region."""
    lines, band = _of_regions(history, styles, "tokens_per_second")
    drawn = [value for line in lines for _, value in line.points]
    y = reach(drawn + [value for _, value in (band.high if band else ())], least=0.0)
    return _over_time(history, lines, y, amount, label, height=150, band=band)


def goodput_chart(history: Document, *, label: str) -> str:
    """The share of the time that went into useful steps."""
    lines = [Line("time", run_points(history, "goodput_time"), "area")]
    return _over_time(history, lines, Axis(0.0, 1.0), percent, label, height=104)


def traffic_chart(history: Document, *, label: str) -> str:
    """Bytes down, and up as a dashed line."""
    lines = [
        Line(name, run_points(history, f"bytes_{name}"), style, label=name)
        for name, style in (("down", ""), ("up", "dash"))
    ]
    y = reach([value for line in lines for _, value in line.points], least=0.0)
    return _over_time(history, lines, y, bytes_, label, height=130)


def _over_time(
    history: Document,
    lines: list[Line],
    y: Axis,
    y_text: Any,
    label: str,
    *,
    height: int,
    band: Band | None = None,
) -> str:
    # A row stands at its middle, which may be a little ahead of now.
    x = Axis(0.0, max(1.0, history["now"], *(at for line in lines for at, _ in line.points)))
    return chart(
        lines, label=label, x=x, y=y, x_text=seconds, y_text=y_text, height=height, band=band
    )
