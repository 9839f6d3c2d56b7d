"""The last rounds: all of the last turns as a strip, the newest ones with a lane a fragment.

A grey bar waits for answers from its call on, a hatched one is the grace window after the
quorum, a black one is the merge. A filled mark is an answer, a hollow one an adoption, a cross a
region that was asked and is not in the round. A round without a region takes that region's colour.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from diloco_cli.observe.metrics import quantile
from diloco_cli.observe.page.marks import shape

Round = Mapping[str, Any]

STRIP_TURNS, LANE_TURNS, MANY = 16, 4, 8
"""Turns of all fragments that are drawn; of many fragments only one turn has lanes."""
STRIP, BAR = 30, 10
"""Heights in pixels."""
MOST_MARKS = 8
"""Regions that have a mark of their own; of more, only who was missing is said."""
LEFT = 13.0
"""Percent of the width that the names of the lanes take."""
MOMENTS = 40
"""Rounds that the sentence below the drawing is about."""


@dataclass(frozen=True)
class _Window:
    """A span of time, and where its moments lie in a drawing."""

    begin: float
    end: float

    def share(self, at: float) -> float:
        return min(1.0, max(0.0, (at - self.begin) / max(self.end - self.begin, 1e-6)))

    def place(self, at: float) -> str:
        return f"{LEFT + (99.5 - LEFT) * self.share(at):.2f}%"

    def width(self, start: float, end: float) -> str:
        inside = min(end, self.end) - max(start, self.begin)
        share = max(0.0, inside) / max(self.end - self.begin, 1e-6)
        return f"{max(0.12, (99.5 - LEFT) * share):.2f}%"


def round_chart(
    rounds: Sequence[Round],
    now: float,
    regions: Mapping[str, str],
    *,
    chosen: int | None = None,
    link: str = "?round=",
) -> str:
    """Draws the last turns; `regions` gives the CSS class of each, `chosen` is told beside it."""
    fragments = sorted({each["fragment"] for each in rounds})
    if not fragments:
        return "<p class='quiet'>No fragment was called yet.</p>"
    turns = LANE_TURNS if len(fragments) <= MANY else 1
    strip = _Window(_begin(rounds, STRIP_TURNS * len(fragments), now), now)
    lanes = _Window(_begin(rounds, turns * len(fragments), now), now)
    tracks = list(regions) if len(regions) <= MOST_MARKS else []
    apart = 8.0 if len(tracks) <= 4 else 5.0
    lane = BAR + 12 + apart * len(tracks)
    top = STRIP + 16
    height = top + lane * len(fragments) + 20
    parts = [
        "<svg class='chart rounds' role='group' aria-label='The last rounds of every fragment' "
        f"width='100%' height='{height:.0f}'>",
        f"<text class='long' x='0' y='{STRIP / 2 + 2:.0f}'>last {span(now - strip.begin)}</text>",
    ]
    parts.append(_strip(rounds, fragments, strip, regions))
    parts.append(
        f"<rect class='window' x='{strip.place(lanes.begin)}' y='-3' height='{STRIP + 6}' "
        f"width='{strip.width(lanes.begin, now)}'/>"
    )
    parts += [
        f"<line class='dashes' x1='{strip.place(lanes.begin)}' y1='{STRIP + 3}' "
        f"x2='{LEFT}%' y2='{top}'/>",
        f"<line class='dashes' x1='99.5%' y1='{STRIP + 3}' x2='99.5%' y2='{top}'/>",
    ]
    newest = {each["fragment"]: each["version"] + bool(each["published"]) for each in rounds}
    for row, fragment in enumerate(fragments):
        y = top + row * lane
        name = f"<tspan class='long'>Fragment </tspan>{fragment}"
        parts.append(f"<text class='strong' x='0' y='{y + 13:.0f}'>{name}</text>")
        if lane > 24:
            made = f"<tspan class='long'>version </tspan>{newest[fragment]}"
            parts.append(f"<text x='0' y='{y + 27:.0f}'>{made}</text>")
        parts += [
            f"<line class='track {regions[name]}' x1='{LEFT}%' x2='99.5%' y1='{at}' y2='{at}'/>"
            for name, at in _tracks(tracks, y, apart).items()
        ]
    for each in rounds:
        if (each["published"] or now) < lanes.begin or each["called"] < lanes.begin:
            continue
        y = top + fragments.index(each["fragment"]) * lane
        drawn = _bars(each, y + 4, lanes) + _marks(
            each, y + 4, _tracks(tracks, y, apart), lanes, regions
        )
        here = " on" if each["number"] == chosen else ""
        name = f"Fragment {each['fragment']}, version {each['version']}"
        parts.append(
            f"<a class='round{here}' href='{escape(link, quote=True)}{each['number']}' "
            f"aria-label='{name}'>{drawn}</a>"
        )
    for share in (0.0, 0.25, 0.5, 0.75):
        at = lanes.begin + share * (now - lanes.begin)
        anchor = "start" if share == 0 else "middle"
        parts.append(
            f"<text x='{lanes.place(at)}' y='{height - 4:.0f}' text-anchor='{anchor}'>"
            f"−{span(now - at)}</text>"
        )
    parts.append(f"<text x='99.5%' y='{height - 4:.0f}' text-anchor='end'>now</text>")
    parts.append(f"<line class='now' x1='99.5%' x2='99.5%' y1='{top}' y2='{height - 18:.0f}'/>")
    return "".join([*parts, "</svg>"])


def _strip(
    rounds: Sequence[Round], fragments: Sequence[int], window: _Window, regions: Mapping[str, str]
) -> str:
    """A dash for each round, a row for each fragment; one path for each colour."""
    high = STRIP / len(fragments)
    paths: dict[str, str] = {}
    for each in rounds:
        end = window.end if each["published"] is None else each["published"]
        if end < window.begin:
            continue
        lost = each["missing"]
        style = f"lost {regions.get(lost[0], '')}" if lost else "passed"
        start = window.share(each["called"])
        row = fragments.index(each["fragment"])
        paths[style] = (
            paths.get(style, "") + f"M{1000 * start:.0f} {high * (row + 0.5):.1f}"
            f"h{max(1.0, 1000 * (window.share(end) - start)):.0f}"
        )
    dashes = "".join(
        f"<path class='{style}' stroke-width='{max(1.0, high - 1):.1f}' d='{path}'/>"
        for style, path in paths.items()
    )
    return (
        f"<svg class='strip' x='{LEFT}%' y='0' width='{99.5 - LEFT}%' height='{STRIP}' "
        f"viewBox='0 0 1000 {STRIP}' preserveAspectRatio='none'>{dashes}</svg>"
    )


def _tracks(names: Sequence[str], y: float, apart: float) -> dict[str, float]:
    return {name: round(y + BAR + 10 + apart * place, 1) for place, name in enumerate(names)}


def _begin(rounds: Sequence[Round], many: int, now: float) -> float:
    """Where the last so many calls begin."""
    calls = sorted(each["called"] for each in rounds)[-many:]
    return min(calls[0], now - 1e-3)


def _bars(each: Round, top: float, window: _Window) -> str:
    called, closed, published = each["called"], each["closed"], each["published"]
    now = window.end
    met = each["met"]
    met = min(now if met is None else met, closed or now)
    start = window.place(called)
    bars = [
        f"<rect class='hit' x='{start}' y='{top - 3:.0f}' height='{BAR + 6}' "
        f"width='{window.width(called, published or now)}'/>"
        f"<rect class='gather' x='{start}' y='{top:.0f}' height='{BAR}' "
        f"width='{window.width(called, met)}'/>"
    ]
    if met < (closed or now):
        bars.append(
            f"<rect class='grace' x='{window.place(met)}' y='{top:.0f}' height='{BAR}' "
            f"width='{window.width(met, closed or now)}'/>"
        )
    if closed is not None:
        bars.append(
            f"<rect class='merge' x='{window.place(closed)}' y='{top:.0f}' height='{BAR}' "
            f"width='{window.width(closed, published or now)}'/>"
        )
    if published is not None:
        bars.append(
            f"<text class='version' x='{window.place(published)}' dx='4' y='{top + 9:.0f}'>"
            f"v{each['version'] + 1}</text>"
        )
    return "".join(bars)


def _marks(
    each: Round,
    top: float,
    tracks: Mapping[str, float],
    window: _Window,
    regions: Mapping[str, str],
) -> str:
    marks = []
    for name, y in tracks.items():
        style, answer = regions[name], each["answered"].get(name)
        if answer is not None and name in each["members"]:
            called, at = window.place(each["called"]), window.place(max(answer, each["called"]))
            marks.append(
                f"<line class='answer {style}' x1='{called}' x2='{at}' y1='{y}' y2='{y}'/>"
                f"<use href='{shape(style)}' class='dot {style}' x='{at}' y='{y}'/>"
            )
        elif name in each["missing"]:
            at = window.place(each["closed"])
            marks.append(f"<use href='#missed' class='missed {style}' x='{at}' y='{y}'/>")
        adopted, published = each["adopted"].get(name), each["published"]
        if adopted is not None and published is not None:
            at = window.place(adopted)
            marks.append(
                f"<line class='down {style}' x1='{window.place(published)}' x2='{at}' "
                f"y1='{top + BAR:.0f}' y2='{y}'/>"
                f"<use href='{shape(style)}' class='hollow {style}' x='{at}' y='{y}'/>"
            )
    return "".join(marks)


def rounds_in_words(rounds: Sequence[Round]) -> str:
    """How the last rounds went, in a sentence; empty before there are two."""
    over = [each for each in rounds if each["published"] is not None][-MOMENTS:]
    if len(over) < 2:
        return ""
    calls = sorted(each["called"] for each in over)
    pace = (calls[-1] - calls[0]) / (len(calls) - 1)
    took = quantile([each["published"] - each["called"] for each in over], 0.5)
    whole = sum(not each["missing_count"] for each in over)
    adopting = [
        at - each["published"]
        for each in over
        for at in each["adopted"].values()
        if at >= each["published"]
    ]
    said = f"A round every {span(pace)}; {span(took)} from the call to the new version"
    if adopting:
        said += f", {span(quantile(adopting, 0.5))} more until regions train on it"
    many = f"all of the last {len(over)}" if whole == len(over) else f"{whole} of {len(over)}"
    return f"{said}. Every region that was asked is in {many}."


def span(seconds: float | None) -> str:
    """A short time, to the millisecond."""
    if seconds is None:
        return "–"
    if seconds < 1:
        return f"{1000 * max(0.0, seconds):.0f} ms"
    return f"{seconds:.1f} s" if seconds < 100 else f"{seconds / 60:.0f} min"
