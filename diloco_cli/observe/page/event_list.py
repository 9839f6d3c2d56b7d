"""What happened, newest first, with a filter for each sort of event. No filter needs the script."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape

from diloco_cli.observe.page.figures import heading
from diloco_cli.observe.page.marks import mark
from diloco_cli.observe.units import UNKNOWN

SORTS: Mapping[str, tuple[str, str, frozenset[str]]] = {
    "alarms": (
        "▲",
        "Alarms",
        frozenset(
            (
                *("lapsed", "refused", "quarantined", "foreign", "fenced", "retired", "fault"),
                *("server-restarted", "worker-restarted", "worker-gone", "trainer-died"),
                *("link-lost", "diverging"),
            )
        ),
    ),
    "evaluations": ("↘", "Evaluations", frozenset({"evaluated", "evaluated-ema", "sampled"})),
    "changes": ("✎", "Changes", frozenset({"amended", "lanes-dealt", "text-changed", "paced"})),
    "members": (
        "●",
        "Regions",
        frozenset(("joined", "revived", "left", "trainer-started", "trainer-exited", "first-step")),
    ),
    "others": ("◆", "Run", frozenset()),
}

Event = tuple[float, str, str, str]
"""Wall time, kind, region, words."""


def sort_of(kind: str) -> str:
    return next((name for name, (_, _, kinds) in SORTS.items() if kind in kinds), "others")


def event_list(events: Sequence[Event], styles: Mapping[str, str]) -> str:
    counts = Counter(sort_of(kind) for _, kind, _, _ in events)
    filters = "".join(
        f"<label><input type='checkbox' id='show-{name}' checked>{glyph} {title} "
        f"{counts[name]}</label>"
        for name, (glyph, title, _) in SORTS.items()
    )
    chosen = f"<fieldset class='filters'><legend class='unseen'>Show</legend>{filters}</fieldset>"
    listed = event_rows(events, styles) if events else "<p class='quiet'>None yet.</p>"
    return f"{heading('Events', '', '', chosen)}{listed}"


def event_rows(events: Sequence[Event], styles: Mapping[str, str]) -> str:
    rows = "".join(_row(event, styles) for event in events)
    return f"<ul class='events' tabindex='0' aria-label='Events, newest first'>{rows}</ul>"


def _row(event: Event, styles: Mapping[str, str]) -> str:
    at, kind, region, words = event
    sort = sort_of(kind)
    who = f"{mark(styles.get(region, ''))}<bdi>{escape(region)}</bdi>" if region else "server"
    said = kind.replace("-", " ") + (f": {words}" if words else "")
    return (
        f"<li class='{sort}'><time>{clock(at)}</time><span aria-hidden='true'>{SORTS[sort][0]}"
        f"</span><span class='who'>{who}</span><span>{escape(said)}</span></li>"
    )


def clock(at: float | None) -> str:
    """A wall time, in UTC; what no clock shows is not known."""
    if at is None:
        return UNKNOWN
    try:
        return time.strftime("%d %b %H:%M:%S", time.gmtime(at))
    except (OverflowError, OSError, ValueError):
        return UNKNOWN
