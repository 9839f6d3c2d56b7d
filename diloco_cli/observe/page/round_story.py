"""One round under the magnifying glass: drawn with words on it, and told moment by moment."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from html import escape

from diloco_cli.observe.page.marks import mark, shape
from diloco_cli.observe.page.round_chart import Round, span
from diloco_cli.observe.units import amount, bytes_, percent

BAR = 20
LINE = 30
LEFT, RIGHT = 13.0, 97.0
"""Percent of the width between which the moments lie."""
Place = Callable[[float], str]
"""Where a moment lies, in percent of the drawing."""
MOST_LINES = 8
"""Regions that are drawn and told one by one."""


def round_told(rounds: Sequence[Round], chosen: int | None) -> Round | None:
    """The round with this number, or the newest that is over."""
    for each in rounds:
        if each["number"] == chosen:
            return each
    over = [each for each in rounds if each["published"] is not None]
    # One whose version some region trains on shows the whole way.
    whole = [each for each in over[-8:] if each["adopted"]]
    return max(whole or over, key=lambda one: one["published"], default=None)


def magnified(each: Round, regions: Mapping[str, str], now: float) -> str:
    """Draws a round from its call until the last region has adopted its version."""
    called, closed, published = each["called"], each["closed"], each["published"]
    moments = [*each["answered"].values(), *each["adopted"].values(), closed, published]
    last = max([called + 1e-3, *(at for at in moments if at is not None)])
    wide = 1.08 * ((last if published is not None else now) - called)

    def share(at: float) -> float:
        return min(1.0, max(0.0, (at - called) / max(wide, 1e-6)))

    def place(at: float) -> str:
        return f"{LEFT + (RIGHT - LEFT) * share(at):.2f}%"

    def width(start: float, end: float) -> str:
        return f"{max(0.2, (RIGHT - LEFT) * (share(end) - share(start))):.2f}%"

    asked = [name for name in regions if name in each["asked"] or name in each["answered"]]
    shown = asked if len(asked) <= MOST_LINES else []
    top, height = 60, 60 + BAR + LINE * len(shown) + 34
    stop = closed if closed is not None else now
    met = each["met"]
    met = stop if met is None else min(met, stop)
    parts = [
        "<svg class='chart magnified' role='img' width='100%' "
        f"height='{height}' aria-label='{escape(_title(each), quote=True)}'>"
        f"<rect class='soft' x='{LEFT - 1.5}%' y='0' width='{100 - LEFT + 1.5}%' height='100%'/>"
        f"<text class='strong' x='0' y='{top + 15}'>Server</text>"
        f"<rect class='gather' x='{place(called)}' y='{top}' width='{width(called, met)}' "
        f"height='{BAR}'/>"
    ]
    words = [(called, "calls it"), (met, "quorum met")]
    if met < stop:
        parts.append(
            f"<rect class='grace' x='{place(met)}' y='{top}' width='{width(met, stop)}' "
            f"height='{BAR}'/>"
        )
        words[-1] = (met, f"quorum met, grace {span(stop - met)}")
    if closed is not None:
        parts.append(
            f"<rect class='merge' x='{place(closed)}' y='{top}' height='{BAR}' "
            f"width='{width(closed, published or now)}'/>"
        )
        without = f"merges without {_lost(each)}"
        words.append((closed, without if each["missing"] else "all in: merges"))
    if published is not None:
        words.append((published, f"publishes version {each['version'] + 1}"))
    parts += [
        f"<line class='tie' x1='{place(at)}' x2='{place(at)}' y1='{4 + 13 * row}' y2='{top}'/>"
        f"<text x='{place(at)}' dx='{-4 if share(at) > 0.7 else 4}' y='{13 + 13 * row}' "
        f"text-anchor='{'end' if share(at) > 0.7 else 'start'}'>{escape(text)}</text>"
        for row, (at, text) in enumerate(words)
    ]
    for row, name in enumerate(shown):
        y = top + BAR + LINE * row + 17
        parts.append(_row(each, name, regions[name], y, top + BAR, place, share))
    for tick in range(5):
        at = called + wide * tick / 4
        label = "call" if tick == 0 else _after(at - called)
        anchor = "start" if tick == 0 else "end" if tick == 4 else "middle"
        parts.append(
            f"<text x='{place(at)}' y='{height - 8}' text-anchor='{anchor}'>{label}</text>"
        )
    return "".join([*parts, "</svg>"])


def _row(
    each: Round,
    name: str,
    style: str,
    y: int,
    bar: int,
    place: Place,
    share: Callable[[float], float],
) -> str:
    answer, adopted = each["answered"].get(name), each["adopted"].get(name)
    short = name if len(name) <= 12 else f"{name[:11]}…"
    parts = [
        f"<use href='{shape(style)}' class='dot {style}' x='6' y='{y}'/>"
        f"<text class='strong' x='16' y='{y + 4}'>{escape(short)}</text>"
        f"<line class='track {style}' x1='{LEFT}%' x2='{RIGHT}%' y1='{y}' y2='{y}'/>"
    ]
    if answer is not None and name in each["members"]:
        at = max(answer, each["called"])
        parts.append(
            f"<line class='answer {style}' x1='{place(each['called'])}' x2='{place(at)}' "
            f"y1='{y}' y2='{y}'/>"
            f"<line class='down {style}' x1='{place(at)}' x2='{place(at)}' y1='{bar}' y2='{y}'/>"
            f"<use href='{shape(style)}' class='dot {style}' x='{place(at)}' y='{y}'/>"
            f"<text x='{place(each['called'])}' y='{y + 13}'>answers: {_work(each, name)}</text>"
        )
    elif name in each["missing"]:
        parts.append(
            f"<use href='#missed' class='missed {style}' x='{place(each['closed'])}' y='{y}'/>"
            f"<text x='{place(each['called'])}' y='{y + 13}'>did not answer in time</text>"
        )
    if adopted is not None and each["published"] is not None:
        end = share(adopted) > 0.75
        parts.append(
            f"<line class='down {style}' x1='{place(each['published'])}' x2='{place(adopted)}' "
            f"y1='{bar}' y2='{y}'/>"
            f"<use href='{shape(style)}' class='hollow {style}' x='{place(adopted)}' y='{y}'/>"
            f"<text x='{place(adopted)}' dx='{-9 if end else 9}' y='{y + 13}' "
            f"text-anchor='{'end' if end else 'start'}'>adopts, trains on</text>"
        )
    return "".join(parts)


def _lost(each: Round) -> str:
    more = each["missing_count"] - 2
    return ", ".join(each["missing"][:2]) + (f" and {more} more" if more > 0 else "")


def _work(each: Round, name: str) -> str:
    size = each["sizes"].get(name)
    sent = f" in {bytes_(size)}" if size else ""
    return f"{amount(each['tokens'].get(name))} tokens{sent}"


def _title(each: Round) -> str:
    return f"Fragment {each['fragment']}, version {each['version']} → {each['version'] + 1}"


def story(each: Round, regions: Mapping[str, str]) -> str:
    """Tells a round moment by moment."""
    called, closed = each["called"], each["closed"]
    lines = [
        (
            called,
            _swatch("gather"),
            f"The server calls fragment {each['fragment']}",
            f"version {each['version']} is in force",
        )
    ]
    answers = sorted(each["answered"].items(), key=lambda pair: pair[1])
    told = answers if each["asked_count"] <= MOST_LINES else answers[:3]
    for name, at in told:
        early = " (before the call)" if at < called else ""
        words = f"{_work(each, name)} of work{early}"
        lines.append((max(at, called), mark(regions.get(name, "")), f"{name} answers", words))
    met = each["met"]
    if met is not None and closed is not None and met < closed:
        words = f"the round stays open for {span(closed - met)} more"
        lines.append((met, _swatch("grace"), "Quorum met; grace window", words))
    for name in each["missing"][:MOST_LINES]:
        words = "its work waits for the next round of this fragment"
        lines.append((closed or called, mark(regions.get(name, "")), f"{name} is not in it", words))
    if closed is not None:
        lines.append((closed, _swatch("merge"), f"Merged: {each['why']}", _shares(each)))
    if each["published"] is not None:
        made = f"Version {each['version'] + 1} published"
        words = f"{bytes_(each['bytes'])} to each region"
        lines.append((each["published"], _swatch("merge"), made, words))
    adopted = sorted(each["adopted"].items(), key=lambda pair: pair[1])
    for name, at in adopted if len(adopted) <= MOST_LINES else adopted[:3]:
        said = (mark(regions.get(name, "")), f"{name} adopts it", "by its next heartbeat")
        lines.append((at, *said))
    lines.sort(key=lambda line: line[0])
    items = "".join(
        f"<li>{glyph}<span>{escape(what)}<small>{escape(more)}</small></span>"
        f"<time>{_after(at - called)}</time></li>"
        for at, glyph, what, more in lines
    )
    return f"<h3>{_title(each)}</h3><ol class='story'>{items}</ol>"


def _shares(each: Round) -> str:
    members, weights = each["members"], each["weights"]
    together = sum(weights)
    if each["member_count"] > MOST_LINES:
        return f"{each['member_count']} of {each['asked_count']} regions"
    if len(weights) != len(members) or together <= 0:
        return ", ".join(members)
    pairs = zip(members, weights, strict=True)
    return ", ".join(f"{name} {percent(weight / together)}" for name, weight in pairs)


def _swatch(style: str) -> str:
    return (
        "<svg class='mark' aria-hidden='true' width='15' height='11'>"
        f"<rect class='{style}' width='15' height='11'/></svg>"
    )


def _after(seconds: float) -> str:
    if abs(seconds) < 5e-4:
        return "call"
    return f"{'+' if seconds > 0 else '−'}{span(abs(seconds))}"
