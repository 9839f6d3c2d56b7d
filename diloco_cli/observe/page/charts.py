"""Lines over tokens or time, as SVG.

Places are percentages of the drawing, so that it fills whatever width it gets while its letters
keep their size. The lines themselves lie in a nested drawing that is stretched. What the script
needs to read a value off a line stands beside it: the ends of both axes and each line's name.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

from diloco_cli.observe.units import seconds

Points = Sequence[tuple[float, float | None]]

TOP, BOTTOM = 14, 22
"""Pixels above and below the plot; below are the labels of the x-axis."""
LOW = 150
"""Pixels of a chart that is a small one."""
LETTERS = 14
"""Pixels that a label needs for itself."""
MOST_LABELS = 8
TIME_STEPS = (
    *(1.0, 2.0, 5.0, 10.0, 15.0, 30.0, 60.0, 120.0, 300.0, 600.0, 900.0, 1800.0),
    *(3600.0, 7200.0, 14_400.0, 21_600.0, 43_200.0, 86_400.0, 172_800.0, 432_000.0, 864_000.0),
)
"""Seconds between two labels of a time axis."""
WIDE = 18
"""Letters of a line's name that fit beside it."""


@dataclass(frozen=True)
class Line:
    name: str
    points: Points
    style: str = ""
    """CSS classes: a region's colour, `thick`, `dash`, `area`."""
    dots: bool = False
    label: str | None = None
    """What stands at its end; its name and its last value where nothing is said."""


@dataclass(frozen=True)
class Band:
    """What lies between two lines."""

    low: Points
    high: Points


@dataclass(frozen=True)
class Axis:
    low: float
    high: float
    log: bool = False

    def share(self, value: float) -> float:
        """Where the value lies between low and high, from 0 to 1."""
        low, high = self.low, self.high
        if self.log:
            low, high, value = math.log(low), math.log(high), math.log(max(value, 1e-12))
        if high <= low:
            return 0.5
        return (value - low) / (high - low)


def chart(
    lines: Sequence[Line],
    *,
    label: str,
    x: Axis,
    y: Axis,
    x_text: Callable[[float], str],
    y_text: Callable[[float], str],
    height: int = 220,
    band: Band | None = None,
    rule: str = "",
) -> str:
    """Draws lines; `label` says in a sentence what one sees, `rule` what the right edge is."""
    plot = height - TOP - BOTTOM
    units = f"{x_text.__name__} {y_text.__name__}"
    parts = [
        f"<div class='lines' data-x='{x.low:.7g} {x.high:.7g}' "
        f"data-y='{y.low:.7g} {y.high:.7g} {'log' if y.log else ''}' data-units='{units}'>"
        f"<svg class='chart' role='img' aria-label='{escape(label, quote=True)}' "
        f"width='100%' height='{height}'>"
    ]

    def down(value: float) -> float:
        return TOP + plot * (1 - y.share(value))

    said = ""
    for tick in ticks(y, 4 if plot > 80 else 2):
        if (words := _tick(y_text(tick))) == said:
            continue  # Of nothing at all there are many ticks and one word.
        said, at = words, f"{down(tick):.1f}"
        parts.append(f"<line class='grid' x1='0' x2='100%' y1='{at}' y2='{at}'/>")
        parts.append(f"<text class='left' x='-8' y='{at}' dy='4'>{escape(words)}</text>")
    # Words for times are long, and low charts stand in narrow columns.
    about = 2.5 if x_text is seconds and height <= LOW else 4
    for tick in ticks(x, about, TIME_STEPS if x_text is seconds else ()):
        share = x.share(tick)
        anchor = "start" if share < 0.03 else "end" if share > 0.97 else "middle"
        parts.append(
            f"<text x='{_percent(share)}' y='{height - 4}' text-anchor='{anchor}'>"
            f"{escape(_tick(x_text(tick)))}</text>"
        )
    if rule:
        parts.append(f"<line class='rule' x1='100%' x2='100%' y1='{TOP}' y2='{TOP + plot}'/>")
        parts.append(f"<text class='left' x='100%' dx='-6' y='{TOP + 10}'>{escape(rule)}</text>")
    parts.append(
        f"<svg class='plot' x='0' y='{TOP}' width='100%' height='{plot}' "
        "viewBox='0 0 1000 1000' preserveAspectRatio='none'>"
    )
    if band and (shape := _path([*band.low, *reversed(band.high)], x, y, whole=True)):
        parts.append(f"<path class='band' d='{shape}Z'/>")
    for line in lines:
        if path := _path(line.points, x, y):
            if "area" in line.style:
                parts += [f"<path class='band' d='{each}'/>" for each in _areas(path)]
            name = escape(line.name, quote=True)
            parts.append(f"<path class='line {line.style}' data-name='{name}' d='{path}'/>")
    parts.append("</svg>")
    for line in lines:
        if line.dots:
            parts += [
                f"<circle class='dot {line.style}' cx='{_percent(x.share(at))}' "
                f"cy='{down(value):.1f}' r='2.5'/>"
                for at, value in line.points
                if value is not None and 0 <= y.share(value) <= 1
            ]
    parts += _cut(lines, x, y, y_text)
    parts += _labels(lines, x, y_text, down, height)
    parts.append("</svg></div>")
    return "".join(parts)


def _areas(path: str) -> list[str]:
    """What lies below each unbroken piece of a line."""
    areas = []
    for piece in path.split("M")[1:]:
        places = [point.split()[0] for point in piece.split("L")]
        areas.append(f"M{piece}L{places[-1]} 1000L{places[0]} 1000Z")
    return areas


def _cut(lines: Sequence[Line], x: Axis, y: Axis, text: Callable[[float], str]) -> list[str]:
    """Says where a thick line comes from that begins above the drawing."""
    for line in lines:
        if "thick" not in line.style or len(line.points) < 2:
            continue
        value = line.points[0][1]
        inside = [at for at, each in line.points if each is not None and y.share(each) <= 1]
        if value is not None and y.share(value) > 1 and inside:
            at = _percent(max(0.0, x.share(inside[0])))
            return [f"<text x='{at}' dx='2' y='{TOP - 3}'>from {escape(text(value))}</text>"]
    return []


def _labels(
    lines: Sequence[Line],
    x: Axis,
    text: Callable[[float], str],
    down: Callable[[float], float],
    height: int,
) -> list[str]:
    """Each line's name at its end, moved apart where they would cover each other."""
    wanted = []
    for line in lines:
        known = [(at, value) for at, value in line.points if value is not None]
        if not known or line.label == "":
            continue
        at, value = known[-1]
        words = line.label or f"{_shortened(line.name)} {text(value)}"
        place = min(max(down(value), TOP), height - BOTTOM)
        wanted.append((place, x.share(at), words, line.style))
    if len(wanted) > MOST_LABELS:
        return []
    # From the top downwards, each below the one before; then up again from the bottom.
    wanted.sort()
    places = [each[0] for each in wanted]
    for n in range(1, len(places)):
        places[n] = max(places[n], places[n - 1] + LETTERS)
    limit = float(height - BOTTOM - 4)
    for n in reversed(range(len(places))):
        places[n] = limit = min(places[n], limit)
        limit -= LETTERS
    return [
        f"<text class='end {style}' x='{_percent(min(1.0, max(0.0, share)))}' dx='8' "
        f"y='{place:.1f}' dy='4'>{escape(words)}</text>"
        for place, (_, share, words, style) in zip(places, wanted, strict=True)
    ]


def _tick(text: str) -> str:
    """Without zeros that say nothing: 1.2M, 2.8, 60 MB, 5 min."""
    text = re.sub(r"(\.\d*?)0+(?=\D|$)", r"\1", text)
    return re.sub(r"\.(?=\D|$)| 0 (s|min|h)$", "", text)


def _shortened(name: str) -> str:
    return name if len(name) <= WIDE else f"{name[: WIDE - 1]}…"


def _path(points: Points, x: Axis, y: Axis, *, whole: bool = False) -> str:
    """Straight lines between neighbours; what is not known interrupts them, unless `whole`."""
    steps, pen = [], "M"
    for at, value in points:
        if value is None or not math.isfinite(value):
            pen = pen if whole else "M"
            continue
        steps.append(f"{pen}{1000 * x.share(at):.1f} {1000 - 1000 * y.share(value):.1f}")
        pen = "L"
    return "".join(steps)


def _percent(share: float) -> str:
    return f"{100 * share:.2f}%"


def ticks(axis: Axis, about: float, steps: Sequence[float] = ()) -> list[float]:
    """Round values between the ends of an axis, about so many; `steps` are those to choose from."""
    span = axis.high - axis.low
    if not math.isfinite(span) or span <= 0:
        return [axis.low]
    step = 10.0 ** math.floor(math.log10(span / about))
    step *= min((1, 2, 5, 10), key=lambda many: abs(span / (many * step) - about))
    if steps and steps[0] < span / about < steps[-1]:
        step = min(steps, key=lambda each: abs(span / each - about))
    first = math.ceil(axis.low / step - 1e-9)
    return [n * step for n in range(first, math.floor(axis.high / step + 1e-9) + 1)]


def reach(values: Sequence[float | None], *, least: float | None = None) -> Axis:
    """An axis that holds all values; from `least` on, where that is given."""
    known = [value for value in values if value is not None and math.isfinite(value)]
    if not known:
        return Axis(least or 0.0, (least or 0.0) + 1.0)
    low, high = min(known), max(known)
    low = low if least is None else min(least, low)
    return Axis(low, high if high > low else low + (abs(low) or 1.0) * 0.1)
