"""What the run log still tells of a run when its server does not answer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from diloco_cli.observe.events import Event
from diloco_cli.observe.status import LastKnown, LossStatus

_STATES = {
    "server-started": "training",
    "run-ended": "draining",
    "run-finished": "finished",
    "run-stopped": "stopped",
}
_LEASES = {"revived": "joined", **{word: word for word in ("joined", "lapsed", "left", "retired")}}


def last_known(events: Iterable[Event]) -> LastKnown:
    """Folds the run log; if its oldest events are not kept, sums and firsts are the rest's."""
    run = _RunLogSums()
    for event in events:
        run.place(event)
        run.count(event)
    steps = max(run.outer_steps, sum(run.newest.values()))
    return LastKnown(
        state=run.state,
        outer_steps=steps,
        tokens=run.tokens,
        loss=run.loss,
        wire=run.wire,
        regions=run.regions,
        away=run.away,
        **run.times,
    )


class _RunLogSums:
    """What the events read so far amount to."""

    def __init__(self) -> None:
        self.state, self.outer_steps, self.loss = "unknown", 0, LossStatus()
        self.tokens: dict[str, float] = {}
        self.wire: dict[str, int] = {}
        self.regions: dict[str, str] = {}
        self.away: dict[str, float] = {}
        self.times: dict[str, Any] = {}
        self.newest: dict[int, int] = {}
        self._served = 0.0

    def place(self, event: Event) -> None:
        """Says after an event what the run does, and which regions are there."""
        kind, region = event.kind, event.fields.get("region")
        # A region whose first events are not kept any more is known by its later ones.
        if kind in _STATES:
            self.state = _STATES[kind]
        elif self.state == "unknown" and event.process == "server":
            self.state = "training"
        if kind == "accepted" and region:
            self.regions.setdefault(region, "joined")
        left = self.regions.get(region or "") == "left"
        if kind in _LEASES and region and not (left and kind == "lapsed"):
            self.regions[region] = _LEASES[kind]
        if kind == "link-lost" and region:
            self.away.setdefault(region, event.time)
        elif kind in ("link-back", "trainer-started"):  # No trainer starts without a server.
            self.away.pop(region or "", None)

    def count(self, event: Event) -> None:
        """Adds an event to the times and to the figures that only grow."""
        fields = event.fields
        self.times["time"] = event.time
        if event.kind == "server-started":
            self.times["url"] = fields.get("url")
            # What a crash kept from the log is in the journal, which the server has read.
            self.outer_steps = max(self.outer_steps, fields.get("recovered") or 0)
            self._served = self.times.get("wall_seconds", 0.0)
        if event.process == "server":
            self.times["wall_seconds"] = round(self._served + event.seconds, 1)
        if event.kind == "published":
            self.outer_steps += 1
            if "version" in fields:
                self.newest[fields["fragment"]] = fields["version"]
            if fields.get("tokens") is not None:
                self.tokens["applied"] = fields["tokens"]
        if event.kind == "accepted":
            self.wire["bytes_up"] = self.wire.get("bytes_up", 0) + (fields.get("bytes") or 0)
        if event.kind == "evaluated" and (loss := fields.get("loss")) is not None:
            self._evaluated(loss, sum(fields.get("versions") or ()))

        if event.kind == "evaluated-ema" and (loss := fields.get("loss")) is not None:
            changes = {"ema": loss, "ema_at": sum(fields.get("versions") or ())}
            self.loss = self.loss.model_copy(update=changes)

    def _evaluated(self, loss: float, at: int) -> None:
        known = self.loss
        changes: dict[str, Any] = {"heldout": loss, "heldout_at": at}
        if known.first is None:
            changes |= {"first": loss, "first_at": at}
        if known.best is None or loss < known.best:
            changes |= {"best": loss, "best_at": at}
        self.loss = known.model_copy(update=changes)
