"""Frames that arrive in parts, in any order, over several connections, with interruptions.

    PUT …/parts/{start}   bytes at their place in a draft, counted once their digest is right
    GET …/parts           which ranges of bytes are there
    PUT …                 with `diloco-parts` and no body: the frame is complete, decide

A region has one draft for each fragment, beside older ones that are being removed, none longer
than the fragment's longest frame, so what the server keeps is bounded by the model and the
regions. A part that is sent again changes nothing. Drafts end with the decision, with a newer
frame, or when a day brought no more of them; they outlive the server (`partial_files.py`).
"""

from __future__ import annotations

import asyncio
from bisect import insort
from collections.abc import AsyncIterator
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field

from isal.isal_zlib import crc32  # The same sum as zlib's, in a fifth of the time.

from diloco_cli.server.intake.body import AGAIN, Batch
from diloco_cli.server.intake.partial_files import (
    PartialFile,
    PartialFiles,
    Range,
    UploadAddress,
    forgotten,
)
from diloco_cli.server.refusals import HttpRefusal
from diloco_cli.server.store.draft import Draft
from diloco_cli.server.store.run_store import RunStore
from diloco_cli.wire.messages import check_value

READ_BYTES = 1 << 20
WRITERS = 2
"""Threads that put parts in their place. There is one disk, and few threads take turns seldom:
with six, an upload costs a twelfth more."""

MOST_RANGES = 4096
"""Ranges apart from each other; nobody who means it leaves so many gaps."""

__all__ = ["Part", "PartialUpload", "PartialUploads", "Range", "UploadAddress"]


@dataclass(frozen=True)
class Part:
    """What the URL says about one part."""

    start: int
    stop: int
    size: int
    """Of the whole frame."""
    frame: str
    """Digest of the whole frame."""
    digest: str


@dataclass(eq=False)
class PartialUpload:
    """One frame on its way in."""

    address: UploadAddress
    frame: str
    size: int
    draft: PartialFile
    have: list[Range] = field(default_factory=list)
    writers: dict[int, object] = field(default_factory=dict)
    """Who writes at each start; a part that is sent again takes over from the one before."""
    writing: int = 0
    over: bool = False
    noting: asyncio.Lock = field(default_factory=asyncio.Lock)

    def is_of(self, address: UploadAddress, frame: str) -> bool:
        mine = (self.address.base, self.address.clock, self.frame)
        return mine == (address.base, address.clock, frame)

    def covers(self, part: Part) -> bool:
        return any(start <= part.start and part.stop <= stop for start, stop in self.have)

    def touches(self, part: Part) -> bool:
        return any(start < part.stop and part.start < stop for start, stop in self.have)

    def add(self, part: Part) -> None:
        insort(self.have, (part.start, part.stop))
        joined: list[Range] = []
        for start, stop in self.have:
            if joined and start <= joined[-1][1]:
                joined[-1] = (joined[-1][0], max(stop, joined[-1][1]))
            else:
                joined.append((start, stop))
        self.have = joined

    @property
    def missing(self) -> int:
        return self.size - sum(stop - start for start, stop in self.have)

    @property
    def complete(self) -> bool:
        return self.have == [(0, self.size)]


class PartialUploads:
    """The frames that are on their way in parts, at most one per region and fragment."""

    def __init__(self, store: RunStore) -> None:
        self._files = PartialFiles(store)
        self._writers = ThreadPoolExecutor(WRITERS, "part")
        self._uploads: dict[tuple[str, int], PartialUpload] = {}
        self._removals: set[asyncio.Task[None]] = set()
        for listed, draft in self._files.load():
            key, had = (listed.region, listed.fragment), self._uploads
            if older := had.get(key):
                older.draft.discard()
            had[key] = PartialUpload(
                listed.address, listed.frame, listed.size, draft, list(listed.have)
            )

    @property
    def missing(self) -> int:
        """Bytes of frames on their way that are neither here yet nor have their room."""
        on_the_way = self._uploads.values()
        return sum(each.missing for each in on_the_way if not each.draft.allocated)

    def have(self, address: UploadAddress, frame: str) -> list[Range]:
        """The ranges of this frame that are there."""
        upload = self._uploads.get((address.region, address.fragment))
        return list(upload.have) if upload and upload.is_of(address, frame) else []

    async def take(
        self, address: UploadAddress, part: Part, body: AsyncIterator[Batch]
    ) -> list[Range]:
        """Puts a part in its place; answers with what is there then."""
        upload = await self._begun(address, part)
        if upload.covers(part):
            await self._compare(upload, part, body)
            return list(upload.have)
        if upload.touches(part) or len(upload.have) >= MOST_RANGES:
            raise _conflict(f"Bytes {part.start}-{part.stop - 1} overlap what is there.", upload)
        token = upload.writers[part.start] = object()
        try:
            await self._write(upload, part, body, token)
        finally:
            if upload.writers.get(part.start) is token:
                del upload.writers[part.start]
            await self._drop_if_empty(upload, part)
        return list(upload.have)

    def collect(self, address: UploadAddress, frame: str) -> PartialUpload | None:
        """Gives a frame that is complete, and forgets it; None when it is not."""
        key = (address.region, address.fragment)
        upload = self._uploads.get(key)
        if upload is None or not upload.is_of(address, frame) or not upload.complete:
            return None
        del self._uploads[key]
        return upload

    async def at_rest(self, upload: PartialUpload) -> Draft:
        """Gives the draft of a collected frame, once nobody writes to it any more."""
        await self._end(upload)
        upload.draft.size = upload.size
        return upload.draft

    async def _begun(self, address: UploadAddress, part: Part) -> PartialUpload:
        """The upload this part belongs to; one of an older frame makes room for it."""
        await self._sweep()
        key = (address.region, address.fragment)
        earlier = self._uploads.get(key)
        if earlier and earlier.is_of(address, part.frame):
            if earlier.size != part.size:
                raise _conflict(f"The frame has {earlier.size} bytes, not {part.size}.", earlier)
            return earlier
        if earlier:
            # A part that was delayed on its way must not end the frame that came after.
            mine = (earlier.address.epoch, earlier.address.clock)
            if mine > (address.epoch, address.clock):
                raise _conflict(f"Frame {earlier.address.clock} is on its way already.", earlier)
        draft = self._files.begin(address, part.frame, part.size, promised=self.missing)
        upload = self._uploads[key] = PartialUpload(address, part.frame, part.size, draft)
        if earlier:
            # A long file takes a tenth of the time to remove that it took to arrive.
            earlier.over = True
            going = asyncio.create_task(self._discard(earlier))
            self._removals.add(going)
            going.add_done_callback(self._gone)
        return upload

    def _gone(self, going: asyncio.Task[None]) -> None:
        self._removals.discard(going)
        if not going.cancelled():
            going.exception()  # What could not be removed is, when the server starts again.

    async def forget(self, address: UploadAddress) -> None:
        """Drops what is there of a frame that is decided, or of an older one."""
        key = (address.region, address.fragment)
        upload = self._uploads.get(key)
        if upload and upload.address.clock <= address.clock:
            del self._uploads[key]
            await self._discard(upload)

    async def _sweep(self) -> None:
        """Drops what nobody has gone on with for long."""
        for key, upload in list(self._uploads.items()):
            # Others may sweep while we wait for the disk.
            mine = self._uploads.get(key) is upload
            if mine and not upload.writers and forgotten(upload.draft.path):
                del self._uploads[key]
                await self._discard(upload)

    async def _drop_if_empty(self, upload: PartialUpload, part: Part) -> None:
        """Keeps nothing of a frame of which no part was good."""
        key = (upload.address.region, upload.address.fragment)
        idle = not (upload.have or upload.writers)
        if idle and self._uploads.get(key) is upload:
            del self._uploads[key]
            await self._discard(upload)

    async def _discard(self, upload: PartialUpload) -> None:
        await self._end(upload)
        await asyncio.to_thread(upload.draft.discard)

    async def _end(self, upload: PartialUpload) -> None:
        """Returns once nobody writes to the draft and nobody will."""
        upload.over = True
        while upload.writing:
            await asyncio.sleep(0.001)

    async def _write(
        self, upload: PartialUpload, part: Part, body: AsyncIterator[Batch], token: object
    ) -> None:
        """Writes the body at its place and lists it, if it is what its sender says."""
        checksum, at = 0, part.start
        under_way: asyncio.Future[int] | None = None
        async for batch in body:  # The next one comes in while this one is written.
            if under_way:
                checksum = await asyncio.shield(under_way)
            if upload.over or upload.writers.get(part.start) is not token:
                raise _conflict("It was sent again, or a newer frame came.", upload)
            under_way = _put(self._writers, upload, batch, at, checksum)
            at += sum(map(len, batch))
        if under_way:
            checksum = await asyncio.shield(under_way)
        if at < part.stop:
            raise HttpRefusal(
                "damaged",
                f"{at - part.start} of {part.stop - part.start} bytes arrived.",
                AGAIN,
            )
        if (digest := check_value(checksum)) != part.digest:
            raise HttpRefusal(
                "damaged",
                f"The part of {part.stop - part.start} bytes has the digest {digest}, "
                f"its sender says {part.digest}.",
                AGAIN,
            )
        if not upload.touches(part):
            upload.add(part)
        await self._note(upload)

    async def _note(self, upload: PartialUpload) -> None:
        """Lists what is there, so that the next server knows it."""
        upload.writing += 1
        try:
            async with upload.noting:  # Lists that overtook each other would forget parts.
                if upload.over:
                    return
                identity = upload.address, upload.frame, upload.size
                have = list(upload.have)
                await asyncio.to_thread(self._files.note, upload.draft, *identity, have)
        finally:
            upload.writing -= 1

    async def _compare(self, upload: PartialUpload, part: Part, body: AsyncIterator[Batch]) -> None:
        """Takes a part that is there already once more, if it has the same bytes."""
        async for _ in body:
            pass  # Some clients cannot hear an answer before they have said everything.
        if upload.over:
            raise _conflict("The frame was completed, or a newer one came.", upload)
        upload.writing += 1
        try:
            digest = await asyncio.to_thread(_digest, upload.draft, part)
        finally:
            upload.writing -= 1
        if digest != part.digest:
            raise _conflict(f"Other bytes are at {part.start}-{part.stop - 1} already.", upload)


def _put(
    writers: Executor, upload: PartialUpload, batch: Batch, at: int, before: int
) -> asyncio.Future[int]:
    """Writes a batch to its place; goes on with the check value of what came before."""

    def put() -> int:
        upload.draft.write_pieces(batch, at)
        checksum = before
        for piece in batch:
            checksum = crc32(piece, checksum)
        return checksum

    def written(done: asyncio.Future[int]) -> None:
        upload.writing -= 1
        if not done.cancelled():
            done.exception()  # Whoever sent it may be gone; that is no reason to complain.

    upload.writing += 1  # Now, not when it begins: until then the draft might be given up.
    under_way = asyncio.get_running_loop().run_in_executor(writers, put)
    under_way.add_done_callback(written)
    return under_way


def _digest(draft: Draft, part: Part) -> str:
    checksum = 0
    for at in range(part.start, part.stop, READ_BYTES):
        checksum = crc32(draft.read_at(at, min(READ_BYTES, part.stop - at)), checksum)
    return check_value(checksum)


def _conflict(message: str, upload: PartialUpload) -> HttpRefusal:
    hint = "Ask which parts are there, and send the others."
    return HttpRefusal("conflict", message, hint, have=upload.have)
