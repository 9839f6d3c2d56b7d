"""What a trainer reports of itself: pace, loss and startup times, to the agent and the run log."""

from __future__ import annotations

import contextlib
import itertools
import math
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from diloco_cli.observe.events import EventLog
from diloco_cli.wire.messages import (
    FragmentProgress,
    HostTimes,
    TextCursor,
    TrainerProgress,
)
from diloco_cli.worker.engines import StepFacts
from diloco_cli.worker.mailbox import Mailbox
from diloco_cli.worker.trainer.divergence import DivergenceCount
from diloco_cli.worker.trainer.task import RegionTask
from diloco_cli.worker.trainer.weights_and_books import WeightsAndBooks

MEMORY = 0.1
"""Weight of the newest observation."""
SUSTAINED = 10.0
"""Seconds of steps after which their average is a pace and not a lucky moment."""
STARTUP_PARTS = ("import", "restore", "compile")


class ProgressReport:
    """Reports to the agent, and notes in the run log what people want to know."""

    def __init__(
        self, task: RegionTask, mailbox: Mailbox, events: EventLog, *, tell: Callable[[str], None]
    ) -> None:
        self.task, self.mailbox, self.events, self.tell = task, mailbox, events, tell
        self.averages = TrainingAverages(now=time.monotonic())
        self.divergence = DivergenceCount()
        self.why = "compiling"
        """What the trainer does or waits for, in words."""
        self.trouble = ""
        """What goes wrong meanwhile."""
        self._worked = self._blocked = self._lost = self._pace = self.newly_lost = 0.0
        # A spec that sets the pace has said how fast the region is when nothing is wrong.
        step = task.spec.chaos.step_seconds if task.spec.chaos else None
        speed = task.spec.region(task.region).speed
        self._paced = task.tokens * speed / step if step and task.tokens else 0.0
        self._step = -1

    def realigned(self, weights: WeightsAndBooks, *, since: str) -> None:
        """Tells that the region goes on in the run that continues its own, `since`."""
        self.events.note(
            "realigned",
            region=self.task.region,
            run=weights.run,
            since=since,
            versions=weights.versions,
            held=[book.held.tokens for book in weights.books],
            lost=[book.lost for book in weights.books],
        )

    def resume(self, before: TrainerProgress, weights: WeightsAndBooks) -> None:
        """Takes over what the trainer before had counted; what it did and we lack is lost.

        It reported every few steps, so up to so many more may be lost than we know of.
        """
        self._worked, self._blocked = before.worked, before.blocked
        self._lost, self._pace = before.lost, before.pace
        trained = before.tokens.trained, weights.tokens().trained
        sizes = [fragment.size for fragment in self.task.layout.fragments]
        for size, then, now in zip(sizes, *trained, strict=False):
            self.newly_lost += max(0.0, then - now) * size / sum(sizes)

    def report(
        self,
        weights: WeightsAndBooks,
        *,
        measured: Mapping[str, Any],
        ended: int = 0,
        reading: TextCursor | None = None,
    ) -> None:
        """Tells the agent how far we are; `measured` are the fields that an evaluation fills."""
        averages = self.averages
        averages.read(now=time.monotonic())
        facts = weights.engine.facts() or StepFacts()
        cost, steps = self.task.cost, averages.tokens_per_second / (self.task.tokens or 1)
        progress = TrainerProgress(
            step=weights.clock,
            training=self.why == "training",
            ended=ended,
            fragments=tuple(
                FragmentProgress(version=book.version, steps=max(0.0, book.fresh.steps))
                for book in weights.books
            ),
            tokens=weights.tokens(),
            loss=averages.loss,
            tokens_per_second=averages.tokens_per_second,
            devices=cost.devices if cost else 1,
            tflops=cost.tflops(steps) if cost else None,
            mfu=cost.mfu(steps) if cost else None,
            device_memory=weights.engine.memory(),
            learning_rate=facts.learning_rate,
            gradient_norm=facts.gradient_norm,
            step_seconds=averages.step_seconds,
            hosts=self._hosts(),
            worked=round(self._worked + averages.worked, 3),
            blocked=round(self._blocked + averages.blocked, 3),
            lost=self._lost + self.newly_lost,
            lost_with_server=weights.lost_with_server(),
            pace=self._paced or max(self._pace, averages.pace),
            why=f"{self.why}; {self.trouble}" if self.trouble else self.why,
            **measured,
            reading=reading,
            divergence=self.divergence.report(now=time.monotonic()),
        )
        # A full disk costs the report, not the training.
        with contextlib.suppress(OSError):
            self.mailbox.write_progress(progress)
        self._step = weights.clock
        self.tell("progress")

    def _hosts(self) -> tuple[HostTimes, ...]:
        """How fast each host is: a step takes as long as the slowest of them needs."""
        speeds = self.task.orders.speeds() if self.task.orders else {}
        slowest, step = max(speeds.values(), default=0.0), self.averages.step_seconds
        return tuple(
            HostTimes(host=host, work_seconds=seconds, step_seconds=step * seconds / slowest)
            for host, seconds in sorted(speeds.items())
        )

    def began(self, weights: WeightsAndBooks, startup: StartupTimes, *, resumed: bool) -> None:
        """Notes the first step of this process and what it took to get there."""
        self.events.note(
            "first-step",
            region=self.task.region,
            pid=os.getpid(),
            step=weights.clock,
            resumed=resumed,
            lost=round(self.newly_lost, 1),
            **startup.seconds(),
        )

    def is_due(self, weights: WeightsAndBooks, *, every: int) -> bool:
        """After some steps, and at once when a fragment has enough for a round.

        If that waited for its turn, every round would come up to so many steps late. `every` is
        how many make a round, as the server says now.
        """
        since = weights.clock - self._step
        return since >= max(1, every // len(weights.books)) or any(
            every <= book.fresh.steps < every + since for book in weights.books
        )

    def note(self, why: str) -> None:
        self.events.note("note", region=self.task.region, why=why)


class TrainingAverages:
    """How fast and how well it trains: moving averages, fed by the loop."""

    def __init__(self, *, now: float) -> None:
        self.loss: float | None = None
        self.step_seconds = 0.0
        self.tokens_per_second = 0.0
        self.bad = 0
        """Steps in a row whose loss was not finite."""
        self.worked = 0.0
        """Seconds in steps; pauses and the first step, which compiles, are left out."""
        self.blocked = 0.0
        """Seconds between steps that went into the exchange: mail, new versions, waiting."""
        self._best = self._span = self._span_tokens = 0.0
        self._last_step: float | None = None
        self._since = now
        self._tokens = 0.0

    def lost(self, loss: float) -> None:
        """Notes the loss of a step."""
        if not math.isfinite(loss):
            self.bad += 1
            return
        self.bad = 0
        self.loss = loss if self.loss is None else self.loss + MEMORY * (loss - self.loss)

    def stepped(self, tokens: float, *, now: float) -> None:
        """Notes that a step was made, this long after the one before."""
        self._tokens += tokens
        if self._last_step is not None:
            seconds = now - self._last_step
            before = self.step_seconds
            self.step_seconds = before + MEMORY * (seconds - before) if before else seconds
            self._sustain(seconds, tokens)
        self._last_step = now

    def _sustain(self, seconds: float, tokens: float) -> None:
        self.worked += seconds
        self._span += seconds
        self._span_tokens += tokens
        if self._span >= SUSTAINED:
            self._best = max(self._best, self._span_tokens / self._span)
            self._span = self._span_tokens = 0.0

    @property
    def pace(self) -> float:
        """Tokens per second, the best that was kept up for `SUSTAINED` seconds of steps."""
        return self._best or (self._span_tokens / self._span if self._span else 0.0)

    def paused(self) -> None:
        """The time until the next step is not the time of a step."""
        self._last_step = None

    def read(self, *, now: float) -> None:
        """Brings the speed up to date; time spent waiting counts."""
        seconds = now - self._since
        if seconds <= 0:
            return
        speed, before = self._tokens / seconds, self.tokens_per_second
        # Long spans say all there is to say; short ones only a little.
        share = min(1.0, seconds / 3.0) if before else 1.0
        self.tokens_per_second = before + share * (speed - before)
        self._since, self._tokens = now, 0.0


class StartupTimes:
    """How long a trainer takes from its first instruction to its first inner step.

        import    Python, JAX and everything else is loaded, the process is set up
        restore   data, checkpoint, images: everything it goes on from is in memory
        compile   the first step is traced, loaded from the compile cache or compiled, and done

    A region that lost its trainer stands still for the sum of these.
    """

    def __init__(self, began: float | None = None) -> None:
        self._began = time.time() - process_age() if began is None else began
        self._marks: list[float] = []

    def mark(self) -> None:
        """One part is over, the next one begins."""
        self._marks.append(time.time())

    def seconds(self) -> dict[str, float]:
        """What each part took, and all of them together."""
        edges = [self._began, *self._marks]
        took = [after - before for before, after in itertools.pairwise(edges)]
        parts = {
            name: round(max(0.0, seconds), 3)
            for name, seconds in zip(STARTUP_PARTS, took, strict=False)
        }
        return {**parts, "total": round(max(0.0, edges[-1] - self._began), 3)}


def process_age() -> float:
    """Seconds since this process was started; 0 where the system does not say."""
    try:
        stat = Path("/proc/self/stat").read_text()
        up = float(Path("/proc/uptime").read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return 0.0
    # The name of the program may hold anything, brackets too; what we want comes after it.
    ticks = int(stat.rpartition(")")[2].split()[19])
    return max(0.0, up - ticks / os.sysconf("SC_CLK_TCK"))
