"""A region of a rehearsal that really trains, on a virtual clock.

When a step ends, how long a frame travels and when somebody dies are the simulator's
business; weights, books and frames are those of a live trainer
(`worker/trainer/weights_and_books.py`). Steps are made when
their result is asked for, not one by one as time passes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from diloco_cli.core import unmerged_work
from diloco_cli.core.fragments import scatter
from diloco_cli.core.pace import Report
from diloco_cli.core.unmerged_work import Book
from diloco_cli.sim.region import SimulatedRegion
from diloco_cli.sim.scenario import Recovery, RegionSite, Scenario
from diloco_cli.wire.frame import Frame, open_frame
from diloco_cli.worker.mailbox import Fate, Image
from diloco_cli.worker.trainer.checkpoints.checkpoint import Checkpoint
from diloco_cli.worker.trainer.checkpoints.resume import (
    RegionPlace,
    ResumePoint,
    newest_cursor,
    resume_fragment,
)
from diloco_cli.worker.trainer.mail import IncomingImage
from diloco_cli.worker.trainer.task import Task
from diloco_cli.worker.trainer.weights_and_books import TrainedWeights

Seconds = float
RUN = "rehearsal"


class TrainingSetup(Protocol):
    """What a learner needs of the play it takes part in."""

    def image(self, fragment: int, number: int) -> Image: ...

    def newest(self, fragment: int) -> Image: ...

    def posted(self, frame: Frame) -> None:
        """Takes the bytes that travel."""
        ...

    def train_until(self, now: float) -> None:
        """Makes every step that has ended by now, of all learners."""
        ...

    def lost(self, tokens: float) -> None:
        """Tokens that a death undid: nobody has them."""
        ...


@dataclass(frozen=True)
class TrainingOptions:
    """How a learner differs from a plain one."""

    lockstep: bool = False
    """Makes `every` steps and then stands still until a new version comes."""
    checkpoint: int | None = None
    """Steps between two checkpoints; None where nobody dies."""


class TrainingRegion(SimulatedRegion):
    """One site's trainer with its arrays; time passes as in any simulated region."""

    def __init__(
        self,
        site: RegionSite,
        scenario: Scenario,
        task: Task,
        around: TrainingSetup,
        habits: TrainingOptions,
    ) -> None:
        super().__init__(site, scenario)
        self.task, self.around, self.habits = task, around, habits
        self.sent: dict[int, Frame] = {}
        """The outbox: the newest frame of each fragment."""
        first = [around.newest(number) for number in range(len(scenario.sizes))]
        book, _ = unmerged_work.start(None, None, task.alpha)
        self.own = self._holdings(
            [replace(book, version=0) for _ in first],
            [image.weights for image in first],
        )
        self.saved = self.own.checkpoint() if habits.checkpoint else None
        self.keeps = False
        if habits.lockstep:
            self.reports_after = 1  # Whoever stands still could not say so later.

    def _holdings(
        self,
        books: list[Book],
        anchors: list[np.ndarray],
        saved: Checkpoint | None = None,
        params: dict[str, np.ndarray] | None = None,
    ) -> TrainedWeights:
        standing = ResumePoint(
            books=books,
            anchors=anchors,
            params=params or self.task.model.init(self.task.spec.seed),
            opt_state=saved.opt_state if saved else None,
            cursor=newest_cursor(saved, self.sent.values()) if saved else None,
            clock=max([saved.clock if saved else 0, *(book.posted for book in books)]),
            resumed=saved is not None,
        )
        return TrainedWeights(self.task, standing, run=RUN)

    # Time

    def advance(self, now: Seconds) -> None:
        """Makes the steps that have ended by now, together with the others'."""
        self.around.train_until(now)

    def due(self, now: Seconds) -> int:
        """Counts the steps that have ended by now and are still to be made."""
        before = self.steps
        super().advance(now)
        made = self.steps - before
        if self.habits.lockstep and made:
            room = max(0, round(self.every - self.own.books[0].held.steps))
            if made >= room:
                self.waiting = True
                self.productive -= (made - room) * self.current
                self.steps, made = before + room, room
        return made

    def stepped(self) -> None:
        """Writes a checkpoint when one is due after a step."""
        if self.habits.checkpoint and self.own.clock % self.habits.checkpoint == 0:
            self.saved = self.own.checkpoint()

    # Work, with numbers in it

    def book(self, number: int) -> Book:
        return self.own.books[number]

    def reports(self) -> list[Report]:
        return [Report(book.version, max(0.0, book.fresh.steps)) for book in self.own.books]

    def post(self, number: int, called: int) -> Book | None:
        if not self.own.may_answer(number, called):
            return None
        self.send(number)
        return self.own.books[number]

    def send(self, number: int) -> Frame:
        """Encodes all that is held of a fragment and puts it in flight."""
        header, work = self.own.post(number)
        frame = open_frame(work.pack(header, level=self.task.spec.wire.zstd))
        self.own.written(number, header.clock, frame.digest)
        self.sent[number] = frame
        self.around.posted(frame)
        return frame

    def adopt(self, number: int, version: int, merged: str) -> bool:
        if version <= self.own.books[number].version:
            return False
        sent = self.sent.get(number)
        ours = sent.values() if sent and sent.digest == merged else None
        image = self.around.image(number, version)
        self.own.adopt(number, IncomingImage(image, merged, image.weights, ours))
        return True

    def answered(self, number: int, digest: str, fate: str) -> None:
        self.own.answered(number, Fate(digest, fate, ""))  # pyright: ignore[reportArgumentType]

    def waits(self) -> bool:
        books = self.own.books
        if self.habits.lockstep and books[0].held.steps >= self.every:
            return True
        return unmerged_work.waits_for(books, self.calls) is not None

    # Death

    def stop(self, recovery: Recovery, *, now: Seconds, keeps: bool = False) -> None:
        """The process ends here; `start` goes back to what a disk would have."""
        self.advance(now)
        self.training = self.waiting = False
        self.keeps = keeps

    def start(self, *, now: Seconds) -> None:
        if not self.training and not self.keeps:
            if not self.alive:
                self._begin_anew()
            elif self.saved is not None:
                self._restore(self.saved)
        super().start(now=now)

    def _begin_anew(self) -> None:
        """Stands on the newest weights with a fresh optimiser, as a region without its disk."""
        before = self._trained()
        newest = [self.around.newest(number) for number in range(len(self.sizes))]
        books = [
            Book(image.version, image.merged.get(self.name, ""), posted=book.posted)
            for image, book in zip(newest, self.own.books, strict=True)
        ]
        anchors = [image.weights for image in newest]
        params = self.task.model.init(self.task.spec.seed)
        for fragment, anchor in zip(self.task.layout.fragments, anchors, strict=True):
            scatter(anchor, fragment, params)
        merged = self._merged()
        self.sent.clear()
        self.own = self._holdings(books, anchors, None, params)
        self.saved = self.own.checkpoint() if self.habits.checkpoint else None
        self.around.lost(before - merged)

    def _restore(self, saved: Checkpoint) -> None:
        """Stands where checkpoint, outbox and the images adopted so far say, as a trainer does."""
        before = self._trained()
        place = RegionPlace(self.name, self.task.layout, self.task.alpha)
        books, anchors, params = [], [], dict(saved.params)
        for fragment in self.task.layout.fragments:
            number = fragment.number
            image = self.around.image(number, self.own.books[number].version)
            book, anchor, local = resume_fragment(
                place, fragment, saved, self.sent.get(number), image
            )
            books.append(book)
            anchors.append(anchor)
            scatter(local, fragment, params)
        self.own = self._holdings(books, anchors, saved, params)
        self.around.lost(before - self._trained())

    def _trained(self) -> float:
        return self._together([book.totals.trained for book in self.own.books])

    def _merged(self) -> float:
        return self._together([book.totals.applied for book in self.own.books])

    def _together(self, tokens: Sequence[float]) -> float:
        """Tokens of the whole model, of those of each fragment."""
        sizes = [fragment.size for fragment in self.task.layout.fragments]
        return sum(a * b for a, b in zip(sizes, tokens, strict=True)) / sum(sizes)
