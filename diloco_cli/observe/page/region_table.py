"""The regions, a row each: what it does and why, how fast, how far behind, and what it said last.

Whoever is in trouble stands first where there are many; the rest of them is folded away.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from diloco_cli.observe.metrics import per_device
from diloco_cli.observe.page.figures import share_bar, table
from diloco_cli.observe.page.marks import mark
from diloco_cli.observe.page.sparkline import sparkline
from diloco_cli.observe.status import RegionStatus, Status
from diloco_cli.observe.units import amount, bytes_, loss, percent, seconds

FIGURES = (
    *("tokens/s", "training loss", "share", "behind", "link up / down", "exchange"),
    *("last merged", "step"),
)
"""What stands beside each region."""
MOST_SHORT = 250
MOST_WHOLE = 12
"""Rows with curves, if there are more regions than that."""
BAD = ("away", "failed", "diverging")

Event = tuple[float, str, str, str]
"""Wall time, kind, region, words."""


def region_table(
    status: Status,
    history: Mapping[str, Any],
    events: Sequence[Event],
    styles: Mapping[str, str],
) -> str:
    regions = list(status.regions)
    last: dict[str, Event] = {}
    for event in events:
        last.setdefault(event[2], event)
    if len(regions) <= MOST_WHOLE:
        rows = [_whole(status, region, history, last, styles[region.name]) for region in regions]
        return table(("region", "state, and why", *FIGURES), rows, "Regions")
    regions.sort(key=lambda region: (not _troubled(status, region), not region.alive, region.name))
    shown, rest = regions[:MOST_WHOLE], regions[MOST_WHOLE:]
    rows = [_whole(status, region, history, last, styles[region.name]) for region in shown]
    short = [_short(status, region) for region in rest[:MOST_SHORT]]
    alike = {region.state for region in rest}
    what = f"{len(rest)} more: {alike.pop()}" if len(alike) == 1 else f"{len(rest)} more regions"
    heads = ("region", "state, and why", "tokens/s", "training loss", "share", "behind")
    if len(rest) > MOST_SHORT:
        what += f", {MOST_SHORT} of them here; /v1/status has all"
    return (
        table(("region", "state, and why", *FIGURES), rows, "Regions")
        + f"<details id='more-regions'><summary>{escape(what)}</summary>"
        + table(heads, short, "More regions")
        + "</details>"
    )


def _troubled(status: Status, region: RegionStatus) -> bool:
    wrong = region.overclaim or region.quarantined or region.unbalanced
    return not status.ended and bool(region.state in BAD or wrong)


def _whole(
    status: Status,
    region: RegionStatus,
    history: Mapping[str, Any],
    last: Mapping[str, Event],
    style: str,
) -> str:
    curves = history["regions"].get(region.name, {})
    members = sum(each.member for each in status.regions)
    speed = f"<b>{amount(region.tokens_per_second)}</b>"
    learnt = f"<b>{loss(region.loss)}</b>"
    cells = (
        f"<span class='cell'>{speed}{sparkline(curves.get('tokens_per_second', ()), style)}</span>",
        f"<span class='cell'>{learnt}{sparkline(curves.get('loss', ()), style)}</span>",
        share_bar(region.share, style, 1 / members if members else None),
        _behind(region),
        _link(region),
        percent(region.blocked),
        seconds(region.last_merged_seconds),
        amount(region.step),
    )
    return _row(status, region, style, _said(status, region, last), cells, FIGURES)


def _short(status: Status, region: RegionStatus) -> str:
    """A row of few bytes: there may be hundreds."""
    cells = (
        amount(region.tokens_per_second),
        loss(region.loss),
        percent(region.share),
        _behind(region),
    )
    why = f" · {escape(region.why)}" if region.why not in ("", region.state) else ""
    row = "<tr class='bad'>" if _troubled(status, region) else "<tr>"
    said = f"{region.state}{why}"
    figures = "".join(f"<td>{cell}</td>" for cell in (said, *cells))
    return f"{row}<th scope='row'><bdi>{escape(region.name)}</bdi></th>{figures}</tr>"


def _row(
    status: Status,
    region: RegionStatus,
    style: str,
    said: str,
    cells: Sequence[str],
    labels: Sequence[str],
) -> str:
    bad = _troubled(status, region)
    figures = "".join(
        f"<td data-label='{label}'>{cell}</td>" for label, cell in zip(labels, cells, strict=True)
    )
    row = "<tr class='bad'>" if bad else "<tr>"
    return (
        f"{row}<th scope='row'>{mark(style)}"
        f"<bdi>{escape(region.name)}</bdi></th>"
        f"<td><b class='state'>{'▲ ' if bad else ''}{region.state}</b> "
        f"<small>{said}</small></td>{figures}</tr>"
    )


def _said(status: Status, region: RegionStatus, last: Mapping[str, Event]) -> str:
    """Why it is in this state, and what was last heard of it if it is gone."""
    listed = "" if region.listed or not region.member else "not listed"
    restarts = f"{region.restarts} restarts" if region.restarts else ""
    parts = [escape(each) for each in (region.why, per_device(region), restarts, listed) if each]
    event = last.get(region.name)
    if event and not region.alive and not status.ended:
        words = f": {event[3]}" if event[3] else ""
        parts.append(escape(f"last heard: {event[1]}{words}"))
    return " · ".join(parts)


def _behind(region: RegionStatus) -> str:
    if region.staleness is None:
        return "–"
    if region.staleness == 0:
        return "none"
    return f"{amount(region.staleness)} version{'s' * (region.staleness != 1)}"


def _link(region: RegionStatus) -> str:
    if region.link_up is None and region.link_down is None:
        return "–"
    return f"{bytes_(region.link_up)}/s / {bytes_(region.link_down)}/s"
