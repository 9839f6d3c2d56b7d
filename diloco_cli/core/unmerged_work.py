"""What does a region still owe, and what becomes of it when news arrives?

A region's unmerged progress on one fragment is `held`: the array `anchor − local`
together with its tokens and steps. A frame carries all of it; at most one frame is in
flight; `share` is how much of that frame is still inside `held`.

    free ──post──▶ flying ──adopted a version that merged it──▶ free, held −= frame
                     │ ────returned───▶ free, held stays
                     └ ────refused, foreign──▶ free, held = 0

This module keeps the books and holds no arrays. Every change answers with a `Mix`,
which says what to do to the array: `held := mix.held · held − mix.flight · frame`.
Rounding needs no residual of its own: what the codec lost simply stays in `held`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple


@dataclass(frozen=True, slots=True)
class Work:
    """An amount of training, always added and subtracted as one."""

    tokens: float = 0.0
    steps: float = 0.0

    def __add__(self, other: Work) -> Work:
        return Work(self.tokens + other.tokens, self.steps + other.steps)

    def __sub__(self, other: Work) -> Work:
        return Work(self.tokens - other.tokens, self.steps - other.steps)

    def scaled(self, share: float) -> Work:
        return Work(self.tokens * share, self.steps * share)


@dataclass(frozen=True, slots=True)
class Totals:
    """Tokens by fate, since the region began."""

    trained: float = 0.0
    applied: float = 0.0
    refused: float = 0.0
    discarded: float = 0.0


@dataclass(frozen=True, slots=True)
class Flight:
    """A posted frame whose fate is not yet known here."""

    clock: int
    base: int
    prev: str
    work: Work
    digest: str = ""
    """Empty while the frame is still being written."""
    share: float = 1.0


@dataclass(frozen=True, slots=True)
class Posted:
    """What the outbox says about a fragment's newest frame."""

    clock: int
    base: int
    prev: str
    work: Work
    digest: str
    totals: Totals


MOST_MERGES = 64
"""Merged frames of its own that a region can tell from a stranger's, should the server be set
back."""

Merges = tuple[tuple[str, float], ...]
"""Digests of a region's merged frames, oldest first, each with the tokens applied by then."""


@dataclass(frozen=True, slots=True)
class Book:
    """A trainer's books for one fragment."""

    version: int = -1
    """Adopted version; −1 before the first."""
    prev: str = ""
    """Digest of this region's last merged frame, as of the adopted version."""
    held: Work = Work()
    flight: Flight | None = None
    posted: int = -1
    """Clock of the last post; with no flight, that post is settled."""
    totals: Totals = field(default_factory=Totals)
    merges: Merges = ()
    """This region's merged frames up to `prev`; empty while it knows of that one alone."""
    lost: float = 0.0
    """Of the discarded: tokens that went with the server whose run this one continues."""

    @property
    def fresh(self) -> Work:
        """Held work that is not in the frame in flight."""
        return self.held - self.flight.work.scaled(self.flight.share) if self.flight else self.held

    @property
    def pending(self) -> float:
        """Tokens neither applied nor given up."""
        return self.fresh.tokens + (self.flight.work.tokens if self.flight else 0.0)


class Mix(NamedTuple):
    """held := held · `held` − frame · `flight`."""

    held: float
    flight: float


KEEP = Mix(1.0, 0.0)
DROP = Mix(0.0, 0.0)

Origin = Literal["nothing", "checkpoint", "frame"]


def start(saved: Book | None, outbox: Posted | None, alpha: float) -> tuple[Book, Origin]:
    """Says where a restarted trainer stands, and where its held array comes from.

    The outbox beats the checkpoint: a frame newer than the checkpoint contains all that
    was held when it was posted, and may already be merged.
    """
    if outbox and outbox.clock > (saved.posted if saved else -1):
        # Under replace the frame's work left `held` with the first adoption after the post.
        share = 1.0 if alpha else 0.0
        flight = Flight(
            outbox.clock, outbox.base, outbox.prev, outbox.work, outbox.digest, share=share
        )
        held = outbox.work.scaled(share)
        merges = saved.merges if saved else ()
        if saved and saved.prev != outbox.prev:
            merges = _merged(saved, outbox.prev, outbox.totals.applied)
        book = Book(outbox.base, outbox.prev, held, flight, outbox.clock, outbox.totals, merges)
        return book, "frame" if share else "nothing"
    if saved is None:
        return Book(), "nothing"
    if saved.flight is None:
        return saved, "checkpoint"
    if outbox and outbox.clock == saved.posted:
        return replace(saved, flight=replace(saved.flight, digest=outbox.digest)), "checkpoint"
    # The post the checkpoint speaks of never became durable: its work is still held.
    return _returned(saved, saved.flight), "checkpoint"


def step(book: Book, tokens: float) -> Book:
    """Books one inner step."""
    totals = replace(book.totals, trained=book.totals.trained + tokens)
    return replace(book, held=book.held + Work(tokens, 1.0), totals=totals)


def may_answer(book: Book, called: int | None) -> bool:
    """Says whether an open call for version `called` is to be answered with a new frame."""
    if called is None or called < book.version or book.flight is not None:
        return False
    return book.held.steps >= 1 and book.held.tokens > 0


def waits_for(books: Sequence[Book], calls: Mapping[int, int]) -> int | None:
    """Names the fragment whose next version must come before the next inner step (overlap 0).

    A region may lose what it held of one fragment in a crash while the frame of another
    flies. If it waited then, an open call for the first would never get its answer, and
    two such regions would wait for each other for ever.
    """
    for number, called in calls.items():
        book = books[number]
        if called >= book.version and book.flight is None and book.held.steps < 1:
            return None
    for number, book in enumerate(books):
        if book.flight and book.flight.base == book.version:
            return number
    return None


def post(book: Book, clock: int) -> tuple[Book, int]:
    """Puts all of `held` in flight; answers with the clock that names the frame."""
    clock = max(clock, book.posted + 1)
    flight = Flight(clock, max(book.version, 0), book.prev, book.held)
    return replace(book, flight=flight, posted=clock), clock


def written(book: Book, clock: int, digest: str) -> Book:
    """Books that the frame `clock` is durable in the outbox."""
    if book.flight is None or book.flight.clock != clock:
        return book  # Settled meanwhile by a version made of another worker's frame.
    return replace(book, flight=replace(book.flight, digest=digest))


def answered(book: Book, digest: str, fate: str, *, forgotten: bool = False) -> tuple[Book, Mix]:
    """Books the server's answer on a frame; one that is merged waits for its version.

    `forgotten` means that nothing of this region is on record any more. What comes next follows
    no frame then; without a newer version there is no other way to learn that.
    """
    flight = book.flight
    if flight is None or not digest or flight.digest != digest:
        return book, KEEP
    if fate == "returned":
        return _returned(book, flight), KEEP
    if fate == "refused":
        totals = replace(
            book.totals,
            refused=book.totals.refused + flight.work.tokens,
            discarded=book.totals.discarded + book.fresh.tokens,
        )
        return replace(book, held=Work(), flight=None, totals=totals), DROP
    if fate == "foreign":
        return abandon(replace(book, prev="", merges=()) if forgotten else book)
    return book, KEEP


def settle(book: Book, version: int, merged: str, alpha: float) -> tuple[Book, Mix]:
    """Adopts a newer version whose metadata names `merged` as this region's last merged frame.

    One formula for rebase (alpha 1), replace (0) and blend (between): what was merged
    leaves `held`, and alpha of the rest stays.
    """
    book, flight = replace(book, version=version), book.flight
    left = (1.0 - alpha) * book.fresh.tokens
    totals = replace(book.totals, discarded=book.totals.discarded + left)
    if flight and flight.digest and merged == flight.digest:
        totals = replace(totals, applied=totals.applied + flight.work.tokens)
        held, merges = book.fresh.scaled(alpha), _merged(book, merged, totals.applied)
        book = replace(book, prev=merged, held=held, flight=None, totals=totals, merges=merges)
        return book, Mix(alpha, alpha * flight.share)
    if merged == (flight.prev if flight else book.prev):
        if flight:
            flight = replace(flight, share=alpha * flight.share)
        held = book.held.scaled(alpha)
        return replace(book, held=held, flight=flight, totals=totals), Mix(alpha, 0.0)
    # Another disk or another worker has contributed for this region: its work is in the
    # weights, ours may be too. Only the published weights are certain.
    return abandon(replace(book, prev=merged, merges=()))


def realign(book: Book, version: int, merged: str, alpha: float) -> tuple[Book, Mix]:
    """Stands on a version of a run that was rebuilt, or set back, from the one of this book.

    Its metadata names `merged` as this region's last merged frame. The version may be older than
    the adopted one; what was merged after it is lost. What is held is a difference and stands on
    any version, so it goes on. No frame of the old run will ever be merged: the one in flight is
    either in the version or its work is still held.

        merged is the frame in flight   it was merged in time and leaves `held`
        merged is the last merged one   nothing of ours was lost
        merged is an earlier one        lost is what was applied after it
        merged is a stranger's          ours may be in the weights: all that is held is given up

    The books begin anew, as for another folder; what was lost is in them, as discarded.
    """
    before, flight = book, book.flight
    if flight and not (flight.digest and merged == flight.digest):
        book = _returned(book, flight)
    applied = dict(_known(book)).get(merged)
    if book.flight:
        book, mix = settle(book, version, merged, alpha)
    elif applied is None:
        book, mix = abandon(replace(book, version=version, prev=merged, merges=()))
    else:
        lost = book.totals.applied - applied
        totals = replace(book.totals, applied=applied, discarded=book.totals.discarded + lost)
        merges = _up_to(_known(book), merged)
        book, mix = settle(
            replace(book, prev=merged, totals=totals, merges=merges), version, merged, alpha
        )
    lost = book.totals.discarded - before.totals.discarded
    book = renamed(book)
    totals = replace(book.totals, trained=book.totals.trained + lost, discarded=lost)
    return replace(book, totals=totals, lost=lost), mix


def renamed(book: Book) -> Book:
    """The book as the first one of a folder that took a new name.

    What was trained under the old name is on the old account; counting its fates once more
    would make up tokens. What is still held came along and gets its fate under the new one.
    """
    began = book.totals.applied
    merges = tuple((digest, applied - began) for digest, applied in book.merges)
    return replace(book, totals=Totals(trained=book.pending), merges=merges, lost=0.0)


def moved(book: Book, version: int, merged: str) -> Book:
    """The book of a folder that speaks for another region from now on.

    What it held is dropped: a frame of the old name may be merged, and hold the same work.
    """
    return abandon(replace(renamed(book), version=version, prev=merged, merges=()))[0]


def abandon(book: Book) -> tuple[Book, Mix]:
    """Gives up everything unmerged and goes on from the published weights."""
    totals = replace(book.totals, discarded=book.totals.discarded + book.pending)
    return replace(book, held=Work(), flight=None, totals=totals), DROP


def account(book: Book) -> float:
    """Tokens that the books cannot explain: zero, or there is a bug."""
    totals = book.totals
    return totals.trained - (totals.applied + book.pending + totals.refused + totals.discarded)


def _known(book: Book) -> Merges:
    return book.merges or ((book.prev, book.totals.applied),)


def _merged(book: Book, digest: str, applied: float) -> Merges:
    """The merged frames once this one follows those of the book."""
    return (*_known(book), (digest, applied))[-MOST_MERGES:]


def _up_to(merges: Merges, digest: str) -> Merges:
    """The merged frames up to the newest that has this digest."""
    last = max(n for n, (each, _) in enumerate(merges) if each == digest)
    return merges[: last + 1]


def _returned(book: Book, flight: Flight) -> Book:
    lost = (1.0 - flight.share) * flight.work.tokens
    totals = replace(book.totals, discarded=book.totals.discarded + lost)
    return replace(book, flight=None, totals=totals)
