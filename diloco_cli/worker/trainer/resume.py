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
from pathlib import Path
from typing import Any

import numpy as np

from diloco_cli.core import unmerged_work
from diloco_cli.core.fragments import Fragment, Layout, Tensor, gather, scatter
from diloco_cli.core.unmerged_work import Book, Flight, Mix, Posted, Totals, Work
from diloco_cli.data import Cursor
from diloco_cli.errors import StoreError, WireError
from diloco_cli.wire.frame import Frame
from diloco_cli.worker.mailbox import FolderOwner, Image, Mailbox
from diloco_cli.worker.trainer import checkpoint
from diloco_cli.worker.trainer.checkpoint import Checkpoint


@dataclass(frozen=True)
class ResumePoint:
    """All that a trainer goes on from."""

    books: list[Book]
    anchors: list[np.ndarray]
    params: dict[str, np.ndarray]
    opt_state: dict[str, np.ndarray] | None
    """None means a fresh optimiser."""
    cursor: Cursor | None
    """None means the beginning of the data."""
    clock: int
    resumed: bool
    renamed: bool = False
    """The folder has another owner id than the checkpoint: its books begin anew."""


@dataclass(frozen=True)
class RegionPlace:
    """Which region of which run, and how it adopts."""

    region: str
    layout: Layout
    alpha: float
    folder: Path | str = "this region's folder"
    """As messages name it."""


def resume(mailbox: Mailbox, place: RegionPlace, tensors: Sequence[Tensor]) -> ResumePoint:
    """Reads the three and settles against the newest images."""
    identity = mailbox.identity() or FolderOwner("", 0)
    saved = _checkpoint(mailbox, identity, place)
    frames = [_frame(mailbox, fragment) for fragment in place.layout.fragments]
    params = {tensor.name: np.zeros(tensor.shape, np.float32) for tensor in tensors}
    books, anchors = [], []
    for fragment, frame in zip(place.layout.fragments, frames, strict=True):
        image = _image(mailbox, fragment)
        book, anchor, local = resume_fragment(place, fragment, saved, frame, image)
        books.append(book)
        anchors.append(anchor)
        scatter(local, fragment, params)
    renamed = saved is not None and saved.meta.get("owner", identity.owner) != identity.owner
    if renamed:
        books = [unmerged_work.renamed(book) for book in books]
    clocks = [frame.header.clock for frame in frames if frame]
    return ResumePoint(
        books=books,
        anchors=anchors,
        params=params,
        opt_state=saved.opt_state if saved else None,
        cursor=newest_cursor(saved, [frame for frame in frames if frame]),
        clock=max([saved.clock if saved else 0, identity.high, *clocks]),
        resumed=saved is not None or bool(clocks),
        renamed=renamed,
    )


def resume_fragment(
    place: RegionPlace,
    fragment: Fragment,
    saved: Checkpoint | None,
    frame: Frame | None,
    image: Image,
) -> tuple[Book, np.ndarray, np.ndarray]:
    """Gives one fragment's book, its anchor and its local weights."""
    number = fragment.number
    book, origin = unmerged_work.start(
        read_book(saved.books[number]) if saved else None,
        _posted(frame) if frame else None,
        place.alpha,
    )
    if image.version < book.version:
        raise StoreError(
            f"Region {place.region} has adopted version {book.version} of fragment {number}, "
            f"but the server's newest is {image.version}.",
            hint="The server was restored from an older copy. Restore a newer one, or delete "
            f"{place.folder} to go on from what the server has.",
        )
    if origin == "checkpoint" and saved:
        local = gather(saved.params, fragment)
        same = np.array_equal(saved.anchors[number], image.weights)
        if image.version == book.version and same:
            return book, image.weights, local  # To the bit, as if it had never stopped.
        held = saved.anchors[number] - local
    else:
        held = frame.values() if frame and origin == "frame" else np.zeros_like(image.weights)
    if image.version > book.version:
        merged = image.merged.get(place.region, "")
        book, mix = unmerged_work.settle(book, image.version, merged, place.alpha)
        held = mixed(held, mix, frame.values if frame else None)
    return book, image.weights, image.weights - held


def mixed(
    held: np.ndarray, mix: Mix, flight: Callable[[], np.ndarray] | np.ndarray | None
) -> np.ndarray:
    """Does to the held array what the books did to the held work."""
    # Not 0 · held: what is dropped may be dropped because it is not finite.
    result = np.float32(mix.held) * held if mix.held else np.zeros_like(held)
    if mix.flight:
        values = flight() if callable(flight) else flight
        if values is None:
            raise ValueError("a merged frame leaves `held`, but its values were not given")
        result -= np.float32(mix.flight) * values
    return result


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
    )


def _checkpoint(mailbox: Mailbox, identity: FolderOwner, place: RegionPlace) -> Checkpoint | None:
    if not mailbox.checkpoint.exists():
        return None
    saved = checkpoint.load(mailbox.checkpoint)
    belongs = {"run": identity.run, "layout": place.layout.digest}
    for key, expected in belongs.items():
        if (actual := saved.meta.get(key)) != expected:
            raise StoreError(
                f"The checkpoint {mailbox.checkpoint} is of {key} {actual}, not {expected}.",
                hint="Delete it; the region then restarts from the published weights.",
            )
    return saved


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
    """Takes the newest cursor, so that posted batches are not trained again."""
    cursors = [(frame.header.clock, frame.header.cursor) for frame in frames]
    if saved:
        cursors.append((saved.clock, saved.cursor))
    return dict(max(cursors, key=lambda pair: pair[0])[1]) if cursors else None
