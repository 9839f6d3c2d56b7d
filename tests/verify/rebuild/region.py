"""One region: its durable files, and a trainer that dies between any two of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from diloco_cli.core import unmerged_work
from diloco_cli.core.rounds import Receipt
from diloco_cli.core.unmerged_work import Book, Mix, Posted, Work
from tests.verify.rebuild.rules import Broken, Rules
from tests.verify.rebuild.server import FRAGMENTS, ModelFrame, ModelImage, Server, Tokens


@dataclass(frozen=True)
class ModelIdentity:
    owner: str
    run: str
    was: tuple[str, ...] = ()
    high: int = -1


@dataclass(frozen=True)
class ModelCheckpoint:
    run: str
    clock: int
    books: tuple[Book, ...]
    held: tuple[Tokens, ...]
    applied: tuple[Tokens, ...]


@dataclass
class Folder:
    """What outlives a crash."""

    identity: ModelIdentity
    images: list[ModelImage | None] = field(default_factory=lambda: [None] * FRAGMENTS)
    outbox: list[ModelFrame | None] = field(default_factory=lambda: [None] * FRAGMENTS)
    checkpoint: ModelCheckpoint | None = None


class Trainer:
    """What is in memory; it is made from the folder alone, as `resume` does."""

    def __init__(
        self,
        name: str,
        folder: Folder,
        rules: Rules,
        alpha: float,
        point: Callable[[], None],
    ) -> None:
        self.name, self.folder, self.rules, self.alpha = name, folder, rules, alpha
        identity, saved = folder.identity, folder.checkpoint
        runs = (*identity.was, identity.run)
        posted = folder.outbox
        found = {frame.run for frame in posted if frame}
        run = saved.run if saved else next((r for r in reversed(runs) if r in found), runs[-1])
        frames = [frame if frame and frame.run == run else None for frame in posted]
        realigned = run in identity.was
        if not rules.realigned_once and identity.was:
            realigned = True
        self.books: list[Book] = []
        self.held: list[Tokens] = []
        self.applied: list[Tokens] = []
        for fragment in range(FRAGMENTS):
            self._stand(fragment, saved, frames[fragment], realigned=realigned)
        clocks = [frame.receipt.clock for frame in posted if frame]
        self.clock = max([saved.clock if saved else 0, identity.high + 1, *clocks])
        self.realigned = realigned
        if realigned:
            point()
            if rules.saved_first:
                self.save()
                point()

    def _stand(
        self,
        fragment: int,
        saved: ModelCheckpoint | None,
        frame: ModelFrame | None,
        *,
        realigned: bool,
    ) -> None:
        image = self.folder.images[fragment]
        assert image is not None
        post = None
        if frame:
            receipt = frame.receipt
            work = Work(receipt.tokens, receipt.steps)
            post = Posted(
                receipt.clock, receipt.base, receipt.prev, work, receipt.digest, frame.totals
            )
        known = saved.books[fragment] if saved else None
        book, origin = unmerged_work.start(known, post, self.alpha)
        held: Tokens = frozenset()
        applied: Tokens = saved.applied[fragment] if saved else frozenset()
        if origin == "checkpoint" and saved:
            held = saved.held[fragment]
        elif frame and book.flight:
            held, applied = frame.tokens if origin == "frame" else frozenset(), frame.applied
        self.books.append(book)
        self.held.append(held)
        self.applied.append(applied)
        merged = image.merged.get(self.name, "")
        if realigned:
            self._realign(fragment, image, merged)
        elif image.version > book.version:
            self._settle(fragment, image, merged)
        elif image.version < book.version:
            raise Broken(f"{self.name} is ahead of its own run")

    def _realign(self, fragment: int, image: ModelImage, merged: str) -> None:
        book, flight = self.books[fragment], self.books[fragment].flight
        before = book
        if not self.rules.earlier:
            book = replace(book, merges=())
        if not self.rules.strangers:
            book = replace(book, prev=merged, merges=())
        in_flight = flight is not None and flight.digest == merged
        frame = self.folder.outbox[fragment]
        if in_flight and frame:
            self.applied[fragment] |= frame.tokens
        self.books[fragment], mix = unmerged_work.realign(book, image.version, merged, self.alpha)
        dropped = len(self.held[fragment])
        self._mix(fragment, mix, frame)
        dropped -= len(self.held[fragment]) + (len(frame.tokens) if in_flight and frame else 0)
        lost = len(self.applied[fragment] - image.tokens)
        told = self.books[fragment].totals.discarded
        known = {digest for digest, _ in before.merges} | {before.prev}
        if self.alpha == 1 and (in_flight or merged in known) and told != lost:
            raise Broken(f"{self.name}: {lost} steps were lost, {told:g} are counted")
        self.applied[fragment] = frozenset()

    def _settle(self, fragment: int, image: ModelImage, merged: str) -> None:
        flight, frame = self.books[fragment].flight, self.folder.outbox[fragment]
        if flight and flight.digest == merged and frame:
            self.applied[fragment] |= frame.tokens
        self.books[fragment], mix = unmerged_work.settle(
            self.books[fragment], image.version, merged, self.alpha
        )
        self._mix(fragment, mix, frame)

    def _mix(self, fragment: int, mix: Mix, frame: ModelFrame | None) -> None:
        if mix.flight and frame:
            self.held[fragment] -= frame.tokens
        if not mix.held:
            self.held[fragment] = frozenset()

    # What it does

    def save(self) -> None:
        self.folder.checkpoint = ModelCheckpoint(
            self.folder.identity.run,
            self.clock,
            tuple(self.books),
            tuple(self.held),
            tuple(self.applied),
        )

    def step(self, token: int) -> None:
        self.clock += 1
        self.held = [held | {token} for held in self.held]
        self.books = [unmerged_work.step(book, 1) for book in self.books]

    def post(self, fragment: int, name: int) -> None:
        book = self.books[fragment]
        if not unmerged_work.may_answer(book, 10**9):
            return
        book, clock = unmerged_work.post(book, self.clock)
        flight, self.clock = book.flight, max(self.clock, clock)
        assert flight is not None
        identity, held = self.folder.identity, self.held[fragment]
        digest = f"{self.name}-{name}"
        receipt = Receipt(
            self.name, fragment, flight.base, clock, digest, flight.prev, len(held), len(held)
        )
        self.folder.outbox[fragment] = ModelFrame(
            identity.run,
            self.name,
            identity.owner,
            receipt,
            book.totals,
            held,
            self.applied[fragment],
        )
        self.books[fragment] = unmerged_work.written(book, clock, digest)

    def adopt(self, fragment: int) -> None:
        image = self.folder.images[fragment]
        if image and image.version > self.books[fragment].version:
            self._settle(fragment, image, image.merged.get(self.name, ""))

    def answered(self, fragment: int, digest: str, fate: str) -> None:
        self.books[fragment], mix = unmerged_work.answered(self.books[fragment], digest, fate)
        self._mix(fragment, mix, None)

    def check(self, server: Server) -> None:
        for fragment, book in enumerate(self.books):
            if abs(gap := unmerged_work.account(book)) > 1e-6:
                raise Broken(f"{self.name}: {gap:g} tokens have no fate")
            if book.held.steps != len(self.held[fragment]):
                raise Broken(
                    f"{self.name}: {book.held.steps:g} steps are booked as held, "
                    f"{len(self.held[fragment])} are"
                )
            flying = self.folder.outbox[fragment] if book.flight else None
            newest = server.ledger.slots[fragment].version
            both = self.held[fragment] & server.published[fragment][newest]
            if both - (flying.tokens if flying else frozenset()):
                raise Broken(f"{self.name}: {len(both)} steps are merged and held")
