"""The last rounds, one lane for each fragment, and the newest whole round in words.

A grey bar waits for answers from its call on, a hatched one is the grace window after the
quorum, a black one is the merge. A filled mark is an answer, a hollow one an adoption.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from diloco_cli.observe.units import amount, bytes_

LANE = 30
"""Height of a lane in pixels; of many fragments the lanes are lower."""
MANY = 8
TURNS = 4
MOST_MARKS = 8
"""Regions that have a mark of their own; of more, only how many answered is said."""


def round_chart(rounds: Sequence[Mapping[str, Any]], now: float, regions: Mapping[str, str]) -> str:
    """Draws the last turns; `regions` gives the CSS class of each."""
    fragments = sorted({each["fragment"] for each in rounds})
    if not fragments:
        return "<p class='quiet'>No fragment was called yet.</p>"
    begin = _window(rounds, len(fragments), now)
    lane = LANE if len(fragments) <= MANY else LANE // 2
    span = max(now - begin, 1e-3)
    height = lane * len(fragments) + 22

    def place(at: float) -> str:
        return f"{14 + 85 * min(1.0, max(0.0, (at - begin) / span)):.2f}%"

    def width(start: float, end: float) -> str:
        return f"{max(0.15, 85 * (min(end, now) - max(start, begin)) / span):.2f}%"

    parts = [
        "<svg class='chart rounds' role='img' aria-label='The last rounds of every fragment' "
        f"width='100%' height='{height}'><defs><pattern id='hatch' width='5' height='5' "
        "patternUnits='userSpaceOnUse' patternTransform='rotate(45)'>"
        "<line class='hatch' x1='0' y1='0' x2='0' y2='5'/></pattern></defs>"
    ]
    newest = {each["fragment"]: each["version"] + bool(each["published"]) for each in rounds}
    for row, fragment in enumerate(fragments):
        middle = row * lane + lane / 2
        parts.append(f"<text class='strong' x='0' y='{middle + 4:.0f}'>{fragment}</text>")
        parts.append(f"<text x='4%' y='{middle + 4:.0f}'>v{newest[fragment]}</text>")
        parts.append(f"<line class='grid' x1='14%' x2='99%' y1='{middle}' y2='{middle}'/>")
    marks = len(regions) <= MOST_MARKS
    for each in rounds:
        if (each["published"] or now) < begin:
            continue
        middle = fragments.index(each["fragment"]) * lane + lane / 2
        parts += _bars(each, middle, now, place, width)
        if marks:
            parts += _marks(each, middle, begin, place, regions)
    for share in (0.0, 0.5):
        at = begin + share * span
        parts.append(f"<text x='{place(at)}' y='{height - 4}'>−{_ago(now - at)}</text>")
    parts.append(f"<text x='99%' y='{height - 4}' text-anchor='end'>now</text></svg>")
    return "".join(parts)


def _window(rounds: Sequence[Mapping[str, Any]], fragments: int, now: float) -> float:
    """Where the last turns begin, at the pace of the last calls."""
    calls = sorted(each["called"] for each in rounds)[-(TURNS * fragments + 1) :]
    return min(calls[0], now - 1e-3)


def _bars(each: Mapping[str, Any], middle: float, now: float, place: Any, width: Any) -> list[str]:
    top, high = f"{middle - 6:.1f}", 12
    called, closed, published = each["called"], each["closed"], each["published"]
    answers = sorted(at for at in each["answered"].values() if at >= called)
    first = min(answers[0] if answers else now, closed or now)
    bars = [
        f"<rect class='gather' x='{place(called)}' y='{top}' height='{high}' "
        f"width='{width(called, first)}'/>"
    ]
    if answers:
        bars.append(
            f"<rect class='grace' x='{place(first)}' y='{top}' height='{high}' "
            f"width='{width(first, closed or now)}'/>"
        )
    if closed is not None:
        bars.append(
            f"<rect class='merge' x='{place(closed)}' y='{top}' height='{high}' "
            f"width='{width(closed, published or now)}'/>"
        )
    return bars


def _marks(
    each: Mapping[str, Any], middle: float, begin: float, place: Any, regions: Mapping[str, str]
) -> list[str]:
    marks, names = [], list(regions)
    apart = min(7.0, 20.0 / max(1, len(names)))
    for style, moments in (("dot", each["answered"]), ("hollow", each["adopted"])):
        for region, at in moments.items():
            if at >= begin and region in regions:
                down = middle + apart * (names.index(region) - (len(names) - 1) / 2)
                marks.append(
                    f"<circle class='{style} {regions[region]}' cx='{place(at)}' "
                    f"cy='{down:.1f}' r='3'/>"
                )
    return marks


def newest_round_in_words(rounds: Sequence[Mapping[str, Any]], regions: Mapping[str, str]) -> str:
    """Tells the newest round that is over, moment by moment; empty before there is one."""
    over = [each for each in rounds if each["published"] is not None]
    if not over:
        return ""
    each = max(over, key=lambda one: one["published"])
    called = each["called"]
    lines = [
        (called, "", f"The server calls fragment {each['fragment']}", f"version {each['version']}")
    ]
    for region, at in sorted(each["answered"].items(), key=lambda pair: pair[1]):
        late = "" if region in each["members"] else "; too late for this round"
        words = f"{amount(each['tokens'].get(region))} tokens of work{late}"
        lines.append((at, regions.get(region, ""), f"{region} answers", words))
    who = ", ".join(each["members"])
    lines.append((each["closed"] or called, "", f"Closed: {each['why']}", f"merges {who}"))
    made = f"Version {each['version'] + 1} published"
    lines.append((each["published"], "", made, f"{bytes_(each['bytes'])} to each region"))
    for region, at in sorted(each["adopted"].items(), key=lambda pair: pair[1]):
        lines.append((at, regions.get(region, ""), f"{region} adopts it", "and trains on"))
    items = "".join(
        f"<li><i class='mark {style}'></i><span>{escape(what)}<small>{escape(more)}</small></span>"
        f"<time>{_after(at - called)}</time></li>"
        for at, style, what, more in lines
    )
    number = f"Fragment {each['fragment']}, version {each['version']} → {each['version'] + 1}"
    return f"<h3>{number}</h3><ol class='story'>{items}</ol>"


def _after(seconds: float) -> str:
    if seconds == 0:
        return "call"
    sign = "+" if seconds > 0 else "−"
    size = abs(seconds)
    return f"{sign}{1000 * size:.0f} ms" if size < 1 else f"{sign}{size:.1f} s"


def _ago(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
