"""Records of `diloco chaos` and `diloco bench quality`, as parts of a report."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from diloco_cli.observe.page.charts import Line
from diloco_cli.observe.page.curves import loss_lines
from diloco_cli.observe.page.figures import figure_list, heading, table
from diloco_cli.observe.units import UNKNOWN, amount, loss, percent, seconds

MOST_FAULTS = 200


def chaos_part(record: Mapping[str, Any]) -> str:
    """What the faults of a schedule cost: the document chaos.json."""
    tokens, shares = record.get("tokens") or {}, record.get("goodput") or {}
    recovery, losses = record.get("recovery") or {}, record.get("loss") or {}
    struck = [each for each in record.get("faults") or () if not each.get("skipped")]
    figures = [
        ("faults", amount(len(struck)), f"inflicted within {seconds(record.get('seconds'))}"),
        ("goodput", percent(shares.get("tokens")), "of the tokens of a run without faults"),
        ("time", percent(shares.get("time")), "of the regions' time went into steps that count"),
        ("participation", percent(shares.get("participation")), "of the regions in a round"),
        ("applied", amount(tokens.get("applied")), f"of {amount(tokens.get('trained'))} trained"),
        ("recovery", _took(recovery.get("p50")), f"median of {recovery.get('count', 0)}"),
        ("", _took(recovery.get("p95")), "of 100 recoveries 95 were no slower"),
        ("held-out", loss(losses.get("heldout")), "loss at the end"),
    ]
    curve = [(point[0], point[1]) for point in losses.get("curve") or () if len(point) > 1]
    drawing = ""
    if len(curve) > 1:
        lines = [Line("held-out", curve, "thick", dots=len(curve) <= 200)]
        drawing = loss_lines(lines, end=curve[-1][0], label="Held-out loss under faults")
    rows = [
        f"<tr><td>{seconds(each.get('at', each.get('time')))}</td>"
        f"<td>{escape(str(each.get('kind', '')))}</td><td>{escape(str(each.get('region') or ''))}"
        f"</td><td>{_took((each.get('recovery') or {}).get('total'))}</td></tr>"
        for each in struck[:MOST_FAULTS]
    ]
    listed = table(("after", "fault", "region", "trained again after"), rows, "Faults")
    method = escape(str(record.get("method") or "chaos"))
    return (
        f"<section>{heading('Inflicted faults', '', method)}{figure_list(figures)}{drawing}"
        f"<details><summary>Every fault</summary>{listed}</details></section>"
    )


def quality_part(rows: Sequence[Mapping[str, Any]]) -> str:
    """What loss each way to synchronise reached: lines of quality.jsonl."""
    cells: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        cells.setdefault(str(row.get("cell", UNKNOWN)), []).append(row)
    known = {name: _losses(each) for name, each in cells.items()}
    first = next((losses for losses in known.values() if losses), [])
    base = statistics.fmean(first) if first else None
    drawn = []
    for name, each in cells.items():
        losses = known[name]
        mean = statistics.fmean(losses) if losses else None
        spread = f" ± {statistics.stdev(losses):.4f}" if len(losses) > 1 else ""
        apart = UNKNOWN if mean is None or not base else f"{100 * (mean / base - 1):+.2f} %"
        last = each[-1]
        drawn.append(
            f"<tr><th scope='row'>{escape(name)}</th><td>{len(each)}</td>"
            f"<td>{UNKNOWN if mean is None else f'{mean:.4f}'}{spread}</td><td>{apart}</td>"
            f"<td>{amount(last.get('tokens'))}</td><td>{percent(last.get('goodput'))}</td>"
            f"<td>{last.get('bits_up', 0):.2f} / {last.get('bits_down', 0):.2f}</td></tr>"
        )
    heads = ("way to synchronise", "seeds", "loss ± deviation", "against the first")
    listed = table((*heads, "tokens", "goodput", "bits up / down"), drawn, "Ways to synchronise")
    return f"<section>{heading('Quality', '', 'held-out loss at equal tokens')}{listed}</section>"


def _losses(rows: Sequence[Mapping[str, Any]]) -> list[float]:
    return [float(row["loss"]) for row in rows if isinstance(row.get("loss"), int | float)]


def _took(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.1f} s"
