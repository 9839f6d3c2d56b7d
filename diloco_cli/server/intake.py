"""Takes a contribution in: from the wire to the disk, looked at on the way.

    sizes ─▶ stream to a draft ─▶ envelope ─▶ identity ─▶ numbers ─▶ durable ─▶ decision
             (whole, or in parts)

Whatever can be refused without reading is refused before; whatever can be refused
without decompressing, before that. Numbers are decoded for one contribution at a time,
so memory does not grow with the number of regions that send at once.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager

import numpy as np

from diloco_cli.core import rounds
from diloco_cli.core.fragments import Fragment
from diloco_cli.core.guard import LARGEST, NOT_FINITE, Norms, inspect, unusual
from diloco_cli.core.rounds import Accept, Receipt
from diloco_cli.errors import WireError
from diloco_cli.server.coordinator import Coordinator
from diloco_cli.server.denied import Denied
from diloco_cli.server.parts import Address, Gathering, Part, Parts, Range
from diloco_cli.server.receiving import AGAIN, batches, too_large
from diloco_cli.server.recipe import Recipe
from diloco_cli.server.store import Draft
from diloco_cli.wire.codec import NotFinite
from diloco_cli.wire.fold import edges_of
from diloco_cli.wire.frame import Frame, most_bytes, open_frame

MOST_UPLOADS = 64
"""Uploads at the same time; each may make the server hold a flow-control window of bytes."""

SMALL_BYTES = 256 << 20
"""More uploads than that are welcome while all together have no more bytes than four windows:
a refused one has sent its bytes for nothing, and sends them again."""

SILENCE_SECONDS = 60.0
"""An upload that sends nothing for so long is given up."""

GENEROSITY = 8
"""Times the tokens of a step in the server's spec that a region may claim: it may train
with larger batches than the server knows of. In a round they count no more than those."""


class Intake:
    def __init__(self, coordinator: Coordinator) -> None:
        self._coordinator = coordinator
        self._state = coordinator.state
        self._uploads = self._bytes = 0
        self._arriving: Counter[str] = Counter()
        self._locks: dict[str, asyncio.Lock] = {}
        self._parts = Parts(coordinator.state.store)
        self._deciding: dict[tuple[str, int, str], asyncio.Task[rounds.Answer]] = {}
        self._checks = ThreadPoolExecutor(1, "check")

    async def take(
        self, address: Address, body: AsyncIterator[bytes], *, length: int | None
    ) -> rounds.Answer:
        """Reads one contribution and answers what becomes of it."""
        limit = self._limit(address)
        with self._under_way(address, length, limit, length or limit):
            # What others have been promised is not there for us.
            draft = await asyncio.to_thread(self._state.store.draft_payload, self._bytes)
            try:
                async for batch in batches(body, limit, SILENCE_SECONDS):
                    await asyncio.to_thread(draft.write_pieces, batch)
                if length is not None and draft.size != length:
                    raise Denied("damaged", f"{draft.size} of {length} bytes arrived.", AGAIN)
                answer = await self._decide(address, draft)
                await self._parts.forget(address)
                return answer
            finally:
                await asyncio.to_thread(draft.discard)

    async def take_part(
        self, address: Address, part: Part, body: AsyncIterator[bytes]
    ) -> list[Range]:
        """Takes one part of a contribution; answers with what is there of it then."""
        size, limit = part.stop - part.start, self._limit(address)
        with self._under_way(address, part.size, limit, size):
            if self.having(address, part.frame)[1]:
                return [(0, part.size)]  # A late copy of what is decided, or being decided.
            arriving = batches(body, size, SILENCE_SECONDS)
            return await self._parts.take(address, part, arriving)

    def having(self, address: Address, frame: str) -> tuple[list[Range], bool]:
        """Says what is there of a frame, and whether its fate is known without the rest."""
        self._coordinator.check_epoch(address.region, address.epoch)
        decided = (address.region, address.fragment, frame) in self._deciding
        decided = decided or self._recorded(address, frame) is not None
        return self._parts.have(address, frame), decided

    async def complete(self, address: Address, frame: str) -> rounds.Answer:
        """Decides on a contribution that came in parts; asked again, it answers the same."""
        self._coordinator.check_epoch(address.region, address.epoch)
        key = (address.region, address.fragment, frame)
        if key not in self._deciding:
            found = self._parts.collect(address, frame)
            if found is None:
                return await self._without_parts(address, frame)
            # Whoever asked may be gone before it is decided, and ask again.
            task = asyncio.create_task(self._decide_parts(address, found))
            self._deciding[key] = task
            task.add_done_callback(lambda done: self._decided(key, done))
        return await asyncio.shield(self._deciding[key])

    def _decided(self, key: tuple[str, int, str], done: asyncio.Task[rounds.Answer]) -> None:
        self._deciding.pop(key, None)
        if not done.cancelled():
            done.exception()  # Nobody may be left to hear it; that is no reason to complain.

    async def _decide_parts(self, address: Address, found: Gathering) -> rounds.Answer:
        draft = await self._parts.at_rest(found)
        try:
            return await self._decide(address, draft)
        finally:
            await asyncio.to_thread(draft.discard)

    async def _without_parts(self, address: Address, frame: str) -> rounds.Answer:
        known = self._recorded(address, frame)
        if known is None:
            raise Denied(
                "incomplete",
                "Parts of this frame are missing.",
                "Send those that are not in `have`.",
                have=self._parts.have(address, frame),
            )
        await self._state.commit.durable()
        return known

    def _recorded(self, address: Address, frame: str) -> rounds.Recorded | None:
        known = self._state.ledger.standing(address.region, address.fragment).known
        return rounds.Recorded(known) if known and known.digest == frame else None

    def _limit(self, address: Address) -> int:
        recipe = self._state.recipe
        return most_bytes(recipe.sizes[address.fragment], recipe.up)

    @contextmanager
    def _under_way(
        self, address: Address, length: int | None, limit: int, size: int
    ) -> Iterator[None]:
        """Counts `size` bytes while they arrive; refuses what can be refused before reading."""
        self._coordinator.check_epoch(address.region, address.epoch)
        if length is not None and length > limit:
            raise too_large(length, limit)
        if self._uploads >= MOST_UPLOADS and self._bytes + size > SMALL_BYTES:
            raise Denied(
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

    async def _decide(self, address: Address, draft: Draft) -> rounds.Answer:
        state, loop = self._state, asyncio.get_running_loop()
        fragment = state.recipe.layout.fragments[address.fragment]
        frame = await loop.run_in_executor(self._checks, self._open, address, draft)
        receipt, totals = _receipt(address, frame), dict(frame.header.totals)
        async with self._alone(receipt.digest):
            try:
                unfit, squares = None, None
                # If it would not be accepted, nothing comes between this look and the decision:
                # what stood in its way may be gone soon, and nothing is accepted unseen.
                if self._would_accept(receipt, address.epoch):
                    norms = state.ledger.slots[fragment.number].norms
                    unfit, squares = await loop.run_in_executor(
                        self._checks, examine, frame, fragment, norms, state.recipe
                    )
                    if unfit is None:
                        await asyncio.to_thread(state.store.keep_payload, receipt.digest, draft)
                length = math.sqrt(float(squares.sum())) if squares is not None else 0.0
                if squares is not None and unfit is None:
                    state.squares[receipt.digest] = squares
                return await self._coordinator.submit(
                    receipt, epoch=address.epoch, unfit=unfit, norm=length, totals=totals
                )
            finally:
                if not self._coordinator.wanted(receipt.digest):
                    state.squares.pop(receipt.digest, None)
                    await asyncio.to_thread(state.store.drop_payloads, [receipt.digest])

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

    def _open(self, address: Address, draft: Draft) -> Frame:
        try:
            frame = open_frame(draft.view())
        except WireError as error:
            raise Denied("damaged", error.message, error.hint or AGAIN) from None
        if why := misaddressed(frame, address, self._state.recipe, self._state.store.run):
            raise Denied("mismatch", why, _MISMATCH, fate="refused", why=why)
        return frame

    def _would_accept(self, receipt: Receipt, epoch: int) -> bool:
        """Looks ahead, to spare decoding what is decided anyway: retries above all."""
        state = self._state
        standing = state.ledger.standing(receipt.region, receipt.fragment)
        sync = state.sync
        answer = rounds.admit(
            receipt, standing, epoch=epoch, alpha=sync.alpha, staleness=sync.staleness
        )
        return isinstance(answer, Accept)


def _receipt(address: Address, frame: Frame) -> Receipt:
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


def misaddressed(frame: Frame, address: Address, recipe: Recipe, run: str) -> str | None:
    """Says in what a frame is not what its URL, or this run, says it is."""
    header = frame.header
    size = recipe.sizes[address.fragment]
    for what, found, expected in (
        ("kind", header.kind, "contribution"),
        ("run", header.run, run),
        ("layout", header.layout, recipe.layout.digest),
        ("region", header.region, address.region),
        ("fragment", header.fragment, address.fragment),
        ("size", header.size, size),
        ("base", header.base, address.base),
        ("clock", header.clock, address.clock),
        ("codec", frame.codec, recipe.up),
        ("parts", header.parts, 1),
    ):
        if found != expected:
            return f"the frame's {what} is {found!s:.80}, expected was {expected!s:.80}"
    return None


def examine(
    frame: Frame, fragment: Fragment, norms: Norms, recipe: Recipe
) -> tuple[str | None, np.ndarray | None]:
    """Decodes a contribution: says why it must not be merged, or None; and its pieces' squares.

    Where it goes without, the values are not even laid out.
    """
    if why := _dishonest(frame, recipe):
        return why, None
    bounds = {"steps": frame.header.steps, "limit": recipe.spec.server.guard.norm}
    try:
        squares = frame.squares(edges_of(fragment))
        length = math.sqrt(float(squares.sum()))
        if not length <= LARGEST:  # One of its values may be as large: it gets a closer look.
            return inspect(frame.values(), fragment, norms, **bounds), squares
    except NotFinite as error:
        where = _tensor_at(fragment, error.index)
        return f"{where} has the value {error.value}, which is {NOT_FINITE}", None
    except WireError as error:
        return error.message, None
    return unusual(length, norms, **bounds), squares


def _dishonest(frame: Frame, recipe: Recipe) -> str | None:
    """Says what is impossible about the work a contribution claims to contain."""
    header = frame.header
    if header.steps < 1 or header.tokens <= 0:
        return f"it claims {header.tokens:g} tokens in {header.steps:g} steps"
    inner = recipe.spec.inner_of(header.region)
    most = GENEROSITY * inner.batch * inner.sequence
    if header.tokens > most * header.steps:
        return (
            f"it claims {header.tokens:g} tokens in {header.steps:g} steps, but the server's spec "
            f"gives a step of {header.region} {inner.batch * inner.sequence}"
        )
    return None


def _tensor_at(fragment: Fragment, index: int) -> str:
    for piece in fragment.pieces:
        if piece.offset <= index < piece.offset + piece.size:
            return f"{piece.tensor} (rows {piece.start}:{piece.stop})"
    return f"value {index}"


_MISMATCH = "Server and worker disagree about what is sent; compare specs and `diloco --version`."
