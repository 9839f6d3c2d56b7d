"""The trainer of the model: the real books, symbolic arrays, one event per step boundary."""

from __future__ import annotations

from dataclasses import astuple, replace
from functools import partial
from typing import TYPE_CHECKING

from diloco_cli.core import lanes, pace, unmerged_work
from diloco_cli.core.lanes import Cursor, LanePosition
from diloco_cli.core.unmerged_work import Totals
from tests.verify.model.amendments import terms_after
from tests.verify.model.server import TEXT, WINDOWS
from tests.verify.model.symbols import Beat, Folder, Frame, ReportedTokens, Saved, Vector, quantised
from tests.verify.model.virtual_time import Clockwork, Process

if TYPE_CHECKING:
    from tests.verify.model.region import Site

IDLE = 0.7


class Trainer(Process):
    kind = "trainer"

    def __init__(self, world: Clockwork, site: Site) -> None:
        super().__init__(world)
        self.site = site
        self.sync = world.setting.sync
        self.leaving = False
        """Told to leave in order: newer terms are in the folder."""
        self.fragments = range(self.sync.fragments)
        self.books: list[unmerged_work.Book] = []
        self.held: list[Vector] = []
        self.cursor = Cursor()
        self.kept = Cursor()
        """Of the newest checkpoint."""
        self.trained: list[int] = []
        """Every token this folder ever made, for the audit."""
        self.remainder: list[float] = []

    @property
    def folder(self) -> Folder:
        return self.site.folder

    # Life

    def start(self, high: int) -> None:
        """Stands where checkpoint and outbox say."""
        self.up = True
        self.orphan = self.leaving = False
        known = self.site.server.on_record[: self.folder.terms]
        self.sync = terms_after(self.world.setting, known).sync
        self.stepping = False
        self.resting = False
        self.writing: dict[int, Frame] = {}
        """Posts that a thread is writing, or has written without our having looked."""
        saved, outbox = self.folder.checkpoint, self.folder.outbox
        self.books, self.held = [], []
        self.clock = saved.clock if saved else 0
        if "clock never goes back" not in self.world.off:
            self.clock = max(self.clock, high, *(frame.clock for frame in outbox.values()), 0)
        self.steps = self.made = 0
        for f in self.fragments:
            frame = outbox.get(f)
            book, origin = unmerged_work.start(
                saved.books[f] if saved else None,
                frame.posted() if frame else None,
                self.sync.alpha,
            )
            held = Vector()
            if origin == "checkpoint" and saved:
                held = saved.held[f].copy()
            elif origin == "frame" and frame:
                held = Vector(frame.value, dict(frame.tokens))
            self.books.append(book)
            self.held.append(held)
        made_by = saved.owner if saved else self.site.first_owner if outbox else self.folder.owner
        renamed = made_by != self.folder.owner
        if renamed and "a new owner's books begin anew" not in self.world.off:
            self.books = [unmerged_work.renamed(book) for book in self.books]
        newest = max(outbox.values(), key=lambda frame: frame.clock, default=None)
        self.cursor = saved.cursor if saved else Cursor(TEXT, self.world.setting.lanes)
        newest = None if "reading goes on after the newest frame" in self.world.off else newest
        if newest and newest.clock > (saved.clock if saved else -1):
            self.cursor = newest.cursor  # As a whole, with what was given up.
        self.kept = saved.cursor if saved else Cursor()
        self.bare_since: float | None = None
        for f in self.fragments:
            self.site.audit.restarted(self, f, saved)
            self.site.audit.books(self, f)
        if renamed:  # Before anything is posted: a restart must not begin the books once more.
            self._checkpoint()
        self.later(self.world.rng.uniform(0.1, 1), self.boundary)

    def boundary(self) -> None:
        """One step boundary: what arrived, what is asked, then the next step."""
        if self.stepping:
            self._step()
        if self.orphan or self.leaving:
            self._checkpoint()
            agent, again = self.site.agent, self.leaving and not self.orphan
            self.die()
            if again and agent.up:
                agent.later(self.world.rng.uniform(0.5, 4), agent.start_trainer)
            return
        self._collect()
        before_adopting = self.sync.alpha < 1 and "answer before adopting" not in self.world.off
        for f in self.fragments:
            self._read_fate(f)
        if before_adopting:
            self._answer_calls()
        for f in self.fragments:
            self._adopt(f)
        self._answer_calls()
        if self._finished():
            return
        self._follow()
        news = self.folder.calls
        ended = bool(news and news.ended)
        rested, self.resting = self.resting, ended
        if (ended and not rested) or self.steps >= self.world.setting.checkpoint:
            self._checkpoint()
        self._report(news.ended if news else 0)
        self.stepping = not ended and self._ready() and self._may_read()
        self._bare(ended)
        seconds = self.world.setting.speeds[self.site.region]
        self.later(seconds if self.stepping else IDLE, self.boundary)

    def _follow(self) -> None:
        """Reads on as the server says; what is given up is durable a little later."""
        if self.folder.lanes:
            self.cursor = lanes.follow(self.cursor, self.folder.lanes, windows=WINDOWS)
        owes = self.cursor.released != self.kept.released
        if "release after a checkpoint" in self.world.off:
            owes = False
        if owes and not self.world.chance(0.3):
            self._checkpoint()

    def _bare(self, ended: bool) -> None:
        """Has it noticed when there is nothing to read for long."""
        if ended or self.cursor.lanes or self.world.faulty or not self.site.server.up:
            self.bare_since = None
        elif self.bare_since is None:
            self.bare_since = self.world.now
        else:
            self.site.audit.bare(self.site.region, self.world.now - self.bare_since)

    def _ready(self) -> bool:
        if any(book.version < 0 for book in self.books):
            return False  # No weights yet.
        if self.sync.overlap:
            return True
        if "overlap 0 waits for the next version" in self.world.off:
            return not any(book.flight for book in self.books)
        news = self.folder.calls
        return unmerged_work.waits_for(self.books, news.calls if news else {}) is None

    def _may_read(self) -> bool:
        """There is something to read, and room for another step."""
        told = self.folder.calls.until if self.folder.calls else None
        more = self.world.setting.phantoms.get(self.site.region, 0.0)
        trained = max(book.totals.trained for book in self.books) + more
        full = told is not None and trained >= told
        return bool(self.cursor.lanes) and (not full or self.lie > 1)

    @property
    def lie(self) -> float:
        return self.world.setting.lies.get(self.site.region, 1.0)

    def _step(self) -> None:
        token, region = self.world.new_token(), self.site.region
        lane = min(self.cursor.lanes, key=lambda one: (self.cursor.lanes[one].position, one))
        grant, at = self.cursor.lanes[lane]
        moved = {**self.cursor.lanes, lane: LanePosition(grant, at + 1)}
        self.cursor = replace(self.cursor, lanes=moved)
        self.site.audit.reads(region, token, (lane, at))
        self.clock += 1
        self.steps += 1
        self.made += 1
        self.trained.append(token)
        for f in self.fragments:
            self.books[f] = unmerged_work.step(self.books[f], self.world.setting.batch[region])
            self.held[f].step(token)
            self.site.audit.books(self, f)

    def _checkpoint(self) -> None:
        self.steps = 0
        held = tuple(vector.copy() for vector in self.held)
        saved = Saved(self.clock, tuple(self.books), held, self.cursor, self.folder.owner)
        self.durable(lambda: setattr(self.folder, "checkpoint", saved))
        self.kept = saved.cursor

    def _report(self, ended: int) -> None:
        lie = self.lie
        reports = tuple(pace.Report(book.version, lie * book.fresh.steps) for book in self.books)
        empty = tuple(book.flight is None and book.held.steps < 1 for book in self.books)
        seconds = self.world.setting.speeds[self.site.region]
        given = self.cursor.released
        if "release after a checkpoint" not in self.world.off:
            given = {lane: at for lane, at in given.items() if self.kept.released.get(lane) == at}
        self.site.beat = Beat(
            reports,
            empty,
            ended * all(empty),
            seconds / lie if self.made and not self.world.setting.mute else 0.0,
            self._tokens(lie),
            self.made,
            lanes=self.cursor.lanes,
            released=given,
        )

    def _tokens(self, lie: float) -> ReportedTokens:
        lie = lie if self.site.region not in self.world.setting.unbalanced else 1.0
        more = self.world.setting.phantoms.get(self.site.region, 0.0)
        totals = [_times(lie, book.totals) for book in self.books]
        totals = [replace(each, trained=each.trained + more) for each in totals] if more else totals
        return ReportedTokens.of(totals, [lie * book.pending + more for book in self.books])

    def _finished(self) -> bool:
        news = self.folder.calls
        if not news or not news.finished or self.writing:
            return False
        for f, book in enumerate(self.books):
            if book.flight or book.version != news.versions[f]:
                return False
        self.remainder = [vector.value for vector in self.held]
        for f in self.fragments:
            self._book(f, *unmerged_work.abandon(self.books[f]))
        self._checkpoint()
        self.site.done = True
        return True

    # Mail

    def flying(self, f: int) -> Frame | None:
        """The frame in flight, wherever its bytes are."""
        flight = self.books[f].flight
        if flight is None:
            return None
        frame = self.writing.get(f) or self.folder.outbox.get(f)
        return frame if frame and frame.clock == flight.clock else None

    def _pending(self, f: int) -> dict[int, float]:
        """All work that is neither merged nor given up: held outside the flight, and the flight."""
        pending, flight, frame = dict(self.held[f].tokens), self.books[f].flight, self.flying(f)
        if flight and frame:
            for token, share in frame.tokens.items():
                pending[token] = pending.get(token, 0.0) + (1 - flight.share) * share
        return pending

    def _book(self, f: int, book: unmerged_work.Book, mix: unmerged_work.Mix) -> None:
        """Does to the array what the books did, and has both compared."""
        before, frame = self._pending(f), self.flying(f)
        if mix.flight and frame:
            before = {t: share - frame.tokens.get(t, 0.0) for t, share in before.items()}
        if mix != unmerged_work.KEEP:
            self.held[f] = self.held[f].mixed(mix, frame)
        self.books[f] = book
        self.site.audit.given_up(f, before, self._pending(f))
        self.site.audit.books(self, f)

    def _read_fate(self, f: int) -> None:
        if f in self.folder.fate:
            before = self.books[f]
            digest, fate = self.folder.fate[f]
            forgotten = fate == "forgotten"
            book, mix = unmerged_work.answered(
                before, digest, "foreign" if forgotten else fate, forgotten=forgotten
            )
            if book != before:
                self._book(f, book, mix)

    def _adopt(self, f: int) -> None:
        image, book = self.folder.image.get(f), self.books[f]
        if image is None or image.version <= book.version:
            return
        if f in self.writing and "no adopting while writing" not in self.world.off:
            return  # The image may have merged the very frame whose digest we do not know yet.
        merged = image.merged
        if merged is None:
            merged = book.flight.prev if book.flight else book.prev
        new, mix = unmerged_work.settle(book, image.version, merged, self.sync.alpha)
        if mix == unmerged_work.DROP and self.sync.alpha > 0:
            self.site.audit.gives_up(self.site.region)
        self._book(f, new, mix)

    def _answer_calls(self) -> None:
        news = self.folder.calls
        for f in self.fragments:
            called = news.calls.get(f) if news else None
            if f not in self.writing and unmerged_work.may_answer(self.books[f], called):
                self._post(f)

    def _post(self, f: int) -> None:
        """Takes all that is held; the file is written by a thread, perhaps later."""
        book, clock = unmerged_work.post(self.books[f], self.clock)
        self.clock = max(self.clock, clock)
        flight, held = book.flight, self.held[f]
        assert flight is not None
        digest = f"{self.folder.owner}:{f}:{clock}:{self.world.points}:{self.world.tokens}"
        frame = Frame(
            self.site.region,
            f,
            flight.base,
            clock,
            flight.prev,
            flight.work,
            book.totals,
            digest,
            quantised(held.value),
            dict(held.tokens),
            self.cursor,
            self.lie,
            self.site.region not in self.world.setting.unbalanced,
        )
        self.books[f] = book
        self.writing[f] = frame
        slow = self.world.setting.writing
        delay = self.world.rng.uniform(0, slow) if slow and self.world.chance(0.7) else 0.0
        self.later(delay, partial(self._write, f, frame))

    def _write(self, f: int, frame: Frame) -> None:
        self.durable(lambda: self.folder.outbox.__setitem__(f, frame))
        if self.site.agent.up:
            self.site.agent.later(0.01, self.site.agent.move_mail)

    def _collect(self) -> None:
        """Looks which posts have become durable; the thread may be late to say so."""
        for f, frame in list(self.writing.items()):
            if self.folder.outbox.get(f) is frame and not self.world.chance(0.2):
                del self.writing[f]
                self.books[f] = unmerged_work.written(self.books[f], frame.clock, frame.digest)
                self.site.audit.books(self, f)


def _times(lie: float, totals: Totals) -> Totals:
    return totals if lie == 1 else Totals(*(lie * each for each in astuple(totals)))
