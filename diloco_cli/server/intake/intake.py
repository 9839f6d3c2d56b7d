"""Takes a contribution in: from the wire to the disk, looked at on the way.

    sizes ─▶ stream to a draft ─▶ envelope ─▶ identity ─▶ numbers ─▶ durable ─▶ decision
             (whole, or in parts)

Whatever can be refused without reading is refused before; whatever can be refused
without decompressing, before that. Room on the disk is asked for with the first bytes.
Numbers are decoded for two contributions at a time, so memory does not grow with the number
of regions that send at once. A small body goes to a thread twice, to be written and opened
and to be looked at and kept: going there and back costs as much as a tenth of a megabyte.
Half a megabyte is worth a third time, since there may be as many bodies as regions.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import ParamSpec, TypeVar

from diloco_cli.core import rounds
from diloco_cli.core.guard import Norms
from diloco_cli.core.rounds import Accept, Receipt
from diloco_cli.errors import WireError
from diloco_cli.server.intake.body import AGAIN, Batch, batches, too_large
from diloco_cli.server.intake.examine import BelievedClaim, examine, misaddressed
from diloco_cli.server.intake.partial import (
    Part,
    PartialUpload,
    PartialUploads,
    Range,
    UploadAddress,
)
from diloco_cli.server.refusals import HttpRefusal
from diloco_cli.server.rounds.coordinator import Coordinator
from diloco_cli.server.rounds.token_totals import REPORTED_FATES
from diloco_cli.server.store.draft import Draft
from diloco_cli.server.store.run_store import RunStore
from diloco_cli.server.versions.next_version import Seen
from diloco_cli.system.threads import result_of, wait_uncancelled
from diloco_cli.wire.frame import Frame, most_bytes, open_frame

MOST_UPLOADS = 64
"""Uploads at the same time; each may make the server hold a flow-control window of bytes."""

SMALL_BYTES = 256 << 20
"""More uploads than that are welcome while all together have no more bytes than half of what so
many windows hold: a refused one has sent its bytes for nothing, and sends them again."""

SHORT_BYTES = 4 << 20
"""Bodies up to this come from all regions at once: of each, half a batch is held."""

SILENCE_SECONDS = 60.0
"""An upload that sends nothing for so long is given up."""

THREADS, LOOKS = 4, 2
"""Uploads that wait for the disk at the same time; those of them that are looked at and kept,
so that bodies can be written meanwhile."""


P = ParamSpec("P")
T = TypeVar("T")


class Intake:
    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._state = coordinator.state
        self._uploads = self._bytes = 0
        self._arriving_whole: set[_Upload] = set()
        self._arriving: Counter[str] = Counter()
        self._locks: dict[str, asyncio.Lock] = {}
        self._parts = PartialUploads(coordinator.state.store)
        self._deciding: dict[tuple[str, int, str], asyncio.Task[rounds.Answer]] = {}
        self._threads = ThreadPoolExecutor(THREADS, "upload")
        self._looking = asyncio.Semaphore(LOOKS)

    async def take(
        self, address: UploadAddress, body: AsyncIterator[bytes], *, length: int | None
    ) -> rounds.Answer:
        """Reads one contribution and answers what becomes of it."""
        limit = self._limit(address)
        size = length or limit
        with (
            self._under_way(address, length, limit, size),
            self._promising(size, take_room=bool(length) and size > SHORT_BYTES) as upload,
        ):
            try:
                last = await self._receive(body, upload, limit, short=size <= SHORT_BYTES)
                frame = await self._in_thread(self._arrived, address, upload, last, length)
                answer = await self._decide(address, upload.draft, frame)
                await self._parts.forget(address)
                return answer
            finally:
                if upload.begun and not upload.draft.closed:
                    await self._in_thread(upload.draft.discard)

    @contextmanager
    def _promising(self, size: int, *, take_room: bool) -> Iterator[_Upload]:
        """Promises a body its room on the disk while it arrives, beside those that do already."""
        promised = self._parts.missing + sum(other.missing for other in self._arriving_whole)
        upload = _Upload(self._state.store, size, promised, take_room=take_room)
        self._arriving_whole.add(upload)
        try:
            yield upload
        finally:
            self._arriving_whole.discard(upload)

    async def _receive(
        self, body: AsyncIterator[bytes], upload: _Upload, limit: int, *, short: bool
    ) -> Batch:
        """Writes a body, each batch while the next comes in; gives the last, not yet written."""
        under_way: asyncio.Future[None] | None = None
        waiting: Batch = []
        try:
            async for batch in batches(body, limit, SILENCE_SECONDS, short=short):
                if waiting:
                    if under_way:
                        await result_of(under_way)
                    under_way = self._begun(upload.write, waiting)
                waiting = batch
            if under_way:
                await result_of(under_way)
            return waiting
        finally:
            if under_way:
                cancelled = await wait_uncancelled(under_way)
                under_way.exception()  # Whoever sent it has heard of another one, or is gone.
                under_way = None  # Its traceback would refer to it, and keep the body.
                if cancelled:
                    raise asyncio.CancelledError

    def _begun(self, work: Callable[P, T], *args: P.args, **more: P.kwargs) -> asyncio.Future[T]:
        loop, bound = asyncio.get_running_loop(), partial(work, *args, **more)
        return loop.run_in_executor(self._threads, bound)

    async def _in_thread(self, work: Callable[P, T], *args: P.args, **more: P.kwargs) -> T:
        """Works in a thread, which a cancelled caller waits for: it cannot be cancelled itself."""
        return await result_of(self._begun(work, *args, **more))

    def _arrived(
        self, address: UploadAddress, upload: _Upload, last: Batch, length: int | None
    ) -> Frame:
        """Writes what came last and opens the frame."""
        upload.write(last)
        if length is not None and upload.draft.size != length:
            raise HttpRefusal("damaged", f"{upload.draft.size} of {length} bytes arrived.", AGAIN)
        return self._open(address, upload.draft)

    async def take_part(
        self, address: UploadAddress, part: Part, body: AsyncIterator[bytes]
    ) -> list[Range]:
        """Takes one part of a contribution; answers with what is there of it then."""
        size, limit = part.stop - part.start, self._limit(address)
        with self._under_way(address, part.size, limit, size):
            if self.having(address, part.frame)[1]:
                return [(0, part.size)]  # A late copy of what is decided, or being decided.
            arriving = batches(body, size, SILENCE_SECONDS)
            return await self._parts.take(address, part, arriving)

    def having(self, address: UploadAddress, frame: str) -> tuple[list[Range], bool]:
        """Says what is there of a frame, and whether its fate is known without the rest."""
        self._coordinator.check_epoch(address.region, address.epoch)
        decided = (address.region, address.fragment, frame) in self._deciding
        decided = decided or self._recorded(address, frame) is not None
        return self._parts.have(address, frame), decided

    async def complete(self, address: UploadAddress, frame: str) -> rounds.Answer:
        """Decides on a contribution that came in parts; asked again, it answers the same."""
        self._coordinator.check_epoch(address.region, address.epoch)
        key = (address.region, address.fragment, frame)
        if key not in self._deciding:
            upload = self._parts.collect(address, frame)
            if upload is None:
                return await self._without_parts(address, frame)
            # Whoever asked may be gone before it is decided, and ask again.
            task = asyncio.create_task(self._decide_parts(address, upload))
            self._deciding[key] = task
            task.add_done_callback(lambda done: self._decided(key, done))
            del task  # Its traceback would refer to it, and keep the frame.
        return await asyncio.shield(self._deciding[key])

    def _decided(self, key: tuple[str, int, str], done: asyncio.Task[rounds.Answer]) -> None:
        self._deciding.pop(key, None)
        if not done.cancelled():
            done.exception()  # Nobody may be left to hear it; that is no reason to complain.

    async def _decide_parts(self, address: UploadAddress, upload: PartialUpload) -> rounds.Answer:
        draft = await self._parts.at_rest(upload)
        try:
            frame = await self._in_thread(self._open, address, draft)
            return await self._decide(address, draft, frame)
        finally:
            await self._in_thread(draft.discard)

    async def _without_parts(self, address: UploadAddress, frame: str) -> rounds.Answer:
        known = self._recorded(address, frame)
        if known is None:
            raise HttpRefusal(
                "incomplete",
                "Parts of this frame are missing.",
                "Send those that are not in `have`.",
                have=self._parts.have(address, frame),
            )
        await self._state.commit.durable()
        return known

    def _recorded(self, address: UploadAddress, frame: str) -> rounds.Recorded | None:
        known = self._state.ledger.region_record(address.region, address.fragment).known
        return rounds.Recorded(known) if known and known.digest == frame else None

    def _limit(self, address: UploadAddress) -> int:
        size = self._state.settings.sizes[address.fragment]
        return max(most_bytes(size, codec) for codec in self._state.history.up_codecs)

    @contextmanager
    def _under_way(
        self, address: UploadAddress, length: int | None, limit: int, size: int
    ) -> Iterator[None]:
        """Counts `size` bytes while they arrive; refuses what can be refused before reading."""
        self._coordinator.check_epoch(address.region, address.epoch)
        if length is not None and length > limit:
            raise too_large(length, limit)
        if self._uploads >= MOST_UPLOADS and self._bytes + size > SMALL_BYTES:
            raise HttpRefusal(
                "busy",
                f"{self._uploads} uploads are under way, {MOST_UPLOADS} is the most.",
                "It is sent again by itself.",
                headers={"retry-after": "2"},
            )
        self._uploads, self._bytes = self._uploads + 1, self._bytes + size
        try:
            yield
        finally:
            self._uploads, self._bytes = self._uploads - 1, self._bytes - size

    async def _decide(self, address: UploadAddress, draft: Draft, frame: Frame) -> rounds.Answer:
        state = self._state
        receipt, said = _receipt(address, frame), frame.header.totals
        # A header may name anything, and what is told on goes into the journal.
        totals = {fate: said[fate] for fate in REPORTED_FATES if fate in said}
        async with self._alone(receipt.digest):
            try:
                unfit, seen = None, None
                # If it would not be accepted, nothing comes between this look and the decision:
                # what stood in its way may be gone soon, and nothing is accepted unseen.
                if self._would_accept(receipt, address.epoch):
                    norms = state.ledger.slots[address.fragment].norms
                    believed = self._believed(receipt)
                    async with self._looking:
                        look = partial(self._look, believed=believed)
                        unfit, seen = await self._in_thread(look, frame, norms, draft)
                if seen is not None:
                    state.seen[receipt.digest] = seen
                return await self._coordinator.submit(
                    receipt,
                    epoch=address.epoch,
                    unfit=unfit,
                    norm=seen.length if seen else 0.0,
                    totals=totals,
                    cursor=frame.header.cursor,
                )
            finally:
                if not self._coordinator.wanted(receipt.digest):
                    state.seen.pop(receipt.digest, None)
                    await self._in_thread(state.store.drop_payloads, [receipt.digest])

    def _believed(self, receipt: Receipt) -> BelievedClaim:
        """What the server knows itself of the work that a contribution claims."""
        account = self._state.totals.account(receipt.region)
        return BelievedClaim(
            steps=self._state.allowance().believable(receipt),
            merged=account.merged[receipt.fragment],
        )

    def _look(
        self, frame: Frame, norms: Norms, draft: Draft, *, believed: BelievedClaim
    ) -> tuple[str | None, Seen | None]:
        """Looks at every number, and keeps a frame in which nothing is wrong."""
        state = self._state
        fragment = state.settings.layout.fragments[frame.header.fragment]
        unfit, squares = examine(frame, fragment, norms, state.history, believed)
        if unfit is not None:
            return unfit, None
        assert squares is not None
        state.store.keep_payload(frame.digest, draft)
        return None, Seen(squares, frame.outline)

    @asynccontextmanager
    async def _alone(self, digest: str) -> AsyncIterator[None]:
        """Lets the same frame in once at a time: what one answer gives up, another may need."""
        lock = self._locks.setdefault(digest, asyncio.Lock())
        self._arriving[digest] += 1
        try:
            async with lock:
                yield
        finally:
            self._arriving[digest] -= 1
            if not self._arriving[digest]:
                del self._arriving[digest], self._locks[digest]

    def _open(self, address: UploadAddress, draft: Draft) -> Frame:
        frame = _opened(draft)
        if isinstance(frame, HttpRefusal):
            raise frame
        draft.release_pages()  # It may have to wait for its turn to be looked at.
        if why := misaddressed(frame, address, self._state.history, self._state.store.run):
            raise HttpRefusal("mismatch", why, _MISMATCH, fate="refused", why=why)
        return frame

    def _would_accept(self, receipt: Receipt, epoch: int) -> bool:
        """Looks ahead, to spare decoding what is decided anyway: retries above all."""
        state = self._state
        standing = state.ledger.region_record(receipt.region, receipt.fragment)
        sync = state.sync
        answer = rounds.admit(
            receipt, standing, epoch=epoch, alpha=sync.alpha, staleness=sync.staleness
        )
        return isinstance(answer, Accept)


class _Upload:
    """A body on its way to a draft, which begins with its first bytes."""

    def __init__(self, store: RunStore, size: int, promised: int, *, take_room: bool) -> None:
        """`size` bytes at most; `promised` are missing of others that came before."""
        room, length = size + promised, size if take_room else 0
        self._begin = lambda: store.draft_payload(room, length=length)
        self.begun, self.missing = False, size
        """What is neither here yet nor has its room."""

    def write(self, batch: Batch) -> None:
        if not self.begun:
            self.draft, self.begun = self._begin(), True
        self.draft.write_pieces(batch)
        left = self.missing - sum(map(len, batch))
        self.missing = 0 if self.draft.allocated else max(0, left)


def _opened(draft: Draft) -> Frame | HttpRefusal:
    """The frame, or why it is none.

    Raised in here, the refusal would refer to the error, which refers to the bytes: they would
    stay in memory, and their room on the disk taken, until the reference cycle is collected.
    """
    try:
        return open_frame(draft.view())
    except WireError as error:
        return HttpRefusal("damaged", error.message, error.hint or AGAIN)


def _receipt(address: UploadAddress, frame: Frame) -> Receipt:
    header = frame.header
    return Receipt(
        region=address.region,
        fragment=address.fragment,
        base=address.base,
        clock=address.clock,
        digest=frame.digest,
        prev=header.prev,
        tokens=header.tokens,
        steps=header.steps,
        bytes=frame.data.nbytes,
    )


_MISMATCH = "Server and worker disagree about what is sent; compare specs and `diloco --version`."
