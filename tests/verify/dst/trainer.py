"""A trainer with the real books and real frames, whose training is a few random numbers."""

from __future__ import annotations

import copy
from dataclasses import asdict, dataclass, field
from random import Random
from typing import Any

import numpy as np

from diloco_cli.core import unmerged_work
from diloco_cli.server.settings import ServerSettings
from diloco_cli.wire.frame import Frame, Header, open_frame, pack
from diloco_cli.wire.messages import News
from diloco_cli.worker.mailbox import Image
from tests.verify.dst.audit import Audit, Shares

STEPS = np.random.default_rng(3).normal(scale=0.01, size=(64, 512)).astype(np.float32)
"""What inner steps do to the weights; which one comes is a matter of the step's number."""


@dataclass
class Saved:
    clock: int
    books: tuple[unmerged_work.Book, ...]
    held: tuple[np.ndarray, ...]
    shares: tuple[Shares, ...]


@dataclass
class Folder:
    """What a region has on its own disk, which this simulation does not spoil."""

    owner: str
    boot: int = 0
    outbox: dict[int, bytes] = field(default_factory=dict)
    image: dict[int, Image] = field(default_factory=dict)
    saved: Saved | None = None

    def copied(self) -> Folder:
        return copy.deepcopy(self)


class Trainer:
    """Lives as long as its process; whatever it knows comes from the folder."""

    def __init__(
        self,
        recipe: ServerSettings,
        region: str,
        run: str,
        folder: Folder,
        audit: Audit,
        rng: Random,
    ) -> None:
        self.recipe, self.region, self.run, self.folder = recipe, region, run, folder
        self.audit, self.rng = audit, rng
        self.sync = recipe.spec.sync
        self.fragments = range(len(recipe.sizes))
        inner = recipe.spec.inner_of(region)
        self.tokens = float(inner.batch * inner.sequence)
        self.poisoned = 0.0
        self.fates: dict[int, tuple[str, str]] = {}
        self.steps = 0

    def start(self, high: int) -> None:
        """Stands where checkpoint and outbox say."""
        saved = self.folder.saved
        self.frames = {f: open_frame(data) for f, data in self.folder.outbox.items()}
        clocks = [frame.header.clock for frame in self.frames.values()]
        self.clock = max(saved.clock if saved else 0, high, *clocks, 0)
        self.books: list[unmerged_work.Book] = []
        self.held: list[np.ndarray] = []
        self.shares: list[Shares] = []
        for f in self.fragments:
            frame, size = self.frames.get(f), self.recipe.sizes[f]
            book, origin = unmerged_work.start(
                saved.books[f] if saved else None,
                _posted(frame) if frame else None,
                self.sync.alpha,
            )
            held, shares = np.zeros(size, np.float32), {}
            if origin == "checkpoint" and saved:
                held, shares = saved.held[f].copy(), dict(saved.shares[f])
            elif origin == "frame" and frame:
                held, shares = frame.values(), dict(self.audit.frames[frame.digest].shares)
            self.books.append(book)
            self.held.append(held)
            self.shares.append(shares)

    def boundary(self, news: News) -> bool:
        """One step boundary; says whether there is nothing left to do for this run."""
        for f in self.fragments:
            if f in self.fates:
                self._book(f, *unmerged_work.answered(self.books[f], *self.fates[f]))
        if self.sync.alpha < 1:
            self._answer(news)
        for f in self.fragments:
            self._adopt(f)
        self._answer(news)
        if news.finished and self._is_settled(news):
            for f in self.fragments:
                self._book(f, *unmerged_work.abandon(self.books[f]))
            self.save()
            return True
        if not news.end and self._may_step(news):
            self._step()
        return False

    def save(self) -> None:
        held = tuple(each.copy() for each in self.held)
        shares = tuple(dict(each) for each in self.shares)
        self.folder.saved = Saved(self.clock, tuple(self.books), held, shares)

    def report(self, news: News) -> dict[str, Any]:
        """What a heartbeat says about training."""
        books = self.books
        empty = [book.flight is None and book.held.steps < 1 for book in books]
        totals = [{**asdict(book.totals), "pending": book.pending} for book in books]
        fates = ("trained", "applied", "pending", "refused", "discarded")
        return {
            "step": self.steps,
            "drained": news.end and all(empty),
            "fragments": [{"version": b.version, "steps": b.fresh.steps} for b in books],
            "tokens": {fate: [each[fate] for each in totals] for fate in fates},
        }

    def _is_settled(self, news: News) -> bool:
        return all(
            book.flight is None and book.version == news.versions[f]
            for f, book in enumerate(self.books)
        )

    def _may_step(self, news: News) -> bool:
        if any(book.version < 0 for book in self.books):
            return False
        return bool(self.sync.overlap) or unmerged_work.waits_for(self.books, news.calls) is None

    def _step(self) -> None:
        step = self.audit.new_step()
        self.clock += 1
        self.steps += 1
        for f in self.fragments:
            self.books[f] = unmerged_work.step(self.books[f], self.tokens)
            self.held[f] += STEPS[step % len(STEPS), : self.recipe.sizes[f]]
            self.shares[f][step] = 1.0

    def _answer(self, news: News) -> None:
        for f in self.fragments:
            if unmerged_work.may_answer(self.books[f], news.calls.get(f)):
                self._post(f)

    def _post(self, f: int) -> None:
        book, clock = unmerged_work.post(self.books[f], self.clock)
        self.clock = max(self.clock, clock)
        flight, held = book.flight, self.held[f]
        assert flight is not None
        if self.poisoned and self.rng.random() < self.poisoned:
            held = np.full_like(held, 1e18)
        header = Header.contribution(
            run=self.run,
            layout=self.recipe.layout.digest,
            fragment=f,
            size=held.size,
            codec=self.recipe.spec.wire.up,
            base=flight.base,
            region=self.region,
            clock=clock,
            prev=flight.prev,
            tokens=flight.work.tokens,
            steps=flight.work.steps,
            totals=asdict(book.totals),
        )
        data = pack(header, held)
        frame = open_frame(data)
        self.folder.outbox[f] = data  # Durable; only now may anybody know of it.
        self.frames[f] = frame
        self.audit.posted(frame, data, self.folder.owner, dict(self.shares[f]))
        self.books[f] = unmerged_work.written(book, clock, frame.digest)

    def _adopt(self, f: int) -> None:
        image, book = self.folder.image.get(f), self.books[f]
        if image is None or image.version <= book.version:
            return
        merged = image.merged.get(self.region, "")
        self._book(f, *unmerged_work.settle(book, image.version, merged, self.sync.alpha))

    def _book(self, f: int, book: unmerged_work.Book, mix: unmerged_work.Mix) -> None:
        if mix != unmerged_work.KEEP:
            frame = self.frames.get(f)
            self.held[f] = np.float32(mix.held) * self.held[f]
            shares = {s: mix.held * share for s, share in self.shares[f].items()}
            if mix.flight and frame:
                self.held[f] = self.held[f] - np.float32(mix.flight) * frame.values()
                for step, share in self.audit.frames[frame.digest].shares.items():
                    shares[step] = shares.get(step, 0.0) - mix.flight * share
            self.shares[f] = {s: share for s, share in shares.items() if abs(share) > 1e-12}
        self.books[f] = book
        self.audit.booked(self.region, f, book)


def _posted(frame: Frame) -> unmerged_work.Posted:
    said = frame.header
    work = unmerged_work.Work(said.tokens, said.steps)
    totals = unmerged_work.Totals(**said.totals)
    return unmerged_work.Posted(said.clock, said.base, said.prev, work, frame.digest, totals)
