"""The page, part by part: is it well, what is it doing, how did it get here.

    alarms → sentence and progress → loss | speed, goodput → rounds → regions
           → traffic | tokens | amendments → events

A figure stands beside the chart that explains it. A region has one colour on every chart and in
every row; red is for alarms alone. Text from regions is escaped, and no part needs the script.
"""

from __future__ import annotations

import base64
import hashlib
import time
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import Any

from diloco_cli.observe.metrics import (
    per_device,
    seconds_left,
    standing_in_words,
    warnings,
)
from diloco_cli.observe.page.curves import (
    MOST_LINES,
    goodput_chart,
    known_points,
    loss_chart,
    speed_chart,
    traffic_chart,
)
from diloco_cli.observe.page.round_chart import newest_round_in_words, round_chart
from diloco_cli.observe.page.sparkline import sparkline
from diloco_cli.observe.status import RegionStatus, Status
from diloco_cli.observe.units import UNKNOWN, amount, bits, bytes_, loss, percent, seconds

COLOURS = 8
FULL_BITS = 32.0
"""Of a parameter that nobody compresses."""
RECENT_ROWS = 60
"""Rows from whose pace the time to the end is estimated."""
FIGURES = (*("tokens/s", "training loss", "share", "behind", "exchange", "last merged", "step"),)
"""What stands beside each region."""

EMPTY: Mapping[str, Any] = {
    "run": {"at": []},
    "regions": {},
    "evaluations": [],
    "rounds": [],
    "now": 0.0,
}


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
    events: Sequence[tuple[float, str, str, str]] = (),
    *,
    by_time: bool = False,
) -> str:
    """Renders a run as one self-contained HTML page.

    `history` is the document of `GET /v1/history`, `events` the newest ones as wall time, kind,
    region and words; `by_time` draws the losses over time instead of merged tokens.
    """
    alarms = warnings(status)
    left = _time_left(status, history)
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>{escape(_title(status, left, alarms))}</title><style>{STYLE}</style></head><body>"
        f"<div class='page'>{_top(status)}<p id='link' role='status'></p>"
        f"<main id='live' data-state='{escape(status.state)}'>"
        f"{_alarms(alarms)}{_sentence(status, left)}"
        f"<div class='two'>{_loss(status, history, by_time)}{_speed(status, history)}</div>"
        f"{_rounds(status, history)}{_regions(status, history)}"
        f"<div class='three'>{_traffic(status, history)}{_tokens(status)}{_goodputs(status)}</div>"
        f"{_amendments(status)}{_events(events)}</main></div>"
        f"<script>{_SCRIPT}</script></body></html>\n"
    )


def _title(status: Status, left: float | None, alarms: Sequence[str]) -> str:
    share = percent(status.tokens.applied / max(1, status.tokens.budget))
    ends = f" · {seconds(left)} left" if left is not None else ""
    return f"{'▲ ' if alarms else ''}{share}{ends} · {status.name}: {status.state}"


def _top(status: Status) -> str:
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
        f"<header><b>{escape(status.name)}</b><span>run {escape(status.run)}{began}</span>"
        f"<nav aria-label='Documents'>{listed}</nav></header>"
    )


def _alarms(alarms: Sequence[str]) -> str:
    lines = "".join(f"<p>{escape(alarm)}</p>" for alarm in alarms)
    return f"<div class='alarm' role='alert'>{lines}</div>" if alarms else ""


def _time_left(status: Status, history: Mapping[str, Any]) -> float | None:
    known = known_points(history, "applied")
    return None if status.ended else seconds_left(known[-RECENT_ROWS:], status.tokens.budget)


def _sentence(status: Status, left: float | None) -> str:
    tokens = status.tokens
    of = f"{amount(tokens.applied)} of {amount(tokens.budget)} tokens"
    members = [region for region in status.regions if region.member]
    active = sum(region.contributing for region in members)
    rest = f"{active} of {len(members)} regions contributing" if members else "no region is here"
    if status.ended:
        rest = f"held-out loss {loss(status.loss.heldout)}"
    ends = f", {seconds(left)} left" if left is not None else ""
    why = f" ({escape(status.why)})" if status.why else ""
    done = 100 * min(1.0, tokens.applied / max(1, tokens.budget))
    held = min(100 - done, 100 * max(0.0, tokens.pending) / max(1, tokens.budget))
    facts = [
        (percent(done / 100), "merged"),
        (seconds(status.seconds), "of running time"),
        (amount(status.outer_steps), "outer steps"),
        (str(len(status.fragments) or len(status.clock)), "fragments"),
    ]
    listed = "".join(f"<span><b>{value}</b> {what}</span>" for value, what in facts)
    return (
        f"<h1>{escape(status.state.capitalize())}: {of}{ends}; "
        f"<span class='quiet'>{rest}{why}</span></h1>"
        f"<svg class='bar' role='img' aria-label='{of}' width='100%' height='10'>"
        "<rect class='ground' width='100%' height='10'/>"
        f"<rect class='merge' width='{done:.2f}%' height='10'/>"
        f"<rect class='pending' x='{done:.2f}%' width='{held:.2f}%' height='10'/></svg>"
        f"<p class='facts'>{listed}</p>"
    )


def styles_of(regions: Sequence[str]) -> dict[str, str]:
    """Each region's colour, by its place."""
    return {name: f"r{place % COLOURS}" for place, name in enumerate(regions)}


def heading(title: str, figure: str = "", more: str = "", end: str = "") -> str:
    big = f"<b class='big'>{figure}</b>" if figure else ""
    quiet = f"<span class='quiet'>{more}</span>" if more else ""
    return f"<div class='head'><h2>{title}</h2>{big}{quiet}{end}</div>"


def _loss(status: Status, history: Mapping[str, Any], by_time: bool) -> str:
    switch = (
        "<nav class='switch' aria-label='Horizontal axis'>"
        f"<a href='?x=tokens'{'' if by_time else ' aria-current=true'}>Merged tokens</a>"
        f"<a href='?x=time'{' aria-current=true' if by_time else ''}>Time</a></nav>"
    )
    at = status.loss.heldout_at
    measured = f"at outer step {amount(at)}; " if at is not None else ""
    drawing = loss_chart(
        history,
        styles_of([region.name for region in status.regions]),
        end=history["now"] if by_time else status.tokens.budget,
        label=f"Held-out loss, now {loss(status.loss.heldout)}, and training loss of each region",
        by_time=by_time,
    )
    more = f"{measured}training {loss(status.loss.train)}"
    return (
        f"<section>{heading('Held-out loss', loss(status.loss.heldout), more, switch)}{drawing}"
        f"<p class='quiet small'>Nats per token, log scale. {_legend(status, history)}</p>"
        "</section>"
    )


def _legend(status: Status, history: Mapping[str, Any]) -> str:
    styles = styles_of([region.name for region in status.regions])
    names = [name for name in history["regions"] if name in styles][:MOST_LINES]
    listed = "".join(
        f"<span class='key'><i class='mark {styles[name]}'></i>{escape(name)}</span>"
        for name in names
    )
    return f"<span class='key'><i class='mark'></i>held-out</span>{listed}"


def _speed(status: Status, history: Mapping[str, Any]) -> str:
    styles = styles_of([region.name for region in status.regions])
    total = sum(region.tokens_per_second or 0.0 for region in status.regions)
    speed = speed_chart(history, styles, label=f"Tokens per second, together {amount(total)}")
    share = percent(status.goodputs.time)
    useful = goodput_chart(history, label=f"Time that went into useful steps, now {share}")
    return (
        f"<section>{heading('Speed', amount(total), 'tokens/s, all regions')}{speed}"
        f"{heading('Goodput', share, 'of the time went into useful steps')}{useful}</section>"
    )


def _rounds(status: Status, history: Mapping[str, Any]) -> str:
    styles = styles_of([region.name for region in status.regions])
    rounds = history["rounds"]
    drawing = round_chart(rounds, history["now"], styles)
    words = newest_round_in_words(rounds, styles)
    about = "Regions never stop training. Each fragment is called, answered, merged and published."
    return (
        f"<section>{heading('Rounds', '', about)}<div class='two'><div>{drawing}"
        "<p class='quiet small'>Grey: waits for answers. Hatched: grace window. Black: merge. "
        "Filled mark: an answer; hollow: an adoption.</p></div>"
        f"<div class='told'>{words}</div></div></section>"
    )


def _regions(status: Status, history: Mapping[str, Any]) -> str:
    head = "".join(f"<th scope='col'>{text}</th>" for text in ("region", "state", *FIGURES))
    rows = "".join(_region(status, region, history) for region in status.regions)
    who = standing_in_words(status)
    return (
        f"<section>{heading('Regions', '', who)}<div class='wide' tabindex='0' role='region' "
        f"aria-label='Regions'><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
        "</div></section>"
    )


def _region(status: Status, region: RegionStatus, history: Mapping[str, Any]) -> str:
    state, style = region.state, styles_of([region.name for region in status.regions])[region.name]
    curves = history["regions"].get(region.name, {})
    bad = " class='bad'" if state in ("away", "failed") and not status.ended else ""
    share = region.share or 0.0
    cells = (
        f"<span class='cell'><b>{amount(region.tokens_per_second)}</b>"
        f"{sparkline(curves.get('tokens_per_second', ()), style)}</span>",
        f"<span class='cell'><b>{loss(region.loss)}</b>"
        f"{sparkline(curves.get('loss', ()), style)}</span>",
        f"<span class='cell'><b>{percent(region.share)}</b><svg class='share' aria-hidden='true' "
        "width='80' height='8'><rect class='ground' width='80' height='8'/>"
        f"<rect class='fill {style}' width='{80 * share:.1f}' height='8'/></svg></span>",
        amount(region.staleness),
        percent(region.blocked),
        seconds(region.last_merged_seconds),
        amount(region.step),
    )
    listed = "" if region.listed or not region.member else "not listed"
    why = " · ".join(filter(None, (region.why, per_device(region), listed)))
    return (
        f"<tr{bad}><th scope='row'><i class='mark {style}'></i>{escape(region.name)}</th>"
        f"<td><b class='state'>{state}</b> <small>{escape(why)}</small></td>"
        + "".join(
            f"<td data-label='{label}'>{cell}</td>"
            for label, cell in zip(FIGURES, cells, strict=True)
        )
        + "</tr>"
    )


def _traffic(status: Status, history: Mapping[str, Any]) -> str:
    wire = status.wire
    drawing = traffic_chart(
        history, label=f"{bytes_(wire.bytes_up)} up, {bytes_(wire.bytes_down)} down"
    )
    figures = (
        ("up (dashed)", bytes_(wire.bytes_up), compression(wire.bits_per_parameter_up)),
        ("down", bytes_(wire.bytes_down), compression(wire.bits_per_parameter_down)),
    )
    return (
        f"<section>{heading('Traffic', bytes_(wire.bytes_up + wire.bytes_down))}{drawing}"
        f"{figure_list(figures)}</section>"
    )


def compression(value: float | None) -> str:
    ratio = f", {FULL_BITS / value:.1f} times less than float32" if value else ""
    return f"{bits(value)} bits per parameter{ratio}"


def _tokens(status: Status) -> str:
    tokens = status.tokens
    fates = [
        ("applied", amount(tokens.applied), "in the published weights"),
        ("pending", amount(tokens.pending), "trained, on its way into a round"),
        ("refused", amount(tokens.refused), "turned down by the server's checks"),
        ("discarded", amount(tokens.discarded), "given up: stale, foreign or left over"),
    ]
    if tokens.given_up:
        fates.append(("", amount(tokens.given_up), "of these held by retired regions"))
    kept = f"{percent(status.goodput)} kept of what was trained"
    return (
        f"<section>{heading('Tokens', amount(tokens.trained), 'trained; ' + kept)}"
        f"{figure_list(fates)}</section>"
    )


def _goodputs(status: Status) -> str:
    goodputs = status.goodputs
    figures = (
        ("time", percent(goodputs.time), "of the regions' time went into steps that count"),
        ("tokens", percent(goodputs.tokens), "of what a run without faults would have merged"),
        ("participation", percent(goodputs.participation), "of the regions in a round, on average"),
    )
    return f"<section>{heading('Three goodputs')}{figure_list(figures)}</section>"


def figure_list(rows: Sequence[tuple[str, str, str]]) -> str:
    cells = "".join(
        f"<dt>{name}</dt><dd class='value'>{value}</dd><dd class='quiet'>{what}</dd>"
        for name, value, what in rows
    )
    return f"<dl>{cells}</dl>"


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
            f"<li><time>{_clock(each.time)}</time><span class='who'>{escape(each.by)}</span>"
            f"<span>{each.number}: {escape(words)}</span></li>"
        )
    return f"<section>{heading('Amendments')}<ul class='events'>{''.join(rows)}</ul></section>"


def _events(events: Sequence[tuple[float, str, str, str]]) -> str:
    rows = "".join(
        f"<li><time>{_clock(at)}</time><span class='who'>{escape(region)}</span>"
        f"<span>{escape(kind)}{': ' + escape(words) if words else ''}</span></li>"
        for at, kind, region, words in events
    )
    listed = f"<ul class='events'>{rows}</ul>" if rows else "<p class='quiet'>None yet.</p>"
    return f"<section>{heading('Events')}{listed}</section>"


def _clock(at: float | None) -> str:
    return UNKNOWN if at is None else time.strftime("%d %b %H:%M:%S", time.gmtime(at))
