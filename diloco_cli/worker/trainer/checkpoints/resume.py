"""Resume: what a trainer goes on from when it starts.

Three durable files decide for every fragment: the checkpoint, the frame in the outbox, and
the image of the published weights. The outbox beats the checkpoint, and the image decides
last: whatever it says is merged leaves what is held.

    held    anchor − params of the checkpoint, or the decoded frame, or nothing
    local   image − held
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from diloco_cli.core import unmerged_work
from diloco_cli.core.fragments import Fragment, Layout, Tensor, gather, scatter
from diloco_cli.core.lanes import Cursor
from diloco_cli.core.unmerged_work import Book, Flight, Origin, Posted, Totals, Work
from diloco_cli.errors import SET_BACK, StoreError, WireError
from diloco_cli.wire.frame import Frame
from diloco_cli.worker.engines import mixed
from diloco_cli.worker.engines.learning_rate import RatePlan
from diloco_cli.worker.mailbox import FolderOwner, Image, Mailbox
from diloco_cli.worker.trainer.checkpoints import checkpoint
from diloco_cli.worker.trainer.checkpoints.checkpoint import Checkpoint


@dataclass(frozen=True)
class SavedTerms:
    """What a checkpoint was trained under, as far as the next step follows from it."""

    number: int
    """Of the terms of the run."""
    since: int
    """The clock at which the region began to train under them."""
    optimizer: str
    """Its kind."""
    place: int
    """Of the next step, in the learning-rate schedule."""
    rate: RatePlan | None

    def as_record(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> SavedTerms:
        rate = record["rate"]
        return cls(**{**record, "rate": RatePlan(**rate) if rate else None})


@dataclass(frozen=True)
class ResumePoint:
    """All that a trainer goes on from."""

    books: list[Book]
    anchors: list[np.ndarray]
    params: dict[str, np.ndarray]
    opt_state: Mapping[str, np.ndarray] | None
    """None means a fresh optimiser."""
    cursor: Cursor | None
    """None means the beginning of the data."""
    clock: int
    resumed: bool
    terms: SavedTerms | None = None
    """What the checkpoint was trained under; None without one."""
    remarks: tuple[str, ...] = ()
    """About checkpoints that could not be read."""
    renamed: bool = False
    """The folder has another owner id than the checkpoint: its books begin anew."""
    realigned: str = ""
    """The run that it comes from, if its own continues that one. Nothing may be posted before a
    checkpoint of the new run is durable: until then it would be realigned once more."""


@dataclass(frozen=True)
class RegionPlace:
    """Which region of which run, and how it adopts."""

    region: str
    layout: Layout
    alpha: float


ReadSharded = Callable[[Callable[[str], None]], Checkpoint | None]
"""Gives the newest sharded checkpoint; hears what to call with remarks."""


def resume(
    mailbox: Mailbox,
    place: RegionPlace,
    tensors: Sequence[Tensor],
    sharded: ReadSharded | None = None,
) -> ResumePoint:
    """Reads the three and settles against the newest images."""
    identity = mailbox.identity() or FolderOwner("", 0)
    remarks: list[str] = []
    saved, runs = _checkpoint(mailbox, identity, place), (*identity.was, identity.run)
    if sharded and (other := sharded(remarks.append)):
        _refuse_foreign(other, "The newest sharded checkpoint", identity, place)
        # A region that went over from the one to the other has both.
        saved = max(
            (each for each in (saved, other) if each),
            key=lambda each: (runs.index(each.meta["run"]), each.clock),
        )
    moved = saved is not None and saved.meta.get("region", place.region) != place.region
    posted = [_frame(mailbox, fragment) for fragment in place.layout.fragments]
    run = saved.meta["run"] if saved else _newest_run(runs, posted)
    realigned, others = run in identity.was, {*runs} - {run}
    frames = [None if frame and frame.header.run in others else frame for frame in posted]
    params = {tensor.name: np.zeros(tensor.shape, np.float32) for tensor in tensors}
    books, anchors = [], []
    for fragment, frame in zip(place.layout.fragments, frames, strict=True):
        image = _image(mailbox, fragment)
        stand = realign_fragment if realigned else resume_fragment
        book, anchor, local = stand(place, fragment, saved, frame, image)
        if moved:
            merged = image.merged.get(place.region, "")
            book, local = unmerged_work.moved(book, image.version, merged), image.weights
        books.append(book)
        anchors.append(anchor)
        scatter(local, fragment, params)
    clocks = [frame.header.clock for frame in posted if frame]
    # A trainer with a new owner id writes a checkpoint before it posts: without one, what is
    # posted is older than the id.
    renamed = (
        saved.meta.get("owner", identity.owner) != identity.owner
        if saved
        else identity.renamed and bool(clocks)
    )
    if renamed and not moved and not realigned:
        books = [unmerged_work.renamed(book) for book in books]
    terms = saved.meta.get("terms") if saved else None
    return ResumePoint(
        books=books,
        anchors=anchors,
        params=params,
        opt_state=_optimizer(saved) if saved else None,
        cursor=newest_cursor(saved, [frame for frame in frames if frame]),
        # Above what the server has decided: a frame may be due before the next step.
        clock=max([saved.clock if saved else 0, identity.high + 1, *clocks]),
        resumed=saved is not None or bool(clocks),
        terms=SavedTerms.of(terms) if terms else None,
        remarks=tuple(remarks),
        renamed=renamed or realigned,
        realigned=run if realigned else "",
    )


def _optimizer(saved: Checkpoint) -> Mapping[str, np.ndarray]:
    return saved.sharded.optimizer if saved.sharded else saved.opt_state


def _newest_run(runs: Sequence[str], frames: Iterable[Frame | None]) -> str:
    """The run that frames without a checkpoint are of; the folder's own if there are none."""
    found = {frame.header.run for frame in frames if frame}
    return next((run for run in reversed(runs) if run in found), runs[-1])


def realign_fragment(
    place: RegionPlace,
    fragment: Fragment,
    saved: Checkpoint | None,
    frame: Frame | None,
    image: Image,
) -> tuple[Book, np.ndarray, np.ndarray]:
    """As `resume_fragment`, where the image is of the run that continues the checkpoint's."""
    book, held, _ = _held(place, fragment, saved, frame)
    merged = image.merged.get(place.region, "")
    book, mix = unmerged_work.realign(book, image.version, merged, place.alpha)
    kept = mixed(lambda: held, mix, frame.values if frame else None)
    return book, image.weights, image.weights if kept is None else image.weights - kept


def _held(
    place: RegionPlace, fragment: Fragment, saved: Checkpoint | None, frame: Frame | None
) -> tuple[Book, np.ndarray, Origin]:
    """The book that a fragment goes on from, what is held of it, and where that comes from."""
    number = fragment.number
    book, origin = unmerged_work.start(
        read_book(saved.books[number]) if saved else None,
        _posted(frame) if frame else None,
        place.alpha,
    )
    if origin == "checkpoint" and saved and saved.sharded:
        return book, saved.sharded.held[number][: fragment.size], origin
    if origin == "checkpoint" and saved:
        return book, saved.anchors[number] - gather(saved.params, fragment), origin
    if origin == "frame" and frame:
        return book, frame.values(), origin
    return book, np.zeros(fragment.size, np.float32), origin


def resume_fragment(
    place: RegionPlace,
    fragment: Fragment,
    saved: Checkpoint | None,
    frame: Frame | None,
    image: Image,
) -> tuple[Book, np.ndarray, np.ndarray]:
    """Gives one fragment's book, its anchor and its local weights."""
    number = fragment.number
    book, held, origin = _held(place, fragment, saved, frame)
    if image.version < book.version:
        raise StoreError(
            f"Region {place.region} has adopted version {book.version} of fragment {number}, "
            f"but the server's newest is {image.version}: the server was restored from an older "
            "copy.",
            hint=SET_BACK,
        )
    if origin == "checkpoint" and saved and not saved.sharded:
        same = np.array_equal(saved.anchors[number], image.weights)
        if same and image.version == book.version:
            # To the bit, as if it had never stopped.
            return book, image.weights, gather(saved.params, fragment)
    if image.version > book.version:
        merged = image.merged.get(place.region, "")
        book, mix = unmerged_work.settle(book, image.version, merged, place.alpha)
        before = held
        held = mixed(lambda: before, mix, frame.values if frame else None)
    return book, image.weights, image.weights if held is None else image.weights - held


def write_book(book: Book) -> dict[str, Any]:
    return asdict(book)


def read_book(data: Mapping[str, Any]) -> Book:
    flight = data["flight"]
    return Book(
        version=data["version"],
        prev=data["prev"],
        held=Work(**data["held"]),
        flight=Flight(**{**flight, "work": Work(**flight["work"])}) if flight else None,
        posted=data["posted"],
        totals=Totals(**data["totals"]),
        merges=tuple((digest, applied) for digest, applied in data["merges"]),
        lost=data["lost"],
    )


def _checkpoint(mailbox: Mailbox, identity: FolderOwner, place: RegionPlace) -> Checkpoint | None:
    if not mailbox.checkpoint.exists():
        return None
    saved = checkpoint.load(mailbox.checkpoint)
    _refuse_foreign(saved, f"The checkpoint {mailbox.checkpoint}", identity, place)
    return saved


def _refuse_foreign(
    saved: Checkpoint, name: str, identity: FolderOwner, place: RegionPlace
) -> None:
    belongs = {"run": (identity.run, *identity.was), "layout": (place.layout.digest,)}
    for key, expected in belongs.items():
        if (actual := saved.meta.get(key)) not in expected:
            raise StoreError(
                f"{name} is of {key} {actual}, not {expected[0]}.",
                hint="Delete it; the region then restarts from the published weights.",
            )


def _frame(mailbox: Mailbox, fragment: Fragment) -> Frame | None:
    try:
        return mailbox.frame(fragment.number, size=fragment.size)
    except WireError as error:
        raise StoreError(
            f"{mailbox.outbox_file(fragment.number)} is damaged: {error.message}",
            hint="Delete it; work posted since the last checkpoint is then lost.",
        ) from None


def _image(mailbox: Mailbox, fragment: Fragment) -> Image:
    image = mailbox.image(fragment.number)
    if image is None or image.weights.shape != (fragment.size,):
        fault = "is missing" if image is None else f"has the shape {image.weights.shape}"
        raise StoreError(
            f"The image of fragment {fragment.number} in {mailbox.folder} {fault}; "
            f"{fragment.size} values belong there.",
            hint="Delete the region's image folder; the agent fetches it again.",
        )
    return image


def _posted(frame: Frame) -> Posted:
    header = frame.header
    work, totals = Work(header.tokens, header.steps), Totals(**header.totals)
    return Posted(header.clock, header.base, header.prev, work, frame.digest, totals)


def newest_cursor(saved: Checkpoint | None, frames: Iterable[Frame]) -> Cursor | None:
    """Takes the newest cursor as a whole, so that posted batches are not trained again."""
    newest = max(frames, key=lambda frame: frame.header.clock, default=None)
    if newest and (saved is None or newest.header.clock > saved.clock):
        return Cursor.of(newest.header.cursor)
    return saved.cursor if saved else None
