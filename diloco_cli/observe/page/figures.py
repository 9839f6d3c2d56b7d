"""Headings, figures in rows and bars: what page and report are put together from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from diloco_cli.observe.status import RunTokens
from diloco_cli.observe.units import amount, bits, bytes_, percent

FULL_BITS = 32.0
"""Of a parameter that nobody compresses."""


def section(name: str, body: str) -> str:
    """One part, which the script swaps for a newer one on its own."""
    return f"<section id='{name}'>{body}</section>"


def heading(title: str, figure: str = "", more: str = "", end: str = "") -> str:
    big = f"<b class='big'>{figure}</b>" if figure else ""
    quiet = f"<span class='quiet'>{more}</span>" if more else ""
    return f"<div class='head'><h2>{title}</h2>{big}{quiet}{end}</div>"


def sample_list(samples: Sequence[Mapping[str, Any]]) -> str:
    """What the weights wrote, the newest first and the earlier ones folded in; nothing for none."""
    if not samples:
        return ""
    newest, *earlier = [_sample(each) for each in reversed(samples)]
    beside = "the beginning of a held-out text, in bold, as the global weights go on"
    folded = (
        f"<details id='earlier-samples'><summary>{len(earlier)} earlier</summary>"
        f"{''.join(earlier)}</details>"
        if earlier
        else ""
    )
    return f"{heading('Sample', '', beside)}{newest}{folded}"


def _sample(each: Mapping[str, Any]) -> str:
    after = f"after {amount(each['tokens'])} tokens, at outer step {amount(each['outer_step'])}"
    prompt, text = escape(str(each["prompt"])), escape(str(each["text"]))
    return (
        f"<p class='quiet small'>{after}</p><pre dir='auto'><b>{prompt}</b><bdi>{text}</bdi></pre>"
    )


def figure_list(rows: Sequence[tuple[str, str, str]]) -> str:
    cells = "".join(
        f"<dt>{name}</dt><dd class='value'>{value}</dd><dd class='quiet'>{what}</dd>"
        for name, value, what in rows
    )
    return f"<dl>{cells}</dl>"


def table(heads: Sequence[str], rows: Sequence[str], label: str) -> str:
    """Rows under their heads; a narrow window scrolls them sideways."""
    head = "".join(f"<th scope='col'>{text}</th>" for text in heads)
    return (
        f"<div class='wide' tabindex='0' role='region' aria-label='{label}'><table><thead><tr>"
        f"{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div>"
    )


def bits_bars(up: float | None, down: float | None) -> str:
    """Bits per parameter in each direction, beside what float32 would take."""
    rows = []
    for name, value in (("float32", FULL_BITS), ("down", down), ("up", up)):
        share = min(1.0, (value or 0.0) / FULL_BITS)
        less = f" (÷{FULL_BITS / value:.1f})" if value and value < FULL_BITS else ""
        y = 22 * len(rows)
        style = "gather" if name == "float32" else "merge"
        said = f"{value:.0f}" if value == FULL_BITS else f"{bits(value)}{less}"
        rows.append(
            f"<text x='0' y='{y + 12}'>{name}</text>"
            f"<rect class='{style}' x='56' y='{y + 2}' width='{48 * share:.2f}%' height='12'/>"
            f"<text class='strong' x='{48 * share:.2f}%' dx='64' y='{y + 12}'>{said}</text>"
        )
    label = f"Bits per parameter: {bits(up)} up, {bits(down)} down, 32 in float32"
    return (
        f"<h3>Bits per parameter</h3><svg class='chart' role='img' aria-label='{label}' "
        f"width='100%' height='{22 * len(rows)}'>{''.join(rows)}</svg>"
    )


def against_gradients(moved: int, steps: int, parameters: int | None) -> str:
    """What sending float32 gradients after every step would have moved."""
    plain = 2.0 * 4 * steps * (parameters or 0)
    if not plain or not moved or plain < moved:
        return ""
    return (
        f"<p class='quiet small'>float32 gradients after every step, up and down, would have moved "
        f"{bytes_(plain)}: {amount(plain / moved)} times as much.</p>"
    )


def fates(tokens: RunTokens) -> str:
    """What became of the tokens, as a bar and in words."""
    rows = [
        ("applied", tokens.applied, "in the published weights", "merge"),
        ("pending", tokens.pending, "trained, on its way into a round", "grace"),
        ("refused", tokens.refused, "turned down by the server's checks", "refused"),
        ("discarded", tokens.discarded, "given up: stale, foreign or left over", "gather"),
    ]
    together = max(1.0, sum(max(0.0, many) for _, many, _, _ in rows))
    parts, at = [], 0.0
    for _, many, _, style in rows:
        share = 100 * max(0.0, many) / together
        parts.append(
            f"<rect class='{style}' x='{at:.2f}%' width='{share:.2f}%' y='1' height='12'/>"
        )
        at += share
    label = ", ".join(f"{amount(many)} {name}" for name, many, _, _ in rows)
    listed = [(f"{_swatch(style)}{name}", amount(many), what) for name, many, what, style in rows]
    if tokens.given_up:
        listed.append(("", amount(tokens.given_up), "of these held by retired regions"))
    return (
        f"<svg class='chart' role='img' aria-label='{label}' width='100%' height='14'>"
        f"{''.join(parts)}</svg>{figure_list(listed)}"
    )


def _swatch(style: str) -> str:
    return (
        "<svg class='mark' aria-hidden='true' width='11' height='11'>"
        f"<rect class='{style}' width='11' height='11'/></svg>"
    )


def compression(value: float | None) -> str:
    ratio = f", {FULL_BITS / value:.1f} times less than float32" if value else ""
    return f"{bits(value)} bits per parameter{ratio}"


def share_bar(share: float | None, style: str, even: float | None) -> str:
    """A share, and a tick where an even one would end."""
    tick = (
        f"<rect class='tick' x='{80 * even:.1f}' y='-2' width='1.5' height='12'/>" if even else ""
    )
    return (
        f"<span class='cell'><b>{percent(share)}</b><svg class='share' aria-hidden='true' "
        "width='80' height='8'><rect class='ground' width='80' height='8'/>"
        f"<rect class='fill {style}' width='{80 * min(1.0, share or 0.0):.1f}' height='8'/>"
        f"{tick}</svg></span>"
    )
