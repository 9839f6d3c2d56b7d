"""A run as one file to send, and several runs over one axis.

It has no script and asks nobody for anything: what was trained, what came of it, where the
tokens went, what happened, and what it takes to repeat it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import yaml

from diloco_cli.observe.metrics import quantile, thrown_away
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
from diloco_cli.observe.page.event_list import clock, event_rows
from diloco_cli.observe.page.figures import (
    compression,
    figure_list,
    heading,
    sample_list,
    table,
)
from diloco_cli.observe.page.log_digest import FAULTS, LogDigest, digest
from diloco_cli.observe.page.marks import DEFINITIONS, mark, styles_of
from diloco_cli.observe.page.records import chaos_part
from diloco_cli.observe.page.round_chart import span
from diloco_cli.observe.run_record import RunRecord
from diloco_cli.observe.status import Summary
from diloco_cli.observe.units import amount, bytes_, loss, percent, seconds

MOST_ROWS = 60
"""Rows of a table; of more, every so many-th is shown, and always the last."""
MOST_OUTAGES = 16
"""Regions with a row on the time axis of the faults: those with most to show."""
SLOWEST = 10


@dataclass(frozen=True)
class Environment:
    """Where a report was made."""

    version: str
    command: str
    host: str = ""
    """Python and the operating system."""


@dataclass(frozen=True)
class Sample:
    """What weights write after a prompt."""

    weights: str
    """Which ones."""
    prompt: str
    text: str


def report(
    record: RunRecord,
    environment: Environment,
    *,
    samples: Sequence[Sample] = (),
    chaos: Mapping[str, Any] | None = None,
) -> str:
    """Renders one run; `chaos` is its chaos.json."""
    summary, told = record.result, digest(record.events())
    styles = styles_of(list(dict.fromkeys([*summary.regions, *record.regions])))
    parts = [
        _result(record, summary),
        _trained(record),
        _losses(record, summary, styles),
        _speed(record, summary, styles),
        _rounds(told, styles),
        _regions(record, summary, told, styles),
        f"<div class='two'>{_traffic(record, summary)}{_books(summary)}</div>",
        chaos_part(chaos) if chaos else "",
        _happened(told, styles),
        _amendments(told),
        _samples(samples) or _written(record),
        _repeat(record, summary, environment, told),
    ]
    return _whole(f"{record.name}: report", "".join(parts))


def study(name: str, part: str, environment: Environment) -> str:
    """Renders a record that no run's folder goes with, such as a part of records.py."""
    body = f"<h1>{escape(name)}</h1>{part}"
    return _whole(f"{name}: report", f"{body}{_made(environment)}")


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
        f"{drawing}</section>{table(heads, rows, 'Runs')}{_made(environment)}"
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
    said = summary.why if summary.why != summary.hopeless else ""
    why = f" ({escape(said)})" if said else ""
    figures = [
        ("first", loss(losses.first), f"held-out loss at outer step {amount(losses.first_at)}"),
        ("best", loss(losses.best), f"at outer step {amount(losses.best_at)}"),
        ("last", loss(losses.heldout), f"at outer step {amount(losses.heldout_at)}"),
        ("outer steps", amount(summary.outer_steps), "of all fragments together"),
    ]
    if losses.ema is not None:
        where = f"the average of the weights, at outer step {amount(losses.ema_at)}"
        figures.insert(3, ("average", loss(losses.ema), where))
    alarms = (summary.overshoot, thrown_away(tokens) if tokens else "", summary.hopeless)
    more = "".join(f"<p class='alarm'>{escape(alarm)}</p>" for alarm in alarms if alarm)
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
    keys = "".join(
        f"<span class='key'>{mark(style)}{escape(name)}</span>"
        for name, style in styles.items()
        if name in record.regions
    )
    legend = f"<p class='quiet small'><span class='key'>thick: held-out</span>{keys}</p>"
    return (
        f"<section>{heading('Loss over merged tokens')}{over_tokens}{legend}</section>"
        f"<section>{heading('Loss over time')}{over_time}</section>"
        f"<details><summary>Every evaluation</summary>{_evaluations(record)}</details>"
    )


def _evaluations(record: RunRecord) -> str:
    """A row for each measurement: the average's are of other outer steps than the weights'."""
    both = bool(record.ema["loss"])
    series = {"the weights": record.evaluations, "their average": record.ema}
    points = [
        (*point, of)
        for of, columns in series.items()
        for point in _some(list(zip(*columns.values(), strict=True)), MOST_ROWS // (1 + both))
    ]
    rows = [
        f"<tr><td>{seconds(at)}</td><td>{amount(many)}</td><td>{amount(number)}</td>"
        f"{f'<td>{of}</td>' * both}<td>{value:.4f}</td></tr>"
        for at, many, value, number, of in sorted(points)
    ]
    heads = ["time", "merged tokens", "outer step", *["of"] * both, "held-out loss"]
    return table(heads, rows, "Evaluations")


def _some(points: Sequence[tuple[float, ...]], most: int) -> list[tuple[float, ...]]:
    """Every so many-th, and always the last."""
    step = max(1, -(-len(points) // most))
    return [p for n, p in enumerate(points) if n % step == 0 or n == len(points) - 1]


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


def _trained(record: RunRecord) -> str:
    """What was trained on what, from the settings."""
    spec = _settings(record.spec)
    rows = []
    for key, what in (
        ("model", "what was trained"),
        ("data", "what was read"),
        ("inner", "how a region trains"),
        ("sync", "when regions exchange"),
        ("outer", "the outer step"),
        ("wire", "how frames are packed"),
    ):
        part = spec.get(key)
        if isinstance(part, dict):
            words = ", ".join(f"{name} {_plain(value)}" for name, value in part.items())
            rows.append((key, "", f"{escape(words)} <small>({what})</small>"))
    return f"<section>{heading('What was trained')}{figure_list(rows)}</section>" if rows else ""


def _settings(text: str) -> Mapping[str, Any]:
    try:
        spec = yaml.safe_load(text)
    except (yaml.YAMLError, RecursionError):
        return {}
    return spec if isinstance(spec, dict) else {}


def _plain(value: Any) -> str:
    """A setting in words; a kind stands for itself."""
    if isinstance(value, dict):
        rest = ", ".join(f"{key} {_plain(each)}" for key, each in value.items() if key != "kind")
        kind = str(value.get("kind", ""))
        return f"{kind} ({rest})" if kind and rest else kind or f"({rest})"
    return str(value)


def _rounds(told: LogDigest, styles: Mapping[str, str]) -> str:
    rounds = list(told.rounds)
    if not rounds:
        return ""
    columns = {
        "from the call until all answers were in": [each.gathered for each in rounds],
        "merging and publishing": [each.merged for each in rounds],
    }
    rows = [
        f"<tr><th scope='row'>{name}</th>"
        + "".join(f"<td>{span(quantile(values, share))}</td>" for share in (0.5, 0.95, 1.0))
        + "</tr>"
        for name, values in columns.items()
    ]
    slow = sorted(rounds, key=lambda each: each.gathered + each.merged, reverse=True)[:SLOWEST]
    slowest = [
        f"<tr><td>{clock(each.began)}</td><td>{each.fragment}</td><td>{each.version}</td>"
        f"<td>{each.members}</td><td>{span(each.gathered)}</td><td>{span(each.merged)}</td></tr>"
        for each in slow
    ]
    heads = ("when (UTC)", "fragment", "version", "members", "gathered in", "merged in")
    return (
        f"<section>{heading('Rounds', amount(len(rounds)), 'of those that the log still holds')}"
        f"{table(('what', 'median', '95 of 100 within', 'longest'), rows, 'Rounds')}"
        f"<details><summary>The slowest</summary>{table(heads, slowest, 'The slowest rounds')}"
        "</details></section>"
    )


def _regions(
    record: RunRecord, summary: Summary, told: LogDigest, styles: Mapping[str, str]
) -> str:
    rows = []
    for name, region in summary.regions.items():
        curves = record.regions.get(name, {})
        taken = told.members[name] / len(told.rounds) if told.rounds else None
        out = sum((end or told.ended or start) - start for start, end in told.away.get(name, ()))
        cells = (
            percent(region.share),
            amount(region.applied),
            amount(_mean(curves.get("tokens_per_second", ()))),
            percent(_mean(curves.get("mfu", ()))),
            percent(_last(curves.get("blocked", ()))),
            percent(taken),
            seconds(out),
            amount(region.lost),
            amount(region.refused),
        )
        failed = f"<small>{escape(region.failed)}</small>" if region.failed else ""
        rows.append(
            f"<tr><th scope='row'>{mark(styles[name])}<bdi>{escape(name)}</bdi>{failed}</th>"
            + "".join(f"<td>{cell}</td>" for cell in cells)
            + "</tr>"
        )
    heads = (
        *("region", "share of merged weight", "tokens applied", "tokens/s, mean", "MFU, mean"),
        *("time in exchange", "in so many rounds", "silent for", "tokens lost", "refused frames"),
    )
    return f"<section>{heading('Regions')}{table(heads, rows, 'Regions')}</section>" if rows else ""


def _known(values: Sequence[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _mean(values: Sequence[float | None]) -> float | None:
    known = _known(values)
    return sum(known) / len(known) if known else None


def _last(values: Sequence[float | None]) -> float | None:
    known = _known(values)
    return known[-1] if known else None


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
        f"<section>{heading('Tokens by fate', '', said[summary.balanced])}"
        f"{table(heads, rows, 'Fragments')}"
        "</section>"
    )


def _happened(told: LogDigest, styles: Mapping[str, str]) -> str:
    title = heading("Faults and recoveries")
    if not told.counts:
        return f"<section>{title}<p>None on record.</p></section>"
    figures = [(kind, str(count), FAULTS[kind]) for kind, count in told.counts.most_common()]
    lines = [
        (
            event.time,
            event.kind,
            str(event.fields.get("region") or ""),
            str(event.fields.get("why") or event.fields.get("fault") or ""),
        )
        for event in reversed(told.faults)
    ]
    return (
        f"<section>{title}{_outages(told, styles)}{figure_list(figures)}"
        f"<details><summary>The last {len(lines)}</summary>{event_rows(lines, styles)}</details>"
        "</section>"
    )


def _outages(told: LogDigest, styles: Mapping[str, str]) -> str:
    """When each region was silent, and what struck it, on one time axis."""
    if told.began is None or told.ended is None or told.ended <= told.began:
        return ""
    began, wide = told.began, told.ended - told.began
    names = sorted(
        {name for name in (*told.away, *told.moments)},
        key=lambda name: -len(told.away.get(name, ())) - len(told.moments.get(name, ())),
    )[:MOST_OUTAGES]
    if not names:
        return ""

    def place(at: float) -> float:
        return 14 + 84 * min(1.0, max(0.0, (at - began) / wide))

    parts, height = [], 20 * len(names) + 20
    for row, name in enumerate(sorted(names)):
        y, style = 20 * row + 10, styles.get(name, "")
        short = (name or "server")[:16]
        parts.append(
            f"<text class='strong' x='0' y='{y + 4}'>{escape(short)}</text>"
            f"<line class='grid' x1='14%' x2='98%' y1='{y}' y2='{y}'/>"
        )
        for start, end in told.away.get(name, ()):
            left = place(start)
            right = max(left + 0.2, place(told.ended if end is None else end))
            parts.append(
                f"<rect class='fill {style}' x='{left:.2f}%' width='{right - left:.2f}%' "
                f"y='{y - 4}' height='8'/>"
            )
        parts += [
            f"<use href='#missed' class='missed {style}' x='{place(at):.2f}%' y='{y}'/>"
            for at, _ in told.moments.get(name, ())
        ]
    for share, anchor in ((0.0, "start"), (0.5, "middle"), (1.0, "end")):
        parts.append(
            f"<text x='{14 + 84 * share:.0f}%' y='{height - 3}' text-anchor='{anchor}'>"
            f"{seconds(share * wide)}</text>"
        )
    label = "When regions were silent, and what struck them, over the time of the log"
    return (
        f"<svg class='chart' role='img' aria-label='{label}' width='100%' height='{height}'>"
        f"{''.join(parts)}</svg><p class='quiet small'>Bar: silent. ×: something struck it.</p>"
    )


def _amendments(told: LogDigest) -> str:
    if not told.amendments:
        return ""
    rows = []
    for event in told.amendments:
        fields = event.fields
        changed = ", ".join(f"{key} = {value}" for key, value in (fields.get("set") or {}).items())
        words = "; ".join(filter(None, (changed, str(fields.get("why") or ""))))
        rows.append(
            f"<tr><td>{clock(event.time)}</td><td>{escape(str(fields.get('number', '')))}</td>"
            f"<td>{escape(str(fields.get('by') or ''))}</td><td>{escape(words)}</td></tr>"
        )
    heads = ("when (UTC)", "number", "by", "what")
    return f"<section>{heading('Amendments')}{table(heads, rows, 'Amendments')}</section>"


def _samples(samples: Sequence[Sample]) -> str:
    shown = "".join(
        f"<h3>{escape(each.weights)}</h3><pre><b>{escape(each.prompt)}</b>{escape(each.text)}</pre>"
        for each in samples
    )
    return (
        f"<section>{heading('Samples', '', 'the prompt is bold')}{shown}</section>" if shown else ""
    )


def _written(record: RunRecord) -> str:
    """What the weights wrote while the run went on."""
    listed = sample_list(record.history["samples"])
    return f"<section>{listed}</section>" if listed else ""


def _repeat(record: RunRecord, summary: Summary, environment: Environment, told: LogDigest) -> str:
    ran = ", ".join(sorted(told.versions))
    digests = (
        ("spec", summary.spec_digest[:16], "digest of the settings that all regions share"),
        ("layout", summary.layout_digest[:16], "digest of the tensors' names, shapes and order"),
        *((("program", escape(ran), "version that wrote the log"),) if ran else ()),
    )
    return (
        f"<section>{heading('To repeat it')}{figure_list(digests)}"
        f"<pre>{escape(record.spec)}</pre></section>{_made(environment)}"
    )


def _made(environment: Environment) -> str:
    return (
        f"<p class='quiet small'>Made by diloco {escape(environment.version)}: "
        f"<code>{escape(environment.command)}</code> {escape(environment.host)}</p>"
    )
