"""Lines over tokens or time, as SVG.

Places are percentages of the drawing, so that it fills whatever width it gets while its letters
keep their size. The lines themselves lie in a nested drawing that is stretched.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from html import escape

Points = Sequence[tuple[float, float | None]]

TOP, BOTTOM = 4.0, 88.0
"""Where the plot begins and ends, in percent of the height; below are the labels of the x-axis."""


@dataclass(frozen=True)
class Line:
    name: str
    points: Points
    style: str = ""
    """CSS classes: a region's colour, `thick`, `dash`."""
    dots: bool = False


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
) -> str:
    """Draws lines; `label` says in a sentence what one sees."""
    parts = [
        "<div class='lines'>"
        f"<svg class='chart' role='img' aria-label='{escape(label, quote=True)}' "
        f"width='100%' height='{height}'>"
    ]
    for tick in ticks(y, 4):
        at = _percent(_down(y, tick))
        parts.append(f"<line class='grid' x1='0' x2='100%' y1='{at}' y2='{at}'/>")
        parts.append(f"<text class='left' x='-8' y='{at}' dy='4'>{escape(y_text(tick))}</text>")
    for tick in ticks(x, 4):
        share = x.share(tick)
        anchor = "start" if share < 0.03 else "end" if share > 0.97 else "middle"
        at = _percent(100 * share)
        parts.append(f"<text x='{at}' y='98%' text-anchor='{anchor}'>{escape(x_text(tick))}</text>")
    parts.append(
        f"<svg class='plot' x='0' y='{TOP}%' width='100%' height='{BOTTOM - TOP}%' "
        "viewBox='0 0 1000 1000' preserveAspectRatio='none'>"
    )
    for line in lines:
        if path := _path(line.points, x, y):
            parts.append(f"<path class='line {line.style}' d='{path}'/>")
    parts.append("</svg>")
    for line in lines:
        if line.dots:
            parts += [
                f"<circle class='dot {line.style}' cx='{_percent(100 * x.share(at))}' "
                f"cy='{_percent(_down(y, value))}' r='2.5'/>"
                for at, value in line.points
                if value is not None and 0 <= y.share(value) <= 1
            ]
    parts.append("</svg></div>")
    return "".join(parts)


def _path(points: Points, x: Axis, y: Axis) -> str:
    """Straight lines between neighbours; what is not known interrupts them."""
    steps, pen = [], "M"
    for at, value in points:
        if value is None or not math.isfinite(value):
            pen = "M"
            continue
        steps.append(f"{pen}{1000 * x.share(at):.1f} {1000 - 1000 * y.share(value):.1f}")
        pen = "L"
    return "".join(steps)


def _down(y: Axis, value: float) -> float:
    return BOTTOM - (BOTTOM - TOP) * y.share(value)


def _percent(value: float) -> str:
    return f"{value:.2f}%"


def ticks(axis: Axis, about: int) -> list[float]:
    """Round values between the ends of an axis, about so many."""
    span = axis.high - axis.low
    if not math.isfinite(span) or span <= 0:
        return [axis.low]
    step = 10.0 ** math.floor(math.log10(span / about))
    step *= min((1, 2, 5, 10), key=lambda many: abs(span / (many * step) - about))
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
