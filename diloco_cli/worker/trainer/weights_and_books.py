"""A region's weights, anchors and books, which only ever move together.

`core/unmerged_work` keeps the books of every fragment and answers each change with a
`Mix`; here the mix is applied to the arrays in the same act. For every fragment, at any time:

    held = anchor − local        local = the fragment's weights, in the engine
"""

from __future__ import annotations

from dataclasses import asdict
from typing import SupportsFloat

import numpy as np

from diloco_cli.core import unmerged_work
from diloco_cli.core.fragments import Fragment, scatter
from diloco_cli.core.unmerged_work import DROP, KEEP, Mix, Totals
from diloco_cli.data import Cursor
from diloco_cli.wire.frame import Header
from diloco_cli.wire.messages import Tokens
from diloco_cli.worker.mailbox import Fate
from diloco_cli.worker.trainer.checkpoint import Checkpoint
from diloco_cli.worker.trainer.mail import IncomingImage
from diloco_cli.worker.trainer.resume import ResumePoint, mixed, write_book
from diloco_cli.worker.trainer.task import Task

UNFIT = "unfit"
"""Stands for the digest of a frame that could not even be written."""


class WeightsAndBooks:
    def __init__(self, task: Task, start: ResumePoint, *, run: str, owner: str = "") -> None:
        self.task = task
        self.run, self.owner = run, owner
        self.books = start.books
        self.anchors = start.anchors
        self.clock = start.clock
        self.cursor = task.stream.start() if start.cursor is None else start.cursor
        self.engine = task.step.engine()
        self.engine.load(start.params, start.opt_state)

    @property
    def versions(self) -> list[int]:
        """The adopted version of each fragment."""
        return [book.version for book in self.books]

    def train(self) -> SupportsFloat:
        """Makes one inner step; gives its loss, which may not be computed yet."""
        tokens, cursor = self.task.stream.batch(self.cursor)
        loss = self.engine.step(tokens)
        self.stepped(cursor)
        return loss

    def stepped(self, cursor: Cursor) -> None:
        """Books one inner step that the engine has made."""
        self.cursor = cursor
        self.clock += 1
        self.books = [unmerged_work.step(book, self.task.tokens) for book in self.books]

    def held(self, number: int) -> np.ndarray:
        """Copies what is held of a fragment to the host; waits for the step in progress."""
        return self.anchors[number] - self.engine.read(self._fragment(number))

    def may_answer(self, number: int, called: int) -> bool:
        return unmerged_work.may_answer(self.books[number], called)

    def post(self, number: int) -> tuple[Header, np.ndarray]:
        """Puts all that is held of a fragment in flight; gives what the frame is made of."""
        values = self.held(number)
        book, clock = unmerged_work.post(self.books[number], self.clock)
        self.books[number], self.clock = book, max(self.clock, clock)
        flight = book.flight
        assert flight is not None
        header = Header.contribution(
            run=self.run,
            layout=self.task.layout.digest,
            fragment=number,
            size=values.size,
            codec=self.task.spec.wire.up,
            base=flight.base,
            region=self.task.region,
            clock=clock,
            prev=flight.prev,
            tokens=flight.work.tokens,
            steps=flight.work.steps,
            totals=_not_negative(book.totals),
            cursor=self.cursor,
        )
        return header, values

    def written(self, number: int, clock: int, digest: str) -> None:
        self.books[number] = unmerged_work.written(self.books[number], clock, digest)

    def answered(self, number: int, fate: Fate) -> bool:
        """Takes note of the server's answer; says whether it changed anything."""
        book, mix = unmerged_work.answered(self.books[number], fate.digest, fate.fate)
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
        held = self.held(number) if mix.held else np.zeros_like(self.anchors[number])
        self.books[number] = book
        self.anchors[number] = arrived.image.weights
        self._place(number, mixed(held, mix, arrived.flight))
        return before.flight is not None and before.flight.digest == arrived.merged

    def replace_anchor(self, number: int, anchor: np.ndarray) -> None:
        """Goes on from other bits of the version already adopted; all that is held stays."""
        if np.array_equal(self.anchors[number], anchor):
            return
        held = self.held(number)
        self.anchors[number] = anchor
        self._place(number, held)

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
        weights = {
            tensor.name: np.empty(tensor.shape, np.float32) for tensor in self.task.model.tensors()
        }
        for fragment, anchor in zip(self.task.layout.fragments, self.anchors, strict=True):
            scatter(anchor, fragment, weights)
        return weights

    def checkpoint(self) -> Checkpoint:
        """Copies everything to the host, all of one step."""
        snapshot = self.engine.snapshot()
        return Checkpoint(
            params=snapshot.params,
            opt_state=snapshot.optimizer,
            anchors=list(self.anchors),
            books=[write_book(book) for book in self.books],
            cursor=dict(self.cursor),
            clock=self.clock,
            step=self.clock,
            meta={"run": self.run, "layout": self.task.layout.digest, "owner": self.owner},
        )

    def tokens(self) -> Tokens:
        """Tokens by fate, for each fragment."""
        fates = [_not_negative(book.totals) for book in self.books]
        return Tokens(
            **{fate: tuple(totals[fate] for totals in fates) for fate in fates[0]},
            pending=tuple(max(0.0, book.pending) for book in self.books),
        )

    def _fragment(self, number: int) -> Fragment:
        return self.task.layout.fragments[number]

    def _apply(self, number: int, mix: Mix) -> None:
        if mix == KEEP:
            return
        assert mix == DROP  # Only adopting an image mixes; everything else keeps or drops.
        self._place(number, np.zeros_like(self.anchors[number]))

    def _place(self, number: int, held: np.ndarray) -> None:
        self.engine.write(self._fragment(number), self.anchors[number] - held)


def _grounded(book: unmerged_work.Book, clock: int) -> tuple[unmerged_work.Book, int]:
    book, posted = unmerged_work.post(book, clock)
    return book, max(clock, posted)


def _not_negative(totals: Totals) -> dict[str, float]:
    # Blending leaves differences of large numbers; what is a hair below zero is zero.
    return {fate: max(0.0, amount) for fate, amount in asdict(totals).items()}
