"""Frames that arrive in parts, in any order, over several connections, with interruptions.

    PUT …/parts/{start}   bytes at their place in a draft, counted once their digest is right
    GET …/parts           which ranges of bytes are there
    PUT …                 with `diloco-parts` and no body: the frame is complete, decide

A region has one draft for each fragment, beside older ones that are being removed, none longer
than the fragment's longest frame, so what the server keeps is bounded by the model and the
regions. A part that is sent again changes nothing. Drafts end with the decision, with a newer
frame, or when a day brought no more of them; they outlive the server (`shelf`).
"""

from __future__ import annotations

import asyncio
from bisect import insort
from collections.abc import AsyncIterator
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

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
        self._shelf = PartialFiles(store)
        self._writers = ThreadPoolExecutor(WRITERS, "part")
        self._gathering: dict[tuple[str, int], PartialUpload] = {}
        self._going: set[asyncio.Task[None]] = set()
        for listed, draft in self._shelf.load():
            key, had = (listed.region, listed.fragment), self._gathering
            if older := had.get(key):
                older.draft.discard()
            had[key] = PartialUpload(
                listed.address, listed.frame, listed.size, draft, list(listed.have)
            )

    @property
    def missing(self) -> int:
        """Bytes of frames on their way that are neither here yet nor have their room."""
        on_the_way = self._gathering.values()
        return sum(each.missing for each in on_the_way if not each.draft.allocated)

    def have(self, address: UploadAddress, frame: str) -> list[Range]:
        """The ranges of this frame that are there."""
        found = self._gathering.get((address.region, address.fragment))
        return list(found.have) if found and found.is_of(address, frame) else []

    async def take(
        self, address: UploadAddress, part: Part, body: AsyncIterator[Batch]
    ) -> list[Range]:
        """Puts a part in its place; answers with what is there then."""
        gathering = await self._begun(address, part)
        if gathering.covers(part):
            await self._compare(gathering, part, body)
            return list(gathering.have)
        if gathering.touches(part) or len(gathering.have) >= MOST_RANGES:
            raise _conflict(f"Bytes {part.start}-{part.stop - 1} overlap what is there.", gathering)
        token = gathering.writers[part.start] = object()
        try:
            await self._write(gathering, part, body, token)
        finally:
            if gathering.writers.get(part.start) is token:
                del gathering.writers[part.start]
            await self._drop_if_empty(gathering, part)
        return list(gathering.have)

    def collect(self, address: UploadAddress, frame: str) -> PartialUpload | None:
        """Gives a frame that is complete, and forgets it; None when it is not."""
        key = (address.region, address.fragment)
        found = self._gathering.get(key)
        if found is None or not found.is_of(address, frame) or not found.complete:
            return None
        del self._gathering[key]
        return found

    async def at_rest(self, gathering: PartialUpload) -> Draft:
        """Gives the draft of a collected frame, once nobody writes to it any more."""
        await self._end(gathering)
        gathering.draft.size = gathering.size
        return gathering.draft

    async def _begun(self, address: UploadAddress, part: Part) -> PartialUpload:
        """The gathering this part belongs to; one of an older frame makes room for it."""
        await self._sweep()
        key = (address.region, address.fragment)
        found = self._gathering.get(key)
        if found and found.is_of(address, part.frame):
            if found.size != part.size:
                raise _conflict(f"The frame has {found.size} bytes, not {part.size}.", found)
            return found
        if found:
            # A part that was delayed on its way must not end the frame that came after.
            mine = (found.address.epoch, found.address.clock)
            if mine > (address.epoch, address.clock):
                raise _conflict(f"Frame {found.address.clock} is on its way already.", found)
        draft = self._shelf.begin(address, part.frame, part.size, promised=self.missing)
        begun = self._gathering[key] = PartialUpload(address, part.frame, part.size, draft)
        if found:
            # A long file takes a tenth of the time to remove that it took to arrive.
            found.over = True
            going = asyncio.create_task(self._discard(found))
            self._going.add(going)
            going.add_done_callback(self._gone)
        return begun

    def _gone(self, going: asyncio.Task[None]) -> None:
        self._going.discard(going)
        if not going.cancelled():
            going.exception()  # What could not be removed is, when the server starts again.

    async def forget(self, address: UploadAddress) -> None:
        """Drops what is there of a frame that is decided, or of an older one."""
        key = (address.region, address.fragment)
        found = self._gathering.get(key)
        if found and found.address.clock <= address.clock:
            del self._gathering[key]
            await self._discard(found)

    async def _sweep(self) -> None:
        """Drops what nobody has gone on with for long."""
        for key, found in list(self._gathering.items()):
            # Others may sweep while we wait for the disk.
            mine = self._gathering.get(key) is found
            if mine and not found.writers and forgotten(found.draft.path):
                del self._gathering[key]
                await self._discard(found)

    async def _drop_if_empty(self, gathering: PartialUpload, part: Part) -> None:
        """Keeps nothing of a frame of which no part was good."""
        key = (gathering.address.region, gathering.address.fragment)
        idle = not (gathering.have or gathering.writers)
        if idle and self._gathering.get(key) is gathering:
            del self._gathering[key]
            await self._discard(gathering)

    async def _discard(self, gathering: PartialUpload) -> None:
        await self._end(gathering)
        await asyncio.to_thread(gathering.draft.discard)

    async def _end(self, gathering: PartialUpload) -> None:
        """Returns once nobody writes to the draft and nobody will."""
        gathering.over = True
        while gathering.writing:
            await asyncio.sleep(0.001)

    async def _write(
        self, gathering: PartialUpload, part: Part, body: AsyncIterator[Batch], token: object
    ) -> None:
        """Writes the body at its place and lists it, if it is what its sender says."""
        found, at = 0, part.start
        under_way: asyncio.Future[int] | None = None
        async for batch in body:  # The next one comes in while this one is written.
            if under_way:
                found = await asyncio.shield(under_way)
            if gathering.over or gathering.writers.get(part.start) is not token:
                raise _conflict("It was sent again, or a newer frame came.", gathering)
            under_way = _put(self._writers, gathering, batch, at, found)
            at += sum(map(len, batch))
        if under_way:
            found = await asyncio.shield(under_way)
        if at < part.stop:
            raise HttpRefusal(
                "damaged",
                f"{at - part.start} of {part.stop - part.start} bytes arrived.",
                AGAIN,
            )
        if (digest := check_value(found)) != part.digest:
            raise HttpRefusal(
                "damaged",
                f"The part of {part.stop - part.start} bytes has the digest {digest}, "
                f"its sender says {part.digest}.",
                AGAIN,
            )
        if not gathering.touches(part):
            gathering.add(part)
        await self._note(gathering)

    async def _note(self, gathering: PartialUpload) -> None:
        """Lists what is there, so that the next server knows it."""
        gathering.writing += 1
        try:
            async with gathering.noting:  # Lists that overtook each other would forget parts.
                if gathering.over:
                    return
                about = gathering.address, gathering.frame, gathering.size
                have = list(gathering.have)
                await asyncio.to_thread(self._shelf.note, gathering.draft, *about, have)
        finally:
            gathering.writing -= 1

    async def _compare(
        self, gathering: PartialUpload, part: Part, body: AsyncIterator[Batch]
    ) -> None:
        """Takes a part that is there already once more, if it has the same bytes."""
        async for _ in body:
            pass  # Some clients cannot hear an answer before they have said everything.
        if gathering.over:
            raise _conflict("The frame was completed, or a newer one came.", gathering)
        gathering.writing += 1
        try:
            found = await asyncio.to_thread(_digest, gathering.draft, part)
        finally:
            gathering.writing -= 1
        if found != part.digest:
            raise _conflict(f"Other bytes are at {part.start}-{part.stop - 1} already.", gathering)


def _put(
    writers: Executor, gathering: PartialUpload, batch: Batch, at: int, before: int
) -> asyncio.Future[int]:
    """Writes a batch to its place; goes on with the check value of what came before."""

    def put() -> int:
        gathering.draft.write_pieces(batch, at)
        found = before
        for piece in batch:
            found = crc32(piece, found)
        return found

    def written(done: asyncio.Future[int]) -> None:
        gathering.writing -= 1
        if not done.cancelled():
            done.exception()  # Whoever sent it may be gone; that is no reason to complain.

    gathering.writing += 1  # Now, not when it begins: until then the draft might be given up.
    under_way = asyncio.get_running_loop().run_in_executor(writers, put)
    under_way.add_done_callback(written)
    return under_way


def _digest(draft: Draft, part: Part) -> str:
    found = 0
    for at in range(part.start, part.stop, READ_BYTES):
        found = crc32(draft.read_at(at, min(READ_BYTES, part.stop - at)), found)
    return check_value(found)


def _conflict(message: str, gathering: PartialUpload) -> HttpRefusal:
    beside: dict[str, Any] = {"have": gathering.have}
    return HttpRefusal(
        "conflict", message, "Ask which parts are there, and send the others.", **beside
    )
