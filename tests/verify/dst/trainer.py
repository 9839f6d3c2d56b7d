"""A trainer with the real books and real frames, whose training is a few random numbers."""

from __future__ import annotations

import copy
from dataclasses import asdict, dataclass, field, replace
from random import Random
from typing import Any

import numpy as np

from diloco_cli.core import lanes, unmerged_work
from diloco_cli.core.lanes import Assignment, Cursor, LanePosition
from diloco_cli.server.settings import ServerSettings
from diloco_cli.wire.frame import Frame, Header, open_frame, pack
from diloco_cli.wire.messages import News
from diloco_cli.worker.mailbox import Image
from tests.verify.dst.audit import Audit, Shares
from tests.verify.dst.text import LANES, ORDER, WINDOWS

STEPS = np.random.default_rng(3).normal(scale=0.01, size=(64, 512)).astype(np.float32)
"""What inner steps do to the weights; which one comes is a matter of the step's number."""


@dataclass
class Saved:
    clock: int
    books: tuple[unmerged_work.Book, ...]
    held: tuple[np.ndarray, ...]
    shares: tuple[Shares, ...]
    cursor: Cursor


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
        settings: ServerSettings,
        region: str,
        run: str,
        folder: Folder,
        audit: Audit,
        rng: Random,
    ) -> None:
        self.settings, self.region, self.run, self.folder = settings, region, run, folder
        self.audit, self.rng = audit, rng
        self.sync = settings.spec.sync
        self.fragments = range(len(settings.sizes))
        inner = settings.spec.inner_of(region)
        self.tokens = float(inner.batch * inner.sequence)
        self.poisoned = 0.0
        self.fates: dict[int, tuple[str, str]] = {}
        self.steps = 0
        self.retiring = False
        """It makes no step any more, and leaves when what it holds is merged."""

    def start(self, high: int) -> None:
        """Stands where checkpoint and outbox say."""
        saved = self.folder.saved
        self.frames = {f: open_frame(data) for f, data in self.folder.outbox.items()}
        clocks = [frame.header.clock for frame in self.frames.values()]
        self.clock = max(saved.clock if saved else 0, high, *clocks, 0)
        self.kept = saved.cursor if saved else Cursor(ORDER.digest, LANES)
        self.cursor = self.kept
        newest = max(self.frames.values(), key=lambda each: each.header.clock, default=None)
        if newest and newest.header.clock > (saved.clock if saved else -1):
            self.cursor = Cursor.of(newest.header.cursor)
        self.books: list[unmerged_work.Book] = []
        self.held: list[np.ndarray] = []
        self.shares: list[Shares] = []
        for f in self.fragments:
            frame, size = self.frames.get(f), self.settings.sizes[f]
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
        self._follow(news)
        if self.retiring:
            return self._is_empty()
        if not news.end and self._may_step(news) and self._has_room(news):
            self._step()
        return False

    def _follow(self, news: News) -> None:
        """Reads on as the server says; what is given up is told once it is saved."""
        if told := news.lanes:
            owned = {lane: LanePosition(*at) for lane, at in told.lanes.items()}
            given = Assignment(told.order, told.count, owned, told.asked)
            self.cursor = lanes.follow(self.cursor, given, windows=WINDOWS)
        if self.cursor.released != self.kept.released and self.rng.random() < 0.7:
            self.save()

    def _is_empty(self) -> bool:
        return all(book.flight is None and book.held.steps < 1 for book in self.books)

    def save(self) -> None:
        held = tuple(each.copy() for each in self.held)
        shares = tuple(dict(each) for each in self.shares)
        self.folder.saved = Saved(self.clock, tuple(self.books), held, shares, self.cursor)
        self.kept = self.cursor

    def report(self, news: News) -> dict[str, Any]:
        """What a heartbeat says about training."""
        books = self.books
        totals = [{**asdict(book.totals), "pending": book.pending} for book in books]
        fates = ("trained", "applied", "pending", "refused", "discarded")
        return {
            "step": self.steps,
            "ended": news.ended if news.end and self._is_empty() else 0,
            "reading": self._reading(),
            "fragments": [{"version": b.version, "steps": b.fresh.steps} for b in books],
            "tokens": {fate: [each[fate] for each in totals] for fate in fates},
        }

    def _reading(self) -> dict[str, Any]:
        kept, cursor = self.kept.released, self.cursor
        given = {lane: at for lane, at in cursor.released.items() if kept.get(lane) == at}
        return {**replace(cursor, released=given).as_record(), "order": ORDER.model_dump()}

    def _is_settled(self, news: News) -> bool:
        return all(
            book.flight is None and book.version == news.versions[f]
            for f, book in enumerate(self.books)
        )

    def _may_step(self, news: News) -> bool:
        if any(book.version < 0 for book in self.books) or not self.cursor.lanes:
            return False
        return bool(self.sync.overlap) or unmerged_work.waits_for(self.books, news.calls) is None

    def _has_room(self, news: News) -> bool:
        return news.until is None or self.trained < news.until

    @property
    def trained(self) -> float:
        return max(book.totals.trained for book in self.books)

    def _step(self) -> None:
        step = self.audit.new_step()
        lane = min(self.cursor.lanes, key=lambda one: (self.cursor.lanes[one].position, one))
        grant, at = self.cursor.lanes[lane]
        moved = {**self.cursor.lanes, lane: LanePosition(grant, at + 1)}
        self.cursor = replace(self.cursor, lanes=moved)
        self.audit.text.reads(step, self.region, (lane, at))
        self.clock += 1
        self.steps += 1
        for f in self.fragments:
            self.books[f] = unmerged_work.step(self.books[f], self.tokens)
            self.held[f] += STEPS[step % len(STEPS), : self.settings.sizes[f]]
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
            layout=self.settings.layout.digest,
            fragment=f,
            size=held.size,
            codec=self.settings.spec.wire.up,
            base=flight.base,
            region=self.region,
            clock=clock,
            prev=flight.prev,
            tokens=flight.work.tokens,
            steps=flight.work.steps,
            totals=asdict(book.totals),
            cursor=self.cursor.as_record(),
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
