"""Merges closed rounds and publishes what comes out: the next version of a fragment.

    closed round ─▶ merge in a thread ─▶ store ─▶ journal ─▶ visible ─▶ tidy up

One thread does all of it, so the merges of all fragments take turns.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from typing import TypeVar

from diloco_cli.core import pace
from diloco_cli.core.journal_records import MemberDropped, VersionPublished, VersionStored
from diloco_cli.core.rounds import Receipt, Seconds
from diloco_cli.errors import StoreDamaged
from diloco_cli.server.rounds.divergence import note_failed_round, note_sound_round
from diloco_cli.server.rounds.state import State
from diloco_cli.server.store.filed_state import FiledState
from diloco_cli.server.store.group_commit import RETRY_SECONDS
from diloco_cli.server.store.retention import is_due
from diloco_cli.server.store.state_format import StoredState
from diloco_cli.server.versions.held import settle
from diloco_cli.server.versions.next_version import Spoiled, Version, next_version
from diloco_cli.system.failpoints import reach
from diloco_cli.system.files import DiskFull

T = TypeVar("T")

log = logging.getLogger(__name__)


class Publisher:
    """Turns every closed round into a version, however often the disk must be asked."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.merges: dict[int, asyncio.Task[None]] = {}
        """By fragment: the merge that is under way."""
        self._thread = ThreadPoolExecutor(1, "merge")
        self._compacting = False
        self._turn = asyncio.Lock()

    def resume(self) -> None:
        """Takes up the merges that a crash interrupted."""
        for fragment, slot in enumerate(self.state.ledger.slots):
            if slot.phase == "closing":
                self.merge_soon(fragment)

    async def settled(self) -> None:
        """Waits until no merge is under way and everything recorded is durable."""
        while self.merges:
            await asyncio.wait(self.merges.values())
        await self.state.commit.durable()

    def merge_soon(self, fragment: int) -> None:
        if fragment in self.merges:
            return  # It is tidying up after the last round and takes this one next.
        task = asyncio.get_running_loop().create_task(self._merge(fragment))
        self.merges[fragment] = task
        task.add_done_callback(lambda task: self._merged(fragment, task))

    def _merged(self, fragment: int, task: asyncio.Task[None]) -> None:
        self.merges.pop(fragment, None)
        if not task.cancelled() and (error := task.exception()):
            self.state.fail(error)
        state = self.state
        if state.ledger.slots[fragment].closing and not (
            state.stopping or state.closed or state.failure
        ):
            self.merge_soon(fragment)  # Closed in the moment in which the task ended.
        state.wake.set()

    async def _merge(self, fragment: int) -> None:
        """Publishes a closed round, however often the disk must be asked."""
        state, slot = self.state, self.state.ledger.slots[fragment]
        while slot.closing:
            try:
                await self._publish(fragment, tuple(slot.closing.values()))
                state.disk_has_room("version")
            except DiskFull as error:
                state.disk_full("version", error)
                if state.stopping or state.closed:
                    return  # The next start takes it up.
                await asyncio.sleep(RETRY_SECONDS)

    async def _publish(self, fragment: int, receipts: tuple[Receipt, ...]) -> None:
        state, store = self.state, self.state.store
        await state.commit.durable()
        # In turns, so that no more than one version is in memory that is not published yet.
        async with self._turn:
            spoiled = await self._make(fragment, receipts)
        if spoiled:
            dropped = self._drop(fragment, spoiled)
            if spoiled.diverged:
                note_failed_round(state, receipts, spoiled.why)
            await state.commit.durable()
            await self._in_thread(lambda: store.drop_payloads(dropped))
            return
        await state.commit.durable()
        reach("version.published")
        await self._tidy_up(fragment)

    async def _make(self, fragment: int, receipts: tuple[Receipt, ...]) -> Spoiled | None:
        """Computes a version and makes it the newest; its vectors are let go of at the end."""
        began = self.state.clock()
        result = await self._compute(fragment, receipts)
        if isinstance(result, Spoiled):
            return result
        reach("merge.done")
        await self._install(fragment, *result, began=began)
        return None

    async def _install(
        self, fragment: int, version: Version, delta: bytes, *, began: Seconds
    ) -> None:
        """Makes a version durable, records it, and makes it the newest."""
        state, store = self.state, self.state.store
        vectors = version.state.load()
        whole = self._is_due(fragment, vectors, version.number)

        def keep() -> tuple[Version, str]:
            # First what may be gone after a crash: if there is no room for it, nothing happened.
            newest = settle(state.settings, store, fragment, version, stored=whole)
            digest = store.publish(fragment, version.number, vectors, delta, whole=whole)
            return newest, digest

        newest, digest = await self._in_thread(keep)
        note_sound_round(state, fragment)
        state.record(
            VersionPublished(
                fragment,
                version.number,
                version.digest,
                digest,
                version.members,
                stored=whole,
                bytes=len(delta),
                bytes_down=state.totals.bytes_down,
                seconds=round(state.seconds, 3),
                terms=state.ledger.slots[fragment].terms,
            )
        )
        # A name may have been forgotten while it was made.
        merged = dict(state.ledger.slots[fragment].merged)
        state.weights.install(fragment, replace(newest, merged=merged))
        state.table.moved_at = now = state.clock()
        state.table.averages = pace.published(state.table.averages, now - began)
        self._note_published(fragment, version, len(delta), now - began)
        state.wake.set()
        reach("version.recorded")

    def _is_due(self, fragment: int, state: StoredState, number: int) -> bool:
        """Says whether a version is stored as a whole, or made again should this server die."""
        slot = self.state.ledger.slots[fragment]
        receipts = [slot.closing, *(made.receipts for made in slot.unstored)]
        behind = sum(receipt.bytes for each in receipts for receipt in each.values())
        size = state.nbytes
        rule = self.state.store.retention
        return is_due(rule, fragment, number, behind=behind, size=size)

    async def _tidy_up(self, fragment: int) -> None:
        """Tidies, however often the disk must be asked: the next tidying is at the next start."""
        state = self.state
        while True:
            try:
                return await self._tidy(fragment)
            except DiskFull as error:
                state.disk_full("version", error)
                if state.stopping or state.closed:
                    return
                await asyncio.sleep(RETRY_SECONDS)

    async def store_newest(self) -> None:
        """Stores every newest version as a whole, so that the next start need not make any.

        Nor need it be able to: it may be that of another version of this program.
        """
        state = self.state
        for fragment, slot in enumerate(state.ledger.slots):
            if not slot.unstored or slot.closing:
                continue
            newest = state.weights.newest[fragment]
            try:
                await self._in_thread(partial(self._store_whole, fragment, newest))
                state.record(VersionStored(fragment, newest.number))
                await state.commit.durable()
                await self._tidy(fragment)
            except DiskFull:
                return  # They are made again, or tidied up by the next start.

    def _store_whole(self, fragment: int, version: Version) -> None:
        self.state.store.publish(fragment, version.number, version.state.load(), None)

    async def _tidy(self, fragment: int) -> None:
        """Puts away what is in the stored version, and what is needed no more.

        Only once that is on record: until then a crash computes it from these again.
        """
        state, store = self.state, self.state.store
        slot = state.ledger.slots[fragment]
        await self._in_thread(partial(store.put_away, fragment, slot.version, slot.base, slot.made))
        if store.is_long() and not self._compacting:
            self._compacting = True
            try:
                snapshot = state.snapshot()
                await state.commit.between_flushes(lambda: store.compact(snapshot))
            finally:
                self._compacting = False

    async def _compute(
        self, fragment: int, receipts: tuple[Receipt, ...]
    ) -> tuple[Version, bytes] | Spoiled:
        # Apart from publishing: what waits for the disk must not keep the old version alive.
        state, slot = self.state, self.state.ledger.slots[fragment]
        settings, store = state.history[slot.terms], state.store
        layout, old = settings.layout.fragments[fragment], state.weights.newest[fragment]
        digests = [receipt.digest for receipt in receipts if receipt.digest in state.seen]
        seen = {digest: state.seen.pop(digest) for digest in digests}
        drain, live = slot.drain, slot.live

        def from_version(old: Version) -> tuple[Version, bytes] | Spoiled:
            known = {"drain": drain, "live": live, "seen": seen}
            return next_version(settings, store, old, layout, receipts, **known)

        def compute() -> tuple[Version, bytes] | Spoiled:
            try:
                return from_version(old)
            except StoreDamaged as error:
                if not isinstance(old.state, FiledState) or old.state.stored:
                    raise
                log.warning(f"{error.message} It is recomputed.")
                return from_version(replace(old, state=state.weights.recompute(fragment)))

        return await self._in_thread(compute)

    def _drop(self, fragment: int, spoiled: Spoiled) -> list[str]:
        """Takes members out of a round; says which payloads are needed no more."""
        state, slot = self.state, self.state.ledger.slots[fragment]
        dropped = []
        for region in spoiled.regions:
            receipt = slot.closing[region]
            dropped.append(receipt.digest)
            fate, why = spoiled.fate, spoiled.why
            # When no member can be merged, none of them is to blame in particular.
            alone = fate == "refused" and len(spoiled.regions) == 1
            state.record(MemberDropped(fragment, region, fate, why, alone))
            what = {"region": region, "fragment": fragment, "version": slot.version}
            state.note(fate, **what, base=receipt.base, clock=receipt.clock, why=why)
            state.leases.undrain(region)
        state.wake.set()
        return dropped

    def _note_published(self, fragment: int, version: Version, size: int, seconds: Seconds) -> None:
        tokens = self.state.ledger.applied(self.state.settings.sizes)
        self.state.note(
            "published",
            fragment=fragment,
            version=version.number,
            members=list(version.members),
            bytes=size,
            seconds_taken=round(seconds, 3),
            tokens=round(tokens, 1),
        )

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._thread, work)
