"""Moves the rounds: calls what is due, closes what is ready, merges, ends, finishes.

    tick ─▶ end? ─▶ call ─▶ close ─▶ finished?            one act, no awaits
                             └▶ merge in a thread ─▶ store ─▶ journal ─▶ visible

`tick` does all that is due and says when to look again, so nothing is polled; tests
turn the clock themselves and call it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import TypeVar

from diloco_cli.core import pace, rounds
from diloco_cli.core.journal_records import (
    FragmentCalled,
    MemberDropped,
    RoundClosed,
    RunEnded,
    RunFinished,
    VersionPublished,
    VersionStored,
)
from diloco_cli.core.rounds import Close, Receipt, Round
from diloco_cli.server.rounds.state import Seconds, State
from diloco_cli.server.store.durable import DiskFull
from diloco_cli.server.store.group_commit import RETRY_SECONDS
from diloco_cli.server.store.on_disk import put_away
from diloco_cli.server.versions.next_version import Spoiled, Version, next_version
from diloco_cli.system.failpoints import reach

T = TypeVar("T")

PATIENCE = 12
"""Leases without any accepted or published work after which a drain, or waiting for the
goodbyes of a finished run, is given up. A trainer may restart and compile in that time."""


class Conductor:
    def __init__(self, state: State) -> None:
        self.state = state
        self.done = asyncio.Event()
        """Set when there is nothing left to serve for."""
        self._stop_at: Seconds = 0.0
        self._merges: dict[int, asyncio.Task[None]] = {}
        self._thread = ThreadPoolExecutor(1, "merge")
        self._compacting = False
        self._turn = asyncio.Lock()

    async def run(self) -> None:
        """Ticks whenever something happened, or a moment came that may change an answer."""
        state = self.state
        try:
            self.resume()
            while not self.done.is_set() and not state.closed:
                state.wake.clear()
                until = self.tick()
                left = None if until is None else max(0.0, until - state.clock())
                with suppress(TimeoutError):
                    await asyncio.wait_for(state.wake.wait(), left)
        except Exception as error:
            state.fail(error)
        self.done.set()

    def resume(self) -> None:
        """Takes up the merges that a crash interrupted."""
        for fragment, slot in enumerate(self.state.ledger.slots):
            if slot.phase == "closing":
                self._merge_soon(fragment)

    def tick(self) -> Seconds | None:
        """Does whatever is due and says when to look again; None when only an event matters."""
        state, now = self.state, self.state.clock()
        for region, silence in state.presences.lapses(now=now):
            state.note("lapsed", region=region, silent_seconds=round(silence, 1))
        wakes = state.presences.wakes(now=now)
        try:
            if not state.stopping and not state.ledger.finished:
                wakes += self._advance(now)
                state.room_again("journal")
        except DiskFull as error:
            state.no_room("journal", error)
            wakes.append(now + RETRY_SECONDS)
        wakes += self._leave(now)
        return min((wake for wake in wakes if wake > now), default=None)

    def stop(self, why: str, *, everyone: bool = True) -> None:
        """Begins a graceful stop; open rounds stay open for the next start.

        Of the whole run, whose regions are told and waited for, or only of this server.
        """
        state = self.state
        if not state.stopping:
            state.stopping, self._stop_at = why, state.clock()
            state.note("run-stopped", why=why)
        state.everyone = state.everyone or everyone
        state.announce()
        state.wake.set()

    async def settled(self) -> None:
        """Waits until no merge is under way and everything recorded is durable."""
        while self._merges:
            await asyncio.wait(self._merges.values())
        await self.state.commit.durable()

    # Rounds

    def _advance(self, now: Seconds) -> list[Seconds]:
        self._end_if_spent(now)
        # Whoever is in quarantine is called as well: its sound work is what ends that.
        self._call_due(self.state.presences.here(now=now), now)
        wakes = self._close_ready(self.state.live(), now)
        return wakes + self._finish_if_drained(now)

    def _end_if_spent(self, now: Seconds) -> None:
        state = self.state
        applied, budget = state.ledger.applied(state.recipe.sizes), state.spec.budget.tokens
        if state.ledger.end or applied < budget:
            return
        why = f"{applied:.0f} of {budget} tokens are merged"
        state.record(RunEnded(why))
        state.note("run-ended", why=why, tokens=applied)
        state.over_at = state.moved_at = now
        state.presences.undrain()

    def _call_due(self, live: set[str], now: Seconds) -> None:
        state = self.state
        slots = state.ledger.slots
        if all(slot.phase != "idle" for slot in slots):
            return  # Most looks are for other reasons, and reports of many regions are long.
        reports = state.presences.reports()
        due = (
            pace.due_at_end(slots, reports, live)
            if state.ledger.end
            else pace.due(slots, reports, live, state.sync)
        )
        for fragment in due:
            version = slots[fragment].version
            state.record(FragmentCalled(fragment, version))
            state.note("called", fragment=fragment, version=version)
            state.rounds[fragment] = rounds.called(
                state.rounds[fragment],
                need=state.need,
                usual=pace.usual_answer(state.averages, live, state.need),
                grace=pace.grace(state.averages, live, state.sync),
                now=now,
            )

    def _close_ready(self, live: set[str], now: Seconds) -> list[Seconds]:
        state, wakes = self.state, []
        for fragment, slot in enumerate(state.ledger.slots):
            if slot.phase != "called":
                continue
            verdict = rounds.decide(
                state.rounds[fragment],
                live=live,
                need=state.need,
                drained=state.presences.drained(fragment) if state.ledger.end else (),
                now=now,
            )
            state.why[fragment] = verdict.why
            if isinstance(verdict, Close):
                self._close(fragment, verdict)
            elif verdict.until is not None:
                wakes.append(verdict.until)
        return wakes

    def _close(self, fragment: int, verdict: Close) -> None:
        state, slot = self.state, self.state.ledger.slots[fragment]
        closed = RoundClosed(fragment, slot.version, verdict.members, drain=bool(state.ledger.end))
        state.record(closed)
        state.note(
            "closed",
            fragment=fragment,
            version=slot.version,
            members=list(closed.members),
            drain=closed.drain,
            weights=[state.recipe.weight(receipt) for receipt in slot.closing.values()],
            why=verdict.why,
        )
        state.rounds[fragment] = Round()
        reach("round.closed")
        self._merge_soon(fragment)

    # Merging

    def _merge_soon(self, fragment: int) -> None:
        if fragment in self._merges:
            return  # It is tidying up after the last round and takes this one next.
        task = asyncio.get_running_loop().create_task(self._merge(fragment))
        self._merges[fragment] = task
        task.add_done_callback(lambda task: self._merged(fragment, task))

    def _merged(self, fragment: int, task: asyncio.Task[None]) -> None:
        self._merges.pop(fragment, None)
        if not task.cancelled() and (error := task.exception()):
            self.state.fail(error)
        state = self.state
        if state.ledger.slots[fragment].closing and not (
            state.stopping or state.closed or state.failure
        ):
            self._merge_soon(fragment)  # Closed in the moment in which the task ended.
        state.wake.set()

    async def _merge(self, fragment: int) -> None:
        """Publishes a closed round, however often the disk must be asked."""
        state, slot = self.state, self.state.ledger.slots[fragment]
        while slot.closing:
            try:
                await self._publish(fragment, tuple(slot.closing.values()))
                state.room_again("version")
            except DiskFull as error:
                state.no_room("version", error)
                if state.stopping or state.closed:
                    return  # The next start takes it up.
                await asyncio.sleep(RETRY_SECONDS)

    async def _publish(self, fragment: int, receipts: tuple[Receipt, ...]) -> None:
        state, store = self.state, self.state.store
        await state.commit.durable()
        # In turns, so that no more than one version is in memory that is not published yet.
        async with self._turn:
            began = state.clock()
            result = await self._compute(fragment, receipts)
            if not isinstance(result, Spoiled):
                reach("merge.done")
                await self._install(fragment, *result, began=began)
        if isinstance(result, Spoiled):
            dropped = self._drop(fragment, result)
            await state.commit.durable()
            await self._in_thread(lambda: store.drop_payloads(dropped))
            return
        await state.commit.durable()
        reach("version.published")
        await self._tidy_up(fragment)

    async def _install(
        self, fragment: int, version: Version, delta: bytes, *, began: Seconds
    ) -> None:
        """Makes a version durable, records it, and makes it the newest."""
        state, store = self.state, self.state.store
        whole = self._is_due(fragment, version)
        digest = await self._in_thread(
            lambda: store.publish(fragment, version.number, version.state, delta, whole=whole)
        )
        state.record(
            VersionPublished(
                fragment,
                version.number,
                version.digest,
                digest,
                version.members,
                stored=whole,
                bytes=len(delta),
                bytes_down=state.tally.bytes_down,
                seconds=round(state.seconds, 3),
            )
        )
        state.weights.install(fragment, version)
        state.moved_at = now = state.clock()
        state.averages = pace.published(state.averages, now - began)
        self._note_published(fragment, version, len(delta), now - began)
        state.wake.set()
        reach("version.recorded")

    def _is_due(self, fragment: int, version: Version) -> bool:
        """Says whether a version is stored as a whole, or made again should this server die."""
        slot, state = self.state.ledger.slots[fragment], version.state
        receipts = [slot.closing, *(made.receipts for made in slot.unstored)]
        behind = sum(receipt.bytes for each in receipts for receipt in each.values())
        size = state.theta.nbytes + state.momentum.nbytes + state.published.nbytes
        return self.state.store.is_due(fragment, version.number, behind=behind, size=size)

    async def _tidy_up(self, fragment: int) -> None:
        """Tidies, however often the disk must be asked: nobody would before the next start."""
        state = self.state
        while True:
            try:
                return await self._tidy(fragment)
            except DiskFull as error:
                state.no_room("version", error)
                if state.stopping or state.closed:
                    return
                await asyncio.sleep(RETRY_SECONDS)

    async def store_newest(self) -> None:
        """Stores every newest version as a whole, so that the next start need not make any.

        Nor need it be able to: it may be that of another version of this program.
        """
        state, store = self.state, self.state.store
        for fragment, slot in enumerate(state.ledger.slots):
            if not slot.unstored or slot.closing:
                continue
            newest = state.weights.newest[fragment]
            try:
                await self._in_thread(
                    partial(store.publish, fragment, newest.number, newest.state, None)
                )
                state.record(VersionStored(fragment, newest.number))
                await state.commit.durable()
                await self._tidy(fragment)
            except DiskFull:
                return  # They are made again, or tidied up by the next start.

    async def _tidy(self, fragment: int) -> None:
        """Puts away what is in the stored version, and what nobody needs any more.

        Only once that is on record: until then a crash computes it from these again.
        """
        state, store = self.state, self.state.store
        slot = state.ledger.slots[fragment]
        await self._in_thread(
            partial(put_away, store, fragment, slot.version, slot.base, slot.made)
        )
        if store.is_long() and not self._compacting:
            self._compacting = True
            try:
                snapshot = state.snapshot()
                await state.commit.in_turn(lambda: store.compact(snapshot))
            finally:
                self._compacting = False

    async def _compute(
        self, fragment: int, receipts: tuple[Receipt, ...]
    ) -> tuple[Version, bytes] | Spoiled:
        # Apart from publishing: whoever waits for the disk must not hold the old version.
        state, slot = self.state, self.state.ledger.slots[fragment]
        recipe, store = state.recipe, state.store
        about, old = recipe.layout.fragments[fragment], state.weights.newest[fragment]
        known = [state.seen.pop(each.digest, None) for each in receipts]
        seen = {each.digest: found for each, found in zip(receipts, known, strict=True) if found}
        drain = slot.drain
        return await self._in_thread(
            lambda: next_version(recipe, store, old, about, receipts, drain=drain, seen=seen)
        )

    def _drop(self, fragment: int, spoiled: Spoiled) -> list[str]:
        """Takes members out of a round; says whose payloads nobody needs any more."""
        state, slot = self.state, self.state.ledger.slots[fragment]
        dropped = []
        for region in spoiled.regions:
            receipt = slot.closing[region]
            dropped.append(receipt.digest)
            fate, why = spoiled.fate, spoiled.why
            # A round that nobody can merge is nobody's fault in particular.
            alone = fate == "refused" and len(spoiled.regions) == 1
            state.record(MemberDropped(fragment, region, fate, why, alone))
            what = {"region": region, "fragment": fragment, "version": slot.version}
            state.note(fate, **what, base=receipt.base, clock=receipt.clock, why=why)
            state.presences.undrain(region)
        state.wake.set()
        return dropped

    def _note_published(self, fragment: int, version: Version, size: int, seconds: Seconds) -> None:
        tokens = self.state.ledger.applied(self.state.recipe.sizes)
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

    # The end

    def _finish_if_drained(self, now: Seconds) -> list[Seconds]:
        """Declares the run finished when nobody has anything left to give."""
        state, lease = self.state, self.state.spec.server.lease
        if state.over_at is None or any(s.waiting or s.closing for s in state.ledger.slots):
            return []
        left = state.presences.undrained(since=state.over_at, now=now)
        limit = max(state.over_at, state.moved_at) + PATIENCE * lease
        if left and now < limit:
            return [state.over_at + 2 * lease, limit]
        why = "every region has given all it held"
        if left:
            why = f"{', '.join(left)} gave nothing for {now - limit + PATIENCE * lease:.0f} s"
        elif gone := state.presences.not_drained():
            why = f"every region but {', '.join(gone)}, not waited for, has given all it held"
        state.record(RunFinished(why))
        state.note("run-finished", why=why, tokens=state.ledger.applied(state.recipe.sizes))
        state.finished_at = now
        return []

    def _leave(self, now: Seconds) -> list[Seconds]:
        """Says goodbye when everyone has heard it, or has had the time to."""
        state, lease = self.state, self.state.spec.server.lease
        limits = []
        if state.finished_at is not None:
            if state.presences.all_leaving():
                self.done.set()
            here = state.presences.here(now=now)
            limits.append(state.finished_at + (PATIENCE if here else 1) * lease)
        if state.stopping:
            waits = state.everyone and state.presences.here(now=now)
            limits.append(self._stop_at + lease if waits else now)
        if any(now >= limit for limit in limits) and not self._merges:
            self.done.set()
        return limits
