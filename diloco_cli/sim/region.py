"""A region as time sees it: steps, frames and versions without any numbers in them.

The books are those of `core/unmerged_work`, as in a real trainer; only the training itself is
replaced by the time it takes. Steps are counted when somebody asks, not one by one.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import replace

from diloco_cli.core import unmerged_work
from diloco_cli.core.pace import Report
from diloco_cli.core.unmerged_work import Book, Totals, Work
from diloco_cli.sim.network import Lane
from diloco_cli.sim.scenario import Recovery, RegionSite, Scenario

Seconds = float
A_HAIR = 1e-9
"""A step that ends so soon after a moment ended in it: floats add up differently."""


class SimulatedRegion:
    """One site's trainer, its agent and its two lanes."""

    __slots__ = (
        *(
            "alpha",
            "alive",
            "beats",
            "began",
            "books",
            "calls",
            "chance",
            "current",
            "deaths",
            "down",
            "every",
            "failing",
        ),
        *("factor", "images", "lost_seconds", "marks", "name", "productive", "reports_after"),
        *("saved_at", "site", "sizes", "steps", "training", "up", "waiting", "whole"),
    )

    def __init__(self, site: RegionSite, scenario: Scenario) -> None:
        self.site, self.name = site, site.name
        self.sizes, self.whole = scenario.sizes, scenario.parameters
        self.alpha = scenario.sync.alpha
        self.chance = random.Random(f"{scenario.seed} steps {site.name}")
        self.books = [Book(version=0) for _ in scenario.sizes]
        self.marks = [0] * len(scenario.sizes)
        """Steps that are in each fragment's books already."""
        self.images: dict[int, tuple[int, str]] = {}
        """Versions that arrived and are not adopted yet, each with our last merged frame."""
        self.calls: dict[int, int] = {}
        self.steps, self.factor, self.beats, self.deaths = 0, 1.0, 0, 0
        self.training, self.alive, self.failing, self.waiting = True, True, False, False
        self.began = self.saved_at = 0.0
        self.current = self._draw()
        self.productive = self.lost_seconds = 0.0
        self.up, self.down = Lane(site.upward), Lane(site.link)
        sync = scenario.sync
        self.every = sync.every
        self.reports_after = max(1, sync.every // sync.fragments)

    def _draw(self) -> Seconds:
        mean = self.site.step * self.factor
        if not self.site.jitter:
            return mean
        return max(0.1 * mean, self.chance.gauss(mean, self.site.jitter * mean))

    # Time

    def advance(self, now: Seconds) -> None:
        """Counts the steps that have ended by now."""
        if not self.training or self.waiting:
            return
        over = now + A_HAIR * max(1.0, now)
        if not self.site.jitter:
            ended = math.floor((over - self.began) / self.current)
            if ended > 0:
                self.steps += ended
                self.began += ended * self.current
                self.productive += ended * self.current
            return
        while self.began + self.current <= over:
            self.steps += 1
            self.began += self.current
            self.productive += self.current
            self.current = self._draw()

    def boundary(self, now: Seconds) -> Seconds:
        """When the step under way ends; now, where none is or none had begun."""
        self.advance(now)
        if not self.training or self.waiting or now - self.began <= A_HAIR * max(1.0, now):
            return now
        return self.began + self.current

    def paced(self, factor: float, *, now: Seconds) -> None:
        """Changes the speed; the step under way starts over at the new one."""
        self.advance(now)
        self.factor, self.began = factor, now
        self.current = self._draw()

    # Work

    def book(self, number: int) -> Book:
        """The fragment's books with every step in them."""
        book, made = self.books[number], self.steps - self.marks[number]
        if made:
            tokens, old, held = made * self.site.tokens, book.totals, book.held
            # Written out: `replace` would take half of the time of a large simulation.
            totals = Totals(old.trained + tokens, old.applied, old.refused, old.discarded)
            held = Work(held.tokens + tokens, held.steps + made)
            book = Book(book.version, book.prev, held, book.flight, book.posted, totals)
            self.books[number], self.marks[number] = book, self.steps
        return book

    def reports(self) -> list[Report]:
        """What a heartbeat says: held and not in flight, by fragment."""
        reports, steps = [], self.steps
        for book, mark in zip(self.books, self.marks, strict=True):
            fresh = book.fresh.steps if book.flight else book.held.steps
            reports.append(Report(book.version, max(0.0, fresh + steps - mark)))
        return reports

    def until_report(self, reports: Sequence[Report]) -> int:
        """Steps until the next report: after some, or when a fragment has enough for a round."""
        missing = (
            math.ceil(self.every - report.steps) for report in reports if report.steps < self.every
        )
        return min([self.reports_after, *missing])

    def post(self, number: int, called: int) -> Book | None:
        """Puts all that is held in flight if the call may be answered."""
        if not unmerged_work.may_answer(self.book(number), called):
            return None
        book, clock = unmerged_work.post(self.books[number], self.steps)
        book = unmerged_work.written(book, clock, f"{self.name}/{number}/{clock}")
        self.books[number] = book
        return book

    def adopt(self, number: int, version: int, merged: str) -> bool:
        """Goes on from a newer version; says whether anything changed."""
        book = self.book(number)
        if version <= book.version:
            return False
        self.books[number], _ = unmerged_work.settle(book, version, merged, self.alpha)
        return True

    def answered(self, number: int, digest: str, fate: str) -> None:
        self.books[number], _ = unmerged_work.answered(self.book(number), digest, fate)

    def waits(self) -> bool:
        """Whether a region without overlap stands still now."""
        return unmerged_work.waits_for(self.books, self.calls) is not None

    # Death

    def stop(self, recovery: Recovery, *, now: Seconds, keeps: bool = False) -> None:
        """The training ends here; what no disk has is lost."""
        self.advance(now)
        self.training = False
        self.waiting = False
        if keeps:
            return
        since = now - max(self.saved_at, 0.0)
        kept = math.floor(since / recovery.checkpoint) * recovery.checkpoint
        since = since if math.isinf(recovery.checkpoint) else since - kept
        lost = math.ceil(since / (self.site.step * self.factor) - A_HAIR)
        share = 0.0
        for number, size in enumerate(self.sizes):
            share += size * self._lose(number, lost)
        self.lost_seconds += share / self.whole * self.site.step

    def _lose(self, number: int, steps: int) -> float:
        book = self.book(number)
        gone = max(0.0, min(float(steps), book.fresh.steps))
        if gone:
            part = book.fresh.scaled(gone / book.fresh.steps)
            totals = replace(book.totals, discarded=book.totals.discarded + part.tokens)
            self.books[number] = replace(book, held=book.held - part, totals=totals)
        return gone

    def start(self, *, now: Seconds) -> None:
        self.training = self.alive = True
        self.failing = self.waiting = False
        self.began = self.saved_at = now
        self.current = self._draw()
