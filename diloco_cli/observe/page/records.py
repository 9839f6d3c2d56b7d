"""Records of `diloco chaos` and `diloco bench quality`, as parts of a report."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from diloco_cli.errors import SpecError
from diloco_cli.observe.page.charts import Line
from diloco_cli.observe.page.curves import loss_lines
from diloco_cli.observe.page.figures import figure_list, heading, table
from diloco_cli.observe.units import UNKNOWN, amount, bits, loss, percent, seconds

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


def quality_part(rows: Sequence[Mapping[str, Any]], of: str) -> str:
    """What loss each way to synchronise reached: lines of quality.jsonl, the file `of`.

    Cells of other models, batches or budgets have tables of their own: they are not comparable.
    """
    alike: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        alike.setdefault(_in_common(row), []).append(row)
    return "".join(_quality_table(words, each, of) for words, each in alike.items())


def _in_common(row: Mapping[str, Any]) -> str:
    """What a cell shares with all that it may be compared with; old records know their tokens."""
    settings = row.get("settings")
    if not isinstance(settings, Mapping):
        tokens = row.get("tokens")
        many = f"{tokens:,} tokens" if isinstance(tokens, int) else "tokens unknown"
        return f"{many}; model, batch and sequence are not in these records"
    return ", ".join(f"{key} {_value(value)}" for key, value in settings.items())


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return " ".join(f"{key} {each}" for key, each in value.items()).removeprefix("kind ")
    return f"{value:,}" if isinstance(value, int) else str(value)


def _quality_table(words: str, rows: Sequence[Mapping[str, Any]], of: str) -> str:
    ways = _ways(rows, of)
    first = next(iter(ways))
    drawn = []
    for name, by_seed in ways.items():
        records = list(by_seed.values())
        losses = [found for each in records if (found := _loss(each)) is not None]
        spread = f" ± {statistics.stdev(losses):.4f}" if len(losses) > 1 else ""
        mean = f"{statistics.fmean(losses):.4f}{spread}" if losses else UNKNOWN
        failed = f" ({len(records) - len(losses)} failed)" * (len(losses) < len(records))
        other = _compared_with(records[-1], ways, first)
        change = _change(by_seed, ways.get(other, {}))
        up, down = (_mean(records, key) for key in ("bits_up", "bits_down"))
        drawn.append(
            f"<tr><th scope='row'>{escape(name)}</th><td>{len(losses)}{failed}</td>"
            f"<td>{mean}</td><td>{change}</td><td>{escape(other or UNKNOWN)}</td>"
            f"<td>{percent(_mean(records, 'goodput'))}</td>"
            f"<td>{bits(up)} / {bits(down)}</td></tr>"
        )
    heads = ("way to synchronise", "seeds", "loss ± deviation", "change", "against")
    listed = table((*heads, "goodput", "bits up / down"), drawn, "Ways to synchronise")
    return f"<section>{heading('Quality', '', escape(words))}{listed}</section>"


Ways = Mapping[str, Mapping[Any, Mapping[str, Any]]]
"""Records by the name of what was trained and by seed."""


def _ways(rows: Sequence[Mapping[str, Any]], of: str) -> Ways:
    """Parts records that may be averaged; refuses a file that does not say which those are."""
    rates: dict[str, set[Any]] = {}
    for row in rows:
        rates.setdefault(str(row.get("cell", UNKNOWN)), set()).add(row.get("lr"))
    ways: dict[str, dict[Any, Mapping[str, Any]]] = {}
    for row in rows:
        cell = str(row.get("cell", UNKNOWN))
        name = f"{cell}, lr {row.get('lr')}" if len(rates[cell]) > 1 else cell
        by_seed = ways.setdefault(name, {})
        seed, known = row.get("seed"), next(iter(by_seed.values()), row)
        again = by_seed.get(seed, row)
        same = again.get("id") == row.get("id") if "id" in row else again == row
        if not same or known.get("way") != row.get("way"):
            raise SpecError(
                f"{of}: the records of {name!r}, seed {seed}, are of different settings, and "
                "nothing in them says which are comparable.",
                hint="Put what one `diloco bench quality` measured into a file of its own.",
            )
        by_seed[seed] = row
    return ways


def _compared_with(record: Mapping[str, Any], ways: Ways, first: str) -> str:
    """Which way it is held against: its own record says; in old ones the first of the file is."""
    if "against" not in record:
        return first
    cell = str(record["against"])
    same_rate = f"{cell}, lr {record.get('lr')}"
    return next((name for name in (cell, same_rate) if name in ways), "")


def _change(mine: Mapping[Any, Mapping[str, Any]], other: Mapping[Any, Mapping[str, Any]]) -> str:
    """The mean of each seed's own change: what seeds share cancels out."""
    changes = [
        own / theirs - 1
        for seed, record in mine.items()
        if (own := _loss(record)) and (theirs := _loss(other.get(seed, {})))
    ]
    return f"{100 * statistics.fmean(changes):+.2f} %" if changes else UNKNOWN


def _loss(record: Mapping[str, Any]) -> float | None:
    found = record.get("loss")
    return float(found) if isinstance(found, int | float) else None


def _mean(records: Sequence[Mapping[str, Any]], key: str) -> float | None:
    known = [each[key] for each in records if isinstance(each.get(key), int | float)]
    return statistics.fmean(known) if known else None


def _took(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.1f} s"
