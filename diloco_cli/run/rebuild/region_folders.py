"""What the folders of regions still hold of a run: weights, terms, lanes, clocks.

They are only read, and their workers may be running: every file is replaced as a whole.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from diloco_cli.core.journal_records import TermsAmended
from diloco_cli.core.lanes import CorpusOrder, Cursor
from diloco_cli.core.rebuild import FoundRegion, FoundVersion
from diloco_cli.errors import DilocoError, SpecError, StoreError
from diloco_cli.run.folder import RESOLVED
from diloco_cli.wire.digest import vector_digest
from diloco_cli.worker.mailbox import FolderOwner, Image, Mailbox
from diloco_cli.worker.trainer.checkpoints.checkpoint import read_cursor


@dataclass(frozen=True)
class RegionFolder:
    """One region's folder, and what it says."""

    mailbox: Mailbox = field(repr=False)
    name: str
    identity: FolderOwner
    found: FoundRegion = field(repr=False)
    amendments: tuple[TermsAmended, ...] = field(repr=False)
    numbers: tuple[int, ...] = field(repr=False)
    """Of records of the lost journal, as far as it has heard of them."""
    remarks: tuple[str, ...] = ()
    """About files that are damaged."""

    def version(self, fragment: int, size: int) -> tuple[FoundVersion, str] | None:
        """A fragment as published, with the run that published it; None if it is not here."""
        image = self._image(fragment)
        if image is None or image.weights.shape != (size,):
            return None
        if vector_digest(image.weights) != image.published:
            return None
        found = FoundVersion(self.name, image.version, image.published, image.merged, image.counted)
        return found, image.run

    def heard(self) -> float | None:
        """When it last got news of the run, by the clock of its host."""
        files = [*(self.mailbox.folder / "image").glob("[0-9]*"), self.mailbox.calls_file]
        times = [path.stat().st_mtime for path in files if path.exists()]
        return max(times, default=None)

    def _image(self, fragment: int) -> Image | None:
        try:
            return self.mailbox.image(fragment)
        except StoreError:
            return None


def find_regions(folders: Sequence[Path]) -> list[RegionFolder]:
    """The regions below these folders: run folders of their hosts, or region folders."""
    found: dict[str, RegionFolder] = {}
    for folder in folders:
        inner = folder / "regions"
        paths = sorted(inner.iterdir()) if inner.is_dir() else [folder]
        regions = [path for path in paths if (path / "identity.json").exists()]
        if not regions:
            raise SpecError(
                f"{folder} is no region's folder: there is no identity.json in it, nor in "
                "regions/NAME below it.",
                hint="Name what `diloco work` got as --dir on a region's host, or a copy of it.",
            )
        for path in regions:
            region = _read(path)
            if other := found.get(region.name):
                raise SpecError(
                    f"{path} and {other.mailbox.folder} are both folders of {region.name}.",
                    hint="Give the one that its worker uses.",
                )
            found[region.name] = region
    return list(found.values())


def find_spec(folders: Sequence[Path]) -> Path | None:
    """The spec that a region's host wrote down when its worker began."""
    places = [place for folder in folders for place in (folder, folder.parent.parent)]
    return next((place / RESOLVED for place in places if (place / RESOLVED).exists()), None)


def _read(path: Path) -> RegionFolder:
    mailbox = Mailbox(path)
    identity = mailbox.identity()
    assert identity is not None
    order, reading, remarks = None, [], []
    progress, lanes, news = mailbox.progress(), None, mailbox.calls()
    if progress and progress.reading:
        told = progress.reading
        order = CorpusOrder(**asdict(CorpusOrder(**dict(told.order))))
        plain = {"lanes": told.lanes, "released": told.released}
        reading.append(Cursor.of({"order": order.digest, "count": told.count, **plain}))
    else:
        remarks.append("how far it has read is not known: its text begins anew")
    try:
        if mailbox.checkpoint.exists():
            reading.append(read_cursor(mailbox.checkpoint))
        lanes = mailbox.lanes()
    except DilocoError as error:
        remarks.append(error.message)
    clocks = [identity.high]
    for frame_path in (path / "outbox").glob("[0-9]*.frame"):
        try:
            frame = mailbox.frame(int(frame_path.stem))
        except DilocoError as error:
            remarks.append(f"{frame_path}: {error.message}")
            continue
        if frame:
            clocks.append(frame.header.clock)
            if frame.header.cursor:
                reading.append(Cursor.of(frame.header.cursor))
    amendments = tuple(
        TermsAmended(
            each.number,
            each.id,
            each.set,
            each.add,
            each.remove,
            each.by,
            each.why,
            reopens=each.reopens,
            repace=each.repace,
            time=each.time,
        )
        for each in mailbox.terms().amendments
    )
    grants = [
        at.grant for each in reading for at in (*each.lanes.values(), *each.released.values())
    ]
    grants += [grant for grant, _ in lanes.lanes.values()] if lanes else []
    key = hashlib.sha256(identity.key.encode()).hexdigest() if identity.key else ""
    return RegionFolder(
        mailbox,
        identity.region or path.name,
        identity,
        FoundRegion(max(clocks), key, order, tuple(reading)),
        amendments,
        (*grants, news.n if news else 0),
        tuple(remarks),
    )
