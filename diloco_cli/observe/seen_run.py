"""The past of a run, as somebody sees it who looks at its status again and again.

Where the run's folder is at hand, its history and its log say what was before the first look, and
what happened between two.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

from diloco_cli.observe.event_file import EventReader, newest_id
from diloco_cli.observe.events import parse
from diloco_cli.observe.history import ROUND_KINDS, History, RoundRecord, Seconds
from diloco_cli.observe.status import Status

HISTORY, LOG = "history.npz", "events.jsonl"
MOST_BATCHES = 8
"""Of new lines that one look takes; the rest waits for the next."""


class SeenRun:
    """Curves and the last rounds of a run."""

    def __init__(self, folder: Path | None = None, wall: Callable[[], float] = time.time) -> None:
        self.history = History(1)
        self.now: Seconds = 0.0
        self._wall = wall
        self._log: EventReader | None = None
        if folder is None:
            return
        try:
            self.history.load((folder / HISTORY).read_bytes())
        except (OSError, ValueError):
            self.history = History(1)  # Begun anew: what was before is not known.
        self._log = EventReader(folder / LOG, newest_id(folder / LOG))

    @property
    def rounds(self) -> list[RoundRecord]:
        return self.history.rounds.all

    def look(self, status: Status) -> None:
        """Takes a fresh status document, and what was logged since the last."""
        if status.reachable is False:
            return
        self.now = status.seconds
        self.history.sample(status.seconds, status)
        began = self._wall() - status.seconds
        for _ in range(MOST_BATCHES):
            lines = self._log.more() if self._log else []
            for line in lines:
                event = parse(line.text)
                if event is None:
                    continue
                at = event.time - began
                if event.kind in ROUND_KINDS:
                    # A line that was cut short lacks what it is about.
                    with contextlib.suppress(KeyError, TypeError, ValueError):
                        self.history.rounds.note(event.kind, event.fields, at)
                elif event.kind == "adopted":
                    self._adopted(event.fields, at)
            if not lines:
                return

    def _adopted(self, fields: dict[str, object], at: Seconds) -> None:
        for record in reversed(self.rounds):
            made = (record.fragment, record.version + 1)
            if made == (fields.get("fragment"), fields.get("version")):
                record.adopted.setdefault(str(fields.get("region")), at)
                return
