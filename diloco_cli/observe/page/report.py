"""A run as one file to send, and several runs over one axis.

It has no script and asks nobody for anything: what was trained, what came of it, where the
tokens went, what happened, and what it takes to repeat it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from diloco_cli.observe.page.charts import Line
from diloco_cli.observe.page.curves import (
    evaluation_points,
    goodput_chart,
    loss_chart,
    loss_lines,
    speed_chart,
    traffic_chart,
)
from diloco_cli.observe.page.document import STYLE
from diloco_cli.observe.page.figures import compression, figure_list, heading
from diloco_cli.observe.page.marks import DEFINITIONS, mark, styles_of
from diloco_cli.observe.run_record import RunRecord
from diloco_cli.observe.status import Summary
from diloco_cli.observe.units import amount, bytes_, loss, percent, seconds

FAULTS = {
    "lapsed": "a region fell silent",
    "revived": "it came back",
    "trainer-died": "a trainer died",
    "server-restarted": "the server died and was started again",
    "worker-restarted": "a worker died and was started again",
    "refused": "a contribution was refused",
    "quarantined": "a region was quarantined",
    "retired": "a region was retired",
    "link-lost": "a region lost its link",
    "link-back": "a link came back",
    "amended": "the run was amended",
    "fault": "a fault was inflicted",
}
MOST_ROWS = 60
"""Rows of a table; of more, every so many-th is shown, and always the last."""


@dataclass(frozen=True)
class Environment:
    """Where a report was made."""

    version: str
    command: str


def report(record: RunRecord, environment: Environment) -> str:
    """Renders one run."""
    summary = record.result
    styles = styles_of(list(dict.fromkeys([*summary.regions, *record.regions])))
    parts = [
        _result(record, summary),
        _losses(record, summary, styles),
        _speed(record, summary, styles),
        _regions(summary, styles),
        f"<div class='two'>{_traffic(record, summary)}{_books(summary)}</div>",
        _happened(record),
        _repeat(record, summary, environment),
    ]
    return _whole(f"{record.name}: report", "".join(parts))


def comparison(records: Sequence[RunRecord], environment: Environment) -> str:
    """Lays several runs over one axis."""
    styles = [f"r{place % 8}" for place in range(len(records))]
    lines = [
        Line(record.name, evaluation_points(record.history), f"thick {style}", dots=True)
        for record, style in zip(records, styles, strict=True)
    ]
    end = max((at for line in lines for at, _ in line.points), default=1.0)
    names = ", ".join(record.name for record in records)
    drawing = loss_lines(lines, end=end, label=f"Held-out loss over merged tokens: {names}")
    heads = ("run", "state", "held-out", "best", "tokens", "time", "goodput", "bits up", "down")
    rows = []
    for record, style in zip(records, styles, strict=True):
        summary = record.result
        tokens, wire = summary.tokens, summary.wire
        figures = (
            summary.state,
            loss(summary.loss.heldout),
            loss(summary.loss.best),
            amount(tokens.applied if tokens else None),
            seconds(summary.wall_seconds),
            percent(summary.goodputs.time),
            f"{wire.bits_per_parameter_up or 0:.2f}" if wire else "–",
            f"{wire.bits_per_parameter_down or 0:.2f}" if wire else "–",
        )
        where = escape(str(record.folder))
        rows.append(
            f"<tr><th scope='row'>{mark(style)}{escape(record.name)}"
            f"<small>{where}</small></th>"
            + "".join(f"<td>{escape(figure)}</td>" for figure in figures)
            + "</tr>"
        )
    body = (
        f"<h1>{len(records)} runs</h1><section>{heading('Held-out loss', '', 'merged tokens')}"
        f"{drawing}</section>{_table(heads, rows)}{_made(environment)}"
    )
    return _whole(f"compare: {names}", body)


def _whole(title: str, body: str) -> str:
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    return (
        "<!doctype html><html lang='en'><head><meta charset='utf-8'>"
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">'
        "<meta name='viewport' content='width=device-width, initial-scale=1'>"
        f"<title>{escape(title)}</title><style>{STYLE}</style></head>"
        f"<body>{DEFINITIONS}<div class='page'><main>{body}</main></div></body></html>\n"
    )


def _result(record: RunRecord, summary: Summary) -> str:
    tokens, losses = summary.tokens, summary.loss
    of = f"{amount(tokens.applied)} of {amount(tokens.budget)} tokens merged" if tokens else ""
    took = f" in {seconds(summary.wall_seconds)}" if summary.wall_seconds else ""
    heldout = f"held-out {loss(losses.heldout)}" if losses.heldout is not None else ""
    parts = "; ".join(filter(None, (of + took, heldout)))
    why = f" ({escape(summary.why)})" if summary.why else ""
    figures = [
        ("first", loss(losses.first), f"held-out loss at outer step {amount(losses.first_at)}"),
        ("best", loss(losses.best), f"at outer step {amount(losses.best_at)}"),
        ("last", loss(losses.heldout), f"at outer step {amount(losses.heldout_at)}"),
        ("outer steps", amount(summary.outer_steps), "of all fragments together"),
    ]
    more = f"<p class='alarm'>{escape(summary.overshoot)}</p>" if summary.overshoot else ""
    return (
        f"<header><b>{escape(record.name)}</b><span>run {escape(summary.run)}</span></header>"
        f"<h1>{escape(summary.state.capitalize())}: {parts or 'no summary was written yet'}"
        f"<span class='quiet'>{why}</span></h1>{more}{figure_list(figures)}"
    )


def _losses(record: RunRecord, summary: Summary, styles: Mapping[str, str]) -> str:
    tokens = summary.tokens
    reached = max([1.0, *record.evaluations["tokens"]])
    end = max(reached, tokens.applied if tokens else 0.0)
    over_tokens = loss_chart(
        record.history, styles, end=end, label="Losses over merged tokens, nats per token"
    )
    over_time = loss_chart(
        record.history,
        styles,
        end=record.history["now"],
        label="Losses over time, nats per token",
        by_time=True,
    )
    points = list(zip(*record.evaluations.values(), strict=True))
    step = max(1, -(-len(points) // MOST_ROWS))
    shown = [p for n, p in enumerate(points) if n % step == 0 or n == len(points) - 1]
    rows = [
        f"<tr><td>{seconds(at)}</td><td>{amount(many)}</td><td>{amount(number)}</td>"
        f"<td>{value:.4f}</td></tr>"
        for at, many, value, number in shown
    ]
    keys = "".join(
        f"<span class='key'>{mark(style)}{escape(name)}</span>"
        for name, style in styles.items()
        if name in record.regions
    )
    legend = f"<p class='quiet small'><span class='key'>thick: held-out</span>{keys}</p>"
    table = _table(("time", "merged tokens", "outer step", "held-out loss"), rows)
    return (
        f"<section>{heading('Loss over merged tokens')}{over_tokens}{legend}</section>"
        f"<section>{heading('Loss over time')}{over_time}</section>"
        f"<details><summary>Every evaluation</summary>{table}</details>"
    )


def _speed(record: RunRecord, summary: Summary, styles: Mapping[str, str]) -> str:
    goodputs = summary.goodputs
    figures = (
        ("time", percent(goodputs.time), "of the regions' time went into steps that count"),
        ("tokens", percent(goodputs.tokens), "of what a run without faults would have merged"),
        ("participation", percent(goodputs.participation), "of the regions in a round"),
        ("kept", percent(summary.goodput), "of what was trained"),
    )
    return (
        f"<div class='two'><section>{heading('Speed', '', 'tokens/s of each region')}"
        f"{speed_chart(record.history, styles, label='Tokens per second of each region')}</section>"
        f"<section>{heading('Goodput')}"
        f"{goodput_chart(record.history, label='Time that went into useful steps')}"
        f"{figure_list(figures)}</section></div>"
    )


def _regions(summary: Summary, styles: Mapping[str, str]) -> str:
    rows = [
        f"<tr><th scope='row'>{mark(styles[name])}{escape(name)}</th>"
        f"<td>{percent(region.share)}</td><td>{amount(region.applied)}</td>"
        f"<td>{amount(region.lost)}</td><td>{amount(region.refused)}</td></tr>"
        for name, region in summary.regions.items()
    ]
    heads = ("region", "share of merged weight", "tokens applied", "tokens lost", "refused frames")
    return f"<section>{heading('Regions')}{_table(heads, rows)}</section>" if rows else ""


def _traffic(record: RunRecord, summary: Summary) -> str:
    figures: list[tuple[str, str, str]] = []
    if wire := summary.wire:
        figures = [
            ("up (dashed)", bytes_(wire.bytes_up), compression(wire.bits_per_parameter_up)),
            ("down", bytes_(wire.bytes_down), compression(wire.bits_per_parameter_down)),
        ]
    drawing = traffic_chart(record.history, label="Bytes up and down over time")
    return f"<section>{heading('Traffic')}{drawing}{figure_list(figures)}</section>"


def _books(summary: Summary) -> str:
    heads = ("fragment", "version", "trained", "applied", "pending", "refused", "discarded")
    rows = [
        f"<tr><td>{each.fragment}</td><td>{each.version}</td>"
        + "".join(f"<td>{amount(getattr(each.tokens, fate))}</td>" for fate in heads[2:])
        + "</tr>"
        for each in summary.fragments
    ]
    said = {True: "every token has one fate", False: "the books do not balance", None: ""}
    return (
        f"<section>{heading('Tokens by fate', '', said[summary.balanced])}{_table(heads, rows)}"
        "</section>"
    )


def _happened(record: RunRecord) -> str:
    counts: Counter[str] = Counter()
    lines = []
    for event in record.events():
        if event.kind not in FAULTS:
            continue
        counts[event.kind] += 1
        region, why = event.fields.get("region", ""), event.fields.get("why", "")
        lines.append(
            f"<li><time>{seconds(event.seconds)}</time><span>{escape(str(region))}</span>"
            f"<span>{escape(event.kind)} {escape(str(why))}</span></li>"
        )
    if not counts:
        return f"<section>{heading('Faults and recoveries')}<p>None on record.</p></section>"
    figures = [(kind, str(count), FAULTS[kind]) for kind, count in counts.most_common()]
    return (
        f"<section>{heading('Faults and recoveries')}{figure_list(figures)}"
        f"<ul class='events'>{''.join(lines[-200:])}</ul></section>"
    )


def _repeat(record: RunRecord, summary: Summary, environment: Environment) -> str:
    digests = (
        ("spec", summary.spec_digest[:16], "digest of the settings that all regions share"),
        ("layout", summary.layout_digest[:16], "digest of the tensors' names, shapes and order"),
    )
    return (
        f"<section>{heading('To repeat it')}{figure_list(digests)}"
        f"<pre>{escape(record.spec)}</pre></section>{_made(environment)}"
    )


def _made(environment: Environment) -> str:
    return (
        f"<p class='quiet small'>Made by diloco {escape(environment.version)}: "
        f"<code>{escape(environment.command)}</code></p>"
    )


def _table(heads: Sequence[str], rows: Sequence[str]) -> str:
    head = "".join(f"<th scope='col'>{text}</th>" for text in heads)
    return (
        f"<div class='wide' tabindex='0' role='region' aria-label='{heads[0]}'><table><thead><tr>"
        f"{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )
