"""The page, part by part: is it well, what is it doing, how did it get here.

    alarms → sentence and progress → loss | speed, goodput → rounds → regions
           → traffic | tokens | goodputs → sample → amendments → events

A figure stands beside the chart that explains it. Red is for alarms alone. Text from regions is
escaped, and no part needs the script: it reads values off the charts, and swaps parts for newer
ones.
"""

from __future__ import annotations

import base64
import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from typing import Any

from diloco_cli.observe.metrics import average_in_words, seconds_left, standing_in_words, warnings
from diloco_cli.observe.page.curves import (
    MOST_LINES,
    goodput_chart,
    known_points,
    loss_chart,
    speed_chart,
    traffic_chart,
)
from diloco_cli.observe.page.event_list import Event, clock, event_list
from diloco_cli.observe.page.figures import (
    against_gradients,
    bits_bars,
    fates,
    figure_list,
    heading,
    sample_list,
    section,
)
from diloco_cli.observe.page.marks import DEFINITIONS, mark, styles_of
from diloco_cli.observe.page.region_table import region_table
from diloco_cli.observe.page.round_chart import round_chart, rounds_in_words
from diloco_cli.observe.page.round_story import magnified, round_told, story
from diloco_cli.observe.status import Status
from diloco_cli.observe.units import amount, bytes_, loss, percent, seconds

RECENT_ROWS = 60
"""Rows from whose pace the time to the end is estimated."""
DAY = 86_400.0

EMPTY: Mapping[str, Any] = {
    "run": {"at": []},
    "regions": {},
    "evaluations": [],
    "ema": [],
    "samples": [],
    "rounds": [],
    "now": 0.0,
}


@dataclass(frozen=True)
class View:
    """What somebody looks at: what the address of the page says after the `?`."""

    by_time: bool = False
    """Losses over time instead of merged tokens."""
    round: int | None = None
    """The round that is told; the newest where none is chosen."""

    def link(self, **changes: str) -> str:
        """The address of another view."""
        kept = {"x": "time" if self.by_time else "", "round": str(self.round or "")}
        words = {key: value for key, value in {**kept, **changes}.items() if value}
        return "?" + "&".join(f"{key}={value}" for key, value in words.items())


NEWEST = View()


def _asset(name: str) -> str:
    return files("diloco_cli.observe.page").joinpath(name).read_text(encoding="utf-8")


def _source(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


STYLE, _SCRIPT = _asset("style.css"), _asset("live.js")

POLICY = (
    f"default-src 'none'; style-src {_source(STYLE)}; script-src {_source(_SCRIPT)}; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
"""The page's content security policy: its own style, its own script, its own server."""


def page(
    status: Status,
    history: Mapping[str, Any] = EMPTY,
    events: Sequence[Event] = (),
    *,
    view: View = NEWEST,
    wall: float | None = None,
) -> str:
    """Renders a run as one self-contained HTML page.

    `history` is the document of `GET /v1/history`, `events` the newest ones as wall time, kind,
    region and words; `wall` is the time of day.
    """
    alarms = warnings(status)
    left = _time_left(status, history)
    styles = styles_of([region.name for region in status.regions])
    wall = time.time() if wall is None else wall
    who = standing_in_words(status) or "A region weighs what it trained; the tick is an even share."
    regions = heading("Regions", "", who) + region_table(status, history, events, styles)
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>{escape(_title(status, left, alarms))}</title><style>{STYLE}</style></head><body>"
        f"{DEFINITIONS}<div class='page'>{_top(status, wall)}<p id='link' role='status'></p>"
        f"<main id='live' data-state='{escape(status.state)}'>"
        f"<div id='alarms'>{_alarms(alarms)}</div>"
        f"<div id='sentence'>{_sentence(status, left, wall)}</div>"
        f"<div class='two'>{section('losses', _loss(status, history, view, styles))}"
        f"{section('speeds', _speed(status, history, styles))}</div>"
        f"{section('rounds', _rounds(status, history, view, styles))}"
        f"{section('regions', regions)}"
        f"<div class='three'>{section('traffic', _traffic(status, history))}"
        f"{section('tokens', _tokens(status))}{section('goodputs', _goodputs(status))}</div>"
        f"{section('samples', sample_list(history['samples']))}"
        f"{section('amendments', _amendments(status))}"
        f"{section('events', event_list(events, styles))}</main>{_bottom()}</div>"
        f"<script>{_SCRIPT}</script></body></html>\n"
    )


def _title(status: Status, left: float | None, alarms: Sequence[str]) -> str:
    share = percent(status.tokens.applied / max(1, status.tokens.budget))
    ends = f" · {seconds(left)} left" if left is not None else ""
    return f"{'▲ ' if alarms else ''}{share}{ends} · {status.name}: {status.state}"


def _top(status: Status, wall: float) -> str:
    links = {
        "/v1/status": "Status",
        "/v1/history": "History",
        "/metrics": "Metrics",
        "/openapi.json": "API",
        "/v1/weights": "Weights",
    }
    listed = "".join(f"<a href='{url}'>{text}</a>" for url, text in links.items())
    began = f", began with {escape(status.start.source)}" if status.start else ""
    return (
        f"<header><b><bdi>{escape(status.name)}</bdi></b><span>run {escape(status.run)}{began}"
        f"</span><span id='as-of'>as of {clock(wall)} UTC</span>"
        f"<nav aria-label='Documents'>{listed}</nav></header>"
    )


def _bottom() -> str:
    return (
        "<footer><span>All times UTC</span><span class='script'>Point at a chart to read it, or "
        "reach it with Tab and use ← and →.</span><noscript>Without script this page shows the "
        "moment it was loaded; load it again for a newer one.</noscript></footer>"
    )


def _alarms(alarms: Sequence[str]) -> str:
    lines = "".join(f"<p>▲ {escape(alarm)}</p>" for alarm in alarms)
    return f"<div class='alarm' role='alert'>{lines}</div>" if alarms else ""


def _time_left(status: Status, history: Mapping[str, Any]) -> float | None:
    known = known_points(history, "applied")
    return None if status.ended else seconds_left(known[-RECENT_ROWS:], status.tokens.budget)


def _sentence(status: Status, left: float | None, wall: float) -> str:
    tokens = status.tokens
    of = f"{amount(tokens.applied)} of {amount(tokens.budget)} tokens"
    members = [region for region in status.regions if region.member]
    active = sum(region.contributing and region.state != "diverging" for region in members)
    rest = f"{active} of {len(members)} regions contributing" if members else "no region is here"
    if status.ended:
        rest = f"held-out loss {loss(status.loss.heldout)}"
    ends = f", {seconds(left)} left" if left is not None else ""
    why = f" ({escape(status.why)})" if status.why else ""
    done = 100 * min(1.0, max(0.0, tokens.applied / max(1, tokens.budget)))
    held = min(100 - done, 100 * max(0.0, tokens.pending) / max(1, tokens.budget))
    fragments = len(status.fragments) or len(status.clock)
    facts = [
        (percent(done / 100), "merged", ""),
        (seconds(status.seconds), "of running time", ""),
        (_ends_at(wall, left), "", "ends about ") if left is not None else None,
        (amount(status.outer_steps), "outer steps", ""),
        (amount(status.parameters), f"parameters in {fragments} fragments", ""),
        (str(status.quorum), f"of {len(members)} regions make a quorum", "")
        if status.quorum and members
        else None,
    ]
    listed = "".join(
        f"<span>{before}<b>{value}</b> {what}</span>"
        for value, what, before in filter(None, facts)
        if value != "–"
    )
    return (
        f"<h1>{escape(status.state.capitalize())}: {of}{ends}; "
        f"<span class='quiet'>{rest}{why}</span></h1>"
        f"<svg class='bar' role='img' aria-label='{of}' width='100%' height='12'>"
        "<rect class='ground' width='100%' height='12'/>"
        f"<rect class='merge' width='{done:.2f}%' height='12'/>"
        f"<rect class='grace' x='{done:.2f}%' width='{held:.2f}%' height='12'/></svg>"
        f"<p class='facts'>{listed}</p>"
    )


def _ends_at(wall: float, left: float) -> str:
    shown = clock(wall + left)
    return shown.rsplit(" ", 1)[-1] if left < DAY else shown.rsplit(":", 1)[0]


def _loss(status: Status, history: Mapping[str, Any], view: View, styles: Mapping[str, str]) -> str:
    here = " aria-current=true"
    switch = (
        "<nav class='switch' aria-label='Horizontal axis'>"
        f"<a href='{escape(view.link(x='tokens'))}'{'' if view.by_time else here}>Merged tokens</a>"
        f"<a href='{escape(view.link(x='time'))}'{here if view.by_time else ''}>Time</a></nav>"
    )
    at = status.loss.heldout_at
    measured = f"at outer step {amount(at)}{_fall(history)}; " if at is not None else ""
    drawing = loss_chart(
        history,
        styles,
        end=history["now"] if view.by_time else status.tokens.budget,
        label=f"Held-out loss, now {loss(status.loss.heldout)}, and training loss of each region",
        by_time=view.by_time,
        rule="" if view.by_time else "budget",
    )
    average = f"{words}; " if (words := average_in_words(status.loss)) else ""
    more = f"{measured}{average}training {loss(status.loss.train)}"
    many = len(history["regions"]) > MOST_LINES
    band = "The line is the median of the regions, the band holds eight of ten. " if many else ""
    dashed = "Dashed: the average of the published weights. " if history["ema"] else ""
    said = f"Nats per token, log scale. {band}{dashed}{_legend(history, styles)}"
    return (
        f"{heading('Held-out loss', loss(status.loss.heldout), more, switch)}{drawing}"
        f"<p class='quiet small read'>{said}</p>"
    )


def _fall(history: Mapping[str, Any]) -> str:
    points = history["evaluations"]
    if len(points) < 2:
        return ""
    change = points[-1][2] - points[-2][2]
    return f" ({'−' if change < 0 else '+'}{abs(change):.3f})"


def _legend(history: Mapping[str, Any], styles: Mapping[str, str]) -> str:
    if len(history["regions"]) > MOST_LINES:
        return ""
    listed = "".join(
        f"<span class='key'>{mark(styles[name])}<bdi>{escape(name)}</bdi></span>"
        for name in history["regions"]
        if name in styles
    )
    return f"<span class='key'>{mark('')}held-out</span>{listed}"


def _speed(status: Status, history: Mapping[str, Any], styles: Mapping[str, str]) -> str:
    total = sum(region.tokens_per_second or 0.0 for region in status.regions)
    speed = speed_chart(history, styles, label=f"Tokens per second, together {amount(total)}")
    share = percent(status.goodputs.time)
    useful = goodput_chart(history, label=f"Time that went into useful steps, now {share}")
    return (
        f"{heading('Speed', amount(total), 'tokens/s, all regions')}{speed}"
        f"{heading('Goodput', share, 'of the time went into useful steps')}{useful}"
        "<p class='quiet small read'></p>"
    )


def _rounds(
    status: Status, history: Mapping[str, Any], view: View, styles: Mapping[str, str]
) -> str:
    rounds, now = history["rounds"], history["now"]
    about = (
        "Regions never stop training. The model travels in fragments, one round each: called, "
        "answered, merged, published, adopted."
    )
    told = round_told(rounds, view.round)
    link = view.link(round="")
    drawing = round_chart(
        rounds,
        now,
        styles,
        chosen=told["number"] if told else None,
        link=f"{link}{'' if link == '?' else '&'}round=",
    )
    words, closer = "", ""
    if told:
        back = f"<p class='small'><a href='{escape(link)}'>Follow the newest round</a></p>"
        words = story(told, styles) + (back if view.round else "")
        closer = magnified(told, styles, now)
    key = (
        "<p class='quiet small'>Grey: waits for answers. Hatched: grace window. Black: merge. "
        "Filled mark: an answer; hollow: an adoption; ×: not in this round. "
        f"{rounds_in_words(rounds)}</p>"
    )
    return (
        f"{heading('Rounds', '', about)}<div class='told-beside'><div>{drawing}{closer}{key}</div>"
        f"<div class='told'>{words}</div></div>"
    )


def _traffic(status: Status, history: Mapping[str, Any]) -> str:
    wire = status.wire
    said = f"{bytes_(wire.bytes_up)} up, {bytes_(wire.bytes_down)} down"
    steps = sum(region.step or 0 for region in status.regions)
    moved = wire.bytes_up + wire.bytes_down
    return (
        f"{heading('Traffic', bytes_(moved), said)}{traffic_chart(history, label=said)}"
        f"{bits_bars(wire.bits_per_parameter_up, wire.bits_per_parameter_down)}"
        f"{against_gradients(moved, steps, status.parameters)}<p class='quiet small read'></p>"
    )


def _tokens(status: Status) -> str:
    kept = f"trained; {percent(status.goodput)} of it kept"
    return f"{heading('Tokens', amount(status.tokens.trained), kept)}{fates(status.tokens)}"


def _goodputs(status: Status) -> str:
    goodputs = status.goodputs
    figures = (
        ("time", percent(goodputs.time), "of the regions' time went into steps that count"),
        ("tokens", percent(goodputs.tokens), "of what a run without faults would have merged"),
        ("participation", percent(goodputs.participation), "of the regions in a round, on average"),
    )
    return f"{heading('Three goodputs')}{figure_list(figures)}"


def _amendments(status: Status) -> str:
    if not status.amendments:
        return ""
    rows = []
    for each in reversed(status.amendments):
        keys = ", ".join(f"{key} = {value}" for key, value in each.set.items())
        more = [f"add {region.get('name')}" for region in each.add]
        more += [f"remove {name}" for name in each.remove]
        words = "; ".join(filter(None, (keys, *more, each.why)))
        rows.append(
            f"<li><time>{clock(each.time)}</time><span>{each.number}</span>"
            f"<span class='who'>{escape(each.by)}</span><span>{escape(words)}</span></li>"
        )
    return f"{heading('Amendments')}<ul class='events'>{''.join(rows)}</ul>"
