"""What a trainer says about itself: to the agent in every report, to people in the run log."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable
from typing import Any

from diloco_cli.observe.events import EventLog
from diloco_cli.worker.engines.jax_engine import place
from diloco_cli.worker.mailbox import Mailbox
from diloco_cli.worker.trainer.meter import TrainingAverages
from diloco_cli.worker.trainer.startup import StartupTimes
from diloco_cli.worker.trainer.task import Task
from diloco_cli.worker.trainer.weights_and_books import WeightsAndBooks


class ProgressReport:
    def __init__(
        self, task: Task, mailbox: Mailbox, events: EventLog, *, tell: Callable[[str], None]
    ) -> None:
        self.task, self.mailbox, self.events, self.tell = task, mailbox, events, tell
        self.meter = TrainingAverages(now=time.monotonic())
        self.why = "compiling"
        """What the trainer does or waits for, in words."""
        self.trouble = ""
        """What goes wrong meanwhile."""
        self.heldout: dict[str, Any] | None = (mailbox.progress() or {}).get("heldout")
        """The newest evaluation; a restarted trainer does not repeat it."""
        self._evaluated_at = sum(self.heldout["versions"]) if self.heldout else None
        self._worked = self._blocked = self._lost = self._pace = self.newly_lost = 0.0
        # A spec that sets the pace has said how fast the region is when nothing is wrong.
        step = task.spec.chaos.step_seconds if task.spec.chaos else None
        self._paced = task.tokens * task.spec.region(task.region).speed / step if step else 0.0
        self._step = -1
        sync = task.spec.sync
        self._often = max(1, sync.every // sync.fragments)

    def go_on(self, own: WeightsAndBooks) -> None:
        """Takes over what the trainer before had counted; what it did and we lack is lost.

        It reported every few steps, so up to so many more may be lost than we know of.
        """
        before = self.mailbox.progress() or {}
        self._worked, self._blocked, self._lost, self._pace = (
            float(before.get(key) or 0.0) for key in ("worked", "blocked", "lost", "pace")
        )
        trained = (before.get("tokens") or {}).get("trained") or []
        sizes = [fragment.size for fragment in self.task.layout.fragments]
        for size, then, now in zip(sizes, trained, own.tokens()["trained"], strict=False):
            self.newly_lost += max(0.0, then - now) * size / sum(sizes)

    def report(self, own: WeightsAndBooks, *, drained: bool = False) -> None:
        """Tells the agent how far we are, in the words of a heartbeat."""
        self.meter.read(now=time.monotonic())
        progress = {
            "step": own.clock,
            "training": self.why == "training",
            "drained": drained,
            "fragments": [
                {"version": book.version, "steps": max(0.0, book.fresh.steps)} for book in own.books
            ],
            "tokens": own.tokens(),
            "loss": self.meter.loss,
            "tokens_per_second": self.meter.tokens_per_second,
            "step_seconds": self.meter.step_seconds,
            "worked": round(self._worked + self.meter.worked, 3),
            "blocked": round(self._blocked + self.meter.blocked, 3),
            "lost": self._lost + self.newly_lost,
            "pace": self._paced or max(self._pace, self.meter.pace),
            "why": f"{self.why}; {self.trouble}" if self.trouble else self.why,
            "heldout": self.heldout,
        }
        # A full disk costs the report, not the training.
        with contextlib.suppress(OSError):
            self.mailbox.write_progress(progress)
        self._step = own.clock
        self.tell("progress")

    def began(self, own: WeightsAndBooks, startup: StartupTimes, *, resumed: bool) -> None:
        """Notes the first step of this process and what it took to get there."""
        about = {"region": self.task.region, "pid": os.getpid(), "step": own.clock}
        facts = {"resumed": resumed, "lost": round(self.newly_lost, 1)}
        self.events.note("first-step", **about, **facts, **startup.seconds())

    def is_due(self, own: WeightsAndBooks) -> bool:
        """After some steps, and at once when a fragment has enough for a round.

        If that waited for its turn, every round would come up to so many steps late.
        """
        since, every = own.clock - self._step, self.task.spec.sync.every
        return since >= self._often or any(
            every <= book.fresh.steps < every + since for book in own.books
        )

    def evaluation_is_due(self, own: WeightsAndBooks) -> bool:
        """Says whether the global weights have moved far enough since the last evaluation."""
        if self._evaluated_at is None:
            return True
        unit = self.task.spec.evaluate.every * self.task.spec.sync.fragments
        return sum(own.versions) // unit > self._evaluated_at // unit

    def evaluate(self, own: WeightsAndBooks) -> None:
        """Measures the held-out loss of the published weights, as adopted."""
        batches = self.task.stream.heldout(self.task.spec.evaluate.batches)
        loss = self.task.step.evaluate(place(own.published()), batches)
        self._evaluated_at = sum(own.versions)
        if math.isfinite(loss):
            self.heldout = {"versions": own.versions, "loss": loss}
        else:  # No number, so nothing that could be reported as one.
            self.note(f"the held-out loss of versions {own.versions} is {loss}")
        self.meter.paused()

    def note(self, why: str) -> None:
        self.events.note("note", region=self.task.region, why=why)
