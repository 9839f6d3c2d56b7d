"""A region's weights, anchors and books, which only ever move together.

`core/unmerged_work` keeps the books of every fragment and answers each change with a
`Mix`; here the mix is applied to the arrays in the same act. For every fragment, at any time:

    held = anchor − local        local = the fragment's weights, in the engine
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from typing import Any, SupportsFloat

import numpy as np

from diloco_cli.core import unmerged_work
from diloco_cli.core.fragments import Fragment, scatter
from diloco_cli.core.lanes import Cursor
from diloco_cli.core.unmerged_work import DROP, KEEP, Mix, Totals
from diloco_cli.wire.frame import Header
from diloco_cli.wire.messages import Tokens
from diloco_cli.worker.engines import Engine, HeldWork, Vector
from diloco_cli.worker.mailbox import Fate
from diloco_cli.worker.trainer.checkpoints.checkpoint import Checkpoint
from diloco_cli.worker.trainer.checkpoints.resume import ResumePoint, SavedTerms, write_book
from diloco_cli.worker.trainer.mail import IncomingImage
from diloco_cli.worker.trainer.task import RegionTask, Task

UNFIT = "unfit"
"""Stands for the digest of a frame that could not even be written."""


class WeightsAndBooks:
    def __init__(
        self,
        task: RegionTask,
        start: ResumePoint,
        engine: Engine,
        *,
        run: str,
        owner: str = "",
    ) -> None:
        """`engine` is where the weights are; it goes on from `start`."""
        self.task = task
        self.run, self.owner = run, owner
        self.books = start.books
        self.clock = start.clock
        self.cursor = Cursor() if start.cursor is None else start.cursor
        before = start.terms
        self.since = before.since if before and before.number == task.terms else self.clock
        """The clock at which the region began to train under these terms."""
        self.engine = engine
        self.anchors: list[Vector] = [
            self.engine.keep(fragment, anchor)
            for fragment, anchor in zip(task.layout.fragments, start.anchors, strict=True)
        ]
        same_kind = before is not None and before.optimizer == task.optimizer
        self.new_optimizer = not self.engine.load(
            start.params,
            start.opt_state if same_kind else None,
        )
        """The optimiser begins without averages, as at the start or after a change of its kind."""

    @property
    def versions(self) -> list[int]:
        """The adopted version of each fragment."""
        return [book.version for book in self.books]

    @property
    def trained(self) -> float:
        """Tokens since the folder began, of the fragment of which most were trained."""
        return max(book.totals.trained for book in self.books)

    def stepped(self, cursor: Cursor, tokens: float) -> None:
        """Books one inner step that was made with so many tokens."""
        self.cursor = cursor
        self.clock += 1
        self.books = [unmerged_work.step(book, tokens) for book in self.books]

    def held(self, number: int) -> np.ndarray:
        """Copies what is held of a fragment to the host; waits for the step in progress."""
        return self.anchor(number) - self.engine.read(self._fragment(number))

    def anchor(self, number: int) -> np.ndarray:
        """The published weights of a fragment, as adopted."""
        return np.asarray(self.anchors[number])[: self._fragment(number).size]

    def keep(self, number: int, values: np.ndarray) -> Vector:
        """Brings values of a fragment to where they can be adopted; any thread may ask for it."""
        return self.engine.keep(self._fragment(number), values)

    def may_answer(self, number: int, called: int) -> bool:
        return unmerged_work.may_answer(self.books[number], called)

    def post(self, number: int) -> tuple[Header, HeldWork]:
        """Puts all that is held of a fragment in flight; gives what the frame is made of."""
        fragment, codec = self._fragment(number), self.task.spec.wire.up
        work = self.engine.held(fragment, self.anchors[number], codec)
        book, clock = unmerged_work.post(self.books[number], self.clock)
        self.books[number], self.clock = book, max(self.clock, clock)
        flight = book.flight
        assert flight is not None
        header = Header.contribution(
            run=self.run,
            layout=self.task.layout.digest,
            fragment=number,
            size=fragment.size,
            codec=codec,
            base=flight.base,
            region=self.task.region,
            clock=clock,
            prev=flight.prev,
            tokens=flight.work.tokens,
            steps=flight.work.steps,
            totals=_not_negative(book.totals),
            cursor=self.cursor.as_record(),
        )
        return header, work

    def written(self, number: int, clock: int, digest: str) -> None:
        self.books[number] = unmerged_work.written(self.books[number], clock, digest)

    def answered(self, number: int, fate: Fate) -> bool:
        """Takes note of the server's answer; says whether it changed anything."""
        book, mix = unmerged_work.answered(
            self.books[number], fate.digest, fate.fate, forgotten=fate.forgotten
        )
        changed = book is not self.books[number]
        self.books[number] = book
        self._apply(number, mix)
        return changed

    def adopt(self, number: int, arrived: IncomingImage) -> bool:
        """Goes on from a newer version; says whether it merged the frame in flight."""
        before = self.books[number]
        book, mix = unmerged_work.settle(
            before, arrived.image.version, arrived.merged, self.task.alpha
        )
        self.books[number] = book
        self._move(number, arrived.weights, mix, arrived.flight)
        return before.flight is not None and before.flight.digest == arrived.merged

    def replace_anchor(self, number: int, arrived: IncomingImage) -> None:
        """Goes on from other bits of the version already adopted; all that is held stays."""
        if not np.array_equal(self.anchor(number), arrived.image.weights):
            self._move(number, arrived.weights, KEEP)

    def abandon(self, number: int) -> None:
        """Gives up what is not merged."""
        self.books[number], mix = unmerged_work.abandon(self.books[number])
        self._apply(number, mix)

    def refuse(self, number: int) -> None:
        """Drops work that is unfit to be sent, as if the server had refused it."""
        book = self.books[number]
        flight = book.flight
        if flight and flight.digest:
            # A sound frame travels; only what came after it goes. Adopting the same version
            # again with alpha 0 does exactly that.
            book, mix = unmerged_work.settle(book, book.version, flight.prev, 0.0)
        else:
            if flight is None:
                book, self.clock = _grounded(book, self.clock)
            clock = book.posted
            book, mix = unmerged_work.answered(
                unmerged_work.written(book, clock, UNFIT), UNFIT, "refused"
            )
        self.books[number] = book
        self._apply(number, mix)

    def is_finite(self, number: int) -> bool:
        return bool(np.isfinite(self.held(number)).all())

    def published(self) -> dict[str, np.ndarray]:
        """Puts the global weights together, as adopted, without our own work."""
        weights = {tensor.name: np.empty(tensor.shape, np.float32) for tensor in self.task.tensors}
        for fragment in self.task.layout.fragments:
            scatter(self.anchor(fragment.number), fragment, weights)
        return weights

    def checkpoint(self) -> Checkpoint:
        """Copies everything to the host, all of one step."""
        snapshot = self.engine.snapshot()
        return Checkpoint(
            params=snapshot.params,
            opt_state=snapshot.optimizer,
            anchors=[self.anchor(number) for number in range(len(self.anchors))],
            cursor=self.cursor,
            clock=self.clock,
            step=self.clock,
            **self.notes(snapshot.place),
        )

    def notes(self, place: int) -> dict[str, Any]:
        """The plain part of a checkpoint that is made at a place of the schedule."""
        return {
            "books": [write_book(book) for book in self.books],
            "meta": {
                "run": self.run,
                "layout": self.task.layout.digest,
                "owner": self.owner,
                "region": self.task.region,
                "terms": self._terms(place).as_record(),
            },
        }

    def _terms(self, place: int) -> SavedTerms:
        task = self.task
        return SavedTerms(task.terms, self.since, task.optimizer, place, task.rate)

    def tokens(self) -> Tokens:
        """Tokens by fate, for each fragment."""
        fates = [_not_negative(book.totals) for book in self.books]
        return Tokens(
            **{fate: tuple(totals[fate] for totals in fates) for fate in fates[0]},
            pending=tuple(max(0.0, book.pending) for book in self.books),
        )

    def lost_with_server(self) -> float:
        """Tokens that went with the server whose run this one continues; the fragments' mean."""
        return self._mean(max(0.0, book.lost) for book in self.books)

    def given_up(self) -> float:
        """Tokens whose work was refused or discarded; the fragments' mean."""
        return self._mean(book.totals.refused + book.totals.discarded for book in self.books)

    def _mean(self, amounts: Iterable[float]) -> float:
        sizes = [fragment.size for fragment in self.task.layout.fragments]
        pairs = zip(sizes, amounts, strict=True)
        return sum(size * amount for size, amount in pairs) / sum(sizes)

    def _fragment(self, number: int) -> Fragment:
        return self.task.layout.fragments[number]

    def _apply(self, number: int, mix: Mix) -> None:
        if mix == KEEP:
            return
        assert mix == DROP  # Only adopting an image mixes; everything else keeps or drops.
        self._move(number, self.anchors[number], DROP)

    def _move(self, number: int, anchor: Vector, mix: Mix, flight: Vector | None = None) -> None:
        """Goes on from an anchor with what the mix leaves of all that is held."""
        fragment, before = self._fragment(number), self.anchors[number]
        self.engine.adopt(fragment, before, anchor, mix, flight)
        self.anchors[number] = anchor


class TrainedWeights(WeightsAndBooks):
    """Those of the built-in trainer, whose engine makes the steps."""

    def __init__(self, task: Task, start: ResumePoint, *, run: str, owner: str = "") -> None:
        self.stepper, self.stream = task.step.engine(), task.stream
        super().__init__(task, start, self.stepper, run=run, owner=owner)
        self.tokens_a_step = task.tokens
        if start.cursor is None:
            self.cursor = task.stream.start()

    def train(self, place: int | None = None) -> SupportsFloat:
        """Makes one inner step; gives its loss, which may not be computed yet.

        `place` is where in the learning-rate schedule it is; one further than the last if not said.
        """
        if place is not None:
            self.stepper.place(place)
        tokens, cursor = self.stream.batch(self.cursor)
        loss = self.stepper.step(tokens)
        self.stepped(cursor, self.tokens_a_step)
        return loss


def _grounded(book: unmerged_work.Book, clock: int) -> tuple[unmerged_work.Book, int]:
    book, posted = unmerged_work.post(book, clock)
    return book, max(clock, posted)


def _not_negative(totals: Totals) -> dict[str, float]:
    # Blending leaves differences of large numbers; what is a hair below zero is zero.
    return {fate: max(0.0, amount) for fate, amount in asdict(totals).items()}
