"""A curve as small as a word."""

from __future__ import annotations

from collections.abc import Sequence

from diloco_cli.observe.page.charts import reach

MOST = 60


def sparkline(values: Sequence[float | None], style: str) -> str:
    """Draws the last values; nothing where fewer than two are known."""
    known = [value for value in values if value is not None][-MOST:]
    if len(known) < 2:
        return ""
    axis = reach(known)
    places = " ".join(
        f"{100 * index / (len(known) - 1):.1f},{18 - 16 * axis.share(value):.1f}"
        for index, value in enumerate(known)
    )
    return (
        "<svg class='spark' aria-hidden='true' width='100' height='20' viewBox='0 0 100 20'>"
        f"<polyline class='line {style}' points='{places}'/></svg>"
    )
