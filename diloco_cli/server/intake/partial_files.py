"""Half-received frames that outlive the server.

    server/parts/REGION.FRAGMENT.DIGEST.CLOCK.CHANCE.bytes   the frame, as far as it is there
    server/parts/REGION.FRAGMENT.DIGEST.CLOCK.CHANCE.have    which of its bytes are, in JSON

A part is written before it is listed and listed before it is acknowledged, so whatever a
killed server leaves behind is true. Nothing is flushed for it: after a power cut bytes may
be missing that are listed, and then the SHA-256 of the frame says so and it travels again.
Worse than that nothing can happen, since a list decides nothing.

What nobody has gone on with for a day is removed.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from pydantic import Field

from diloco_cli.errors import WireError
from diloco_cli.server.store.draft import Draft
from diloco_cli.server.store.run_store import RunStore
from diloco_cli.system.files import disk_errors, keep_bytes
from diloco_cli.wire.messages import Count, Digest, Request, parse

FORGET_SECONDS = 24 * 3600.0
"""A frame that nobody has added to for so long is given up."""

Range = tuple[int, int]


@dataclass(frozen=True)
class UploadAddress:
    """What the URL and the headers say a contribution is."""

    fragment: int
    region: str
    base: int
    clock: int
    epoch: int


class PartialFileEntry(Request):
    """What a `.have` file says."""

    region: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_-]{0,63}$")]
    fragment: Count
    base: Count
    clock: Count
    epoch: Count
    frame: Digest
    size: Count
    have: tuple[tuple[Count, Count], ...]

    @property
    def address(self) -> UploadAddress:
        return UploadAddress(self.fragment, self.region, self.base, self.clock, self.epoch)

    @property
    def sound(self) -> bool:
        """Whether the ranges are within the frame, in order and apart from each other."""
        at = -1
        for start, stop in self.have:
            if not at < start < stop <= self.size:
                return False
            at = stop
        return True


class PartialFile(Draft):
    """The file of a partial frame; removed together with its list."""

    @property
    def list(self) -> Path:
        return self.path.with_suffix(".have")

    def discard(self) -> None:
        super().discard()
        self.list.unlink(missing_ok=True)


class PartialFiles:
    def __init__(self, store: RunStore) -> None:
        self._store = store

    def begin(
        self, address: UploadAddress, frame: str, size: int, *, promised: int = 0
    ) -> PartialFile:
        """Makes room for a frame; raises DiskFull where there is none.

        `promised` bytes belong to frames that are on their way already.
        """
        self._store.check_room(size + promised)
        name = f"{address.region}.{address.fragment}.{frame[:32]}.{address.clock}"
        # A file of its own, always: one that is being decided on, or given up, has the same name
        # but for this, and whoever could open it again could change what was checked.
        return PartialFile(
            self._store.scratch / f"{name}.{secrets.token_hex(8)}.bytes", length=size
        )

    def note(
        self,
        draft: PartialFile,
        address: UploadAddress,
        frame: str,
        size: int,
        have: Sequence[Range],
    ) -> None:
        """Lists what is there of a frame, in place of what was listed before."""
        entry = PartialFileEntry(**vars(address), frame=frame, size=size, have=tuple(have))
        with disk_errors(draft.list):
            keep_bytes(draft.list, entry.body(), durable=False)

    def load(self) -> Iterator[tuple[PartialFileEntry, PartialFile]]:
        """Yields what an earlier server has left, oldest first; removes what is of no use."""
        loaded = []
        for path in sorted(self._store.scratch.iterdir()):
            if path.suffix != ".bytes":
                if not path.with_suffix(".bytes").exists():
                    path.unlink(missing_ok=True)
                continue
            listed = _read(path)
            draft = PartialFile(path, resume=True, length=listed.size if listed else 0)
            if listed is not None:
                loaded.append((listed, draft))
            else:
                draft.discard()
        yield from sorted(loaded, key=lambda pair: (pair[0].epoch, pair[0].clock))


def forgotten(path: Path) -> bool:
    """Whether nobody has gone on with a frame for a day."""
    try:
        return time.time() - path.stat().st_mtime > FORGET_SECONDS
    except OSError:
        return True


def _read(path: Path) -> PartialFileEntry | None:
    """What is listed of a frame, if that can be and is of use."""
    try:
        listed = parse(PartialFileEntry, path.with_suffix(".have").read_bytes())
        long_enough = not listed.have or path.stat().st_size >= listed.have[-1][1]
    except (OSError, WireError):
        return None
    return listed if listed.sound and long_enough and not forgotten(path) else None
