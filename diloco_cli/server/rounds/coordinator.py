"""Answers the regions and moves the rounds, as the core decides.

    request ─▶ decide (core) ─▶ journal ─▶ ledger ─▶ flush ─▶ reply
    tick ─▶ actions (core) ─▶ journal ─▶ ledger ─▶ publish.py merges what is closed

Every answer waits until all that was recorded before is on the disk, whichever request
recorded it: no region is ever told what a crash could take back.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, assert_never

from diloco_cli.core import conductor, rounds
from diloco_cli.core.conductor import (
    PATIENCE,
    Action,
    CallFragment,
    CloseRound,
    DealLanes,
    EndRun,
    FinishRun,
    ResumeRun,
    RetireRegion,
)
from diloco_cli.core.journal_records import (
    FragmentCalled,
    FrameDecided,
    LanesDealt,
    RegionJoined,
    RoundClosed,
    RunEnded,
    RunFinished,
    WeightsEvaluated,
)
from diloco_cli.core.lanes import CorpusOrder
from diloco_cli.core.rounds import (
    Accept,
    Close,
    Foreign,
    Receipt,
    Recorded,
    Refused,
    Returned,
)
from diloco_cli.errors import SET_BACK
from diloco_cli.merge.optimizers import average_share
from diloco_cli.observe.metrics import staleness
from diloco_cli.server.refusals import HttpRefusal
from diloco_cli.server.rounds.amendments import amend
from diloco_cli.server.rounds.claims import record_accepted
from diloco_cli.server.rounds.divergence import divergence_of, no_way_on, note_divergence
from diloco_cli.server.rounds.lanes import order_of
from diloco_cli.server.rounds.membership import Membership, cut_as_here
from diloco_cli.server.rounds.publish import Publisher
from diloco_cli.server.rounds.state import Seconds, State
from diloco_cli.server.store.group_commit import RETRY_SECONDS
from diloco_cli.system.failpoints import reach
from diloco_cli.system.files import DiskFull
from diloco_cli.wire.messages import (
    Amend,
    Amended,
    Decided,
    Heartbeat,
    HeldOut,
    Join,
    Joined,
    Latest,
    News,
    TextSample,
)

log = logging.getLogger(__name__)

LONGEST_WHY = 900
"""Letters of a reason that travel."""


class Coordinator:
    """The server's one authority: it answers regions and moves the rounds."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.publisher, self.membership = Publisher(state), Membership(state)
        self.done = asyncio.Event()
        """Set when there is nothing left to serve for."""
        self._stop_at: Seconds = 0.0
        self._evaluating = ""
        self._sampled_at = -1
        self.late_leases = 1
        """For how many a finished run is served while members have not heard of it."""

    # What regions ask

    async def join(self, region: str, request: Join) -> Joined:
        """Gives a worker the region's lease, or says why it may not have it."""
        state, now = self.state, self.state.clock()
        order = order_of(request.order) if request.order else None
        epoch = self.membership.join(region, request, order)
        self._heard(region)
        self._reads(region, order)
        self._deal(now)
        state.wake.set()
        high, until = state.ledger.high(region), state.rooms.tell(state, region)
        return await state.answer_when_durable(
            lambda: Joined(**{**dict(self.news(region)), "until": until}, epoch=epoch, high=high)
        )

    async def heartbeat(self, region: str, heartbeat: Heartbeat) -> News:
        """Renews a lease, takes the report, and answers with the news."""
        self.check_epoch(region, heartbeat.epoch)
        state = self.state
        self._check_not_behind(region, [progress.version for progress in heartbeat.fragments])
        back, lease = self._heard(region), state.leases.all[region]
        if lease.heartbeat and heartbeat.n < lease.heartbeat.n:
            return await state.answer_when_durable(lambda: self.news(region))  # Overtaken.
        back, before = back or lease.heartbeat is None, divergence_of(state, region)
        if heartbeat.stopping and not lease.leaving:
            state.note("left", region=region, why=heartbeat.why)
        # Before its goodbye counts: it may bring the last evaluation along.
        lease.evaluates |= region == self.evaluator()
        state.leases.take(region, heartbeat, now=state.clock())
        note_divergence(state, region, before)
        state.totals.account(region).update_from_heartbeat(heartbeat)
        if back:
            state.rooms.came_back(state, region)
        seconds, sync = heartbeat.step_seconds, state.sync
        state.table.heard(region, seconds, live=state.live, sync=sync)
        if lease.evaluates:
            self._evaluated(region, heartbeat.heldout)
            self._evaluated(region, heartbeat.heldout_ema, ema=True)
            self._sampled(region, heartbeat.sample)
        if cursor := heartbeat.reading:
            self._reads(region, order_of(cursor.order))
            state.lanes.hear(state.ledger, region, cursor, most=state.most_windows(region))
        state.wake.set()
        if heartbeat.stopping and heartbeat.retiring:
            self.membership.retire(region, "left for good")
        stays = not state.ledger.end and region in state.leases.all
        until = state.rooms.tell(state, region) if stays else None
        return await state.answer_when_durable(
            lambda: self.news(region).model_copy(update={"until": until})
        )

    def news(self, region: str) -> News:
        """What this region should know now."""
        state, ledger = self.state, self.state.ledger
        fates = {
            fragment: Decided(digest=known.digest, fate=known.fate, why=known.why[:LONGEST_WHY])
            for fragment, slot in enumerate(ledger.slots)
            if (known := slot.decided.get(region))
        }
        return News(
            n=ledger.news,
            versions=tuple(slot.version for slot in ledger.slots),
            calls=ledger.calls(),
            fates=fates,
            end=bool(ledger.end),
            ended=ledger.ended,
            finished=bool(ledger.finished),
            stop=bool(state.stopping) and state.everyone,
            evaluate=region == self.evaluator(),
            ema=average_share(state.settings.outer) > 0,
            lease_seconds=state.spec.server.lease,
            terms=ledger.terms,
            progress=state.rooms.progress(state),
            merged=round(ledger.applied(state.settings.sizes), 1),
            every=state.sync.every,
            lanes=state.lanes.assignment(ledger, region),
            mend=self._differing(region),
        )

    def _differing(self, region: str) -> dict[int, str]:
        """What a region says it holds of the newest versions and is not what was published."""
        lease = self.state.leases.all.get(region)
        held = lease.heartbeat.images if lease and lease.heartbeat else {}
        newest = dict(enumerate(self.state.weights.newest))
        return {
            fragment: image.digest
            for fragment, image in held.items()
            if fragment in newest
            and image.version == newest[fragment].number
            and image.digest != newest[fragment].digest
        }

    async def wait_news(self, region: str, *, epoch: int, after: int, wait: Seconds) -> News | None:
        """Answers as soon as something happened after record `after`; None if nothing does."""
        state, told = self.state, self.state.stopping
        self.check_epoch(region, epoch)

        def ready() -> bool:
            # A stop is no record, so it is told once to those who wait, then by heartbeats.
            return state.ledger.news > after or state.stopping != told

        await state.until(ready, wait)
        self.check_epoch(region, epoch)
        return await state.answer_when_durable(lambda: self.news(region)) if ready() else None

    async def wait_version(self, fragment: int, *, after: int, wait: Seconds) -> Latest | None:
        """Answers as soon as a version newer than `after` exists; None if none does."""
        state = self.state

        def ready() -> bool:
            return state.weights.newest[fragment].number > after

        def build() -> Latest:
            newest = state.weights.newest[fragment]
            return Latest(
                fragment=fragment,
                version=newest.number,
                members=newest.members,
                merged=dict(newest.merged),
                counted=dict(state.ledger.slots[fragment].applied),
                published=newest.digest,
                links=state.weights.links(fragment, after),
            )

        await state.until(ready, wait)
        return await state.answer_when_durable(build) if ready() else None

    async def submit(
        self,
        receipt: Receipt,
        *,
        epoch: int,
        unfit: str | None = None,
        norm: float = 0.0,
        totals: Mapping[str, float] | None = None,
        cursor: Mapping[str, Any] | None = None,
    ) -> rounds.Answer:
        """Decides on a contribution whose payload is durable; so is the decision, then."""
        state, fragment, region = self.state, receipt.fragment, receipt.region
        # Intake asked before it kept the payload, to spare refused frames the disk. Meanwhile
        # another frame of the region may have been decided: only this answer counts.
        answer = rounds.admit(
            receipt,
            state.ledger.region_record(region, fragment),
            epoch=epoch,
            alpha=state.sync.alpha,
            staleness=state.sync.staleness,
            unfit=unfit or self._kept_out(region),
        )
        totals = dict(totals or {})
        if isinstance(answer, Accept):
            most = state.most_windows(region)
            read = state.lanes.accepted(state.ledger, region, cursor or {}, most=most)
            record_accepted(state, receipt, answer.why, totals, norm=norm, lanes=read)
            self._arrived(fragment, region)
            state.disk_has_room("upload")
        elif isinstance(answer, Refused):
            before = state.ledger.quarantined()
            sound = unfit is None
            state.record(FrameDecided(receipt, "refused", answer.why, totals, sound=sound))
            if region in state.ledger.quarantined() - before:
                state.note("quarantined", region=region, why=state.ledger.conduct[region].why)
                state.wake.set()  # No round waits for it any more.
        elif isinstance(answer, Returned):
            state.record(FrameDecided(receipt, "returned", answer.why, totals))
        self._note_answer(receipt, answer)
        await state.commit.durable()
        reach("reply.ready")
        return answer

    def _kept_out(self, region: str) -> str | None:
        """Says why even sound work of a region is not merged, or None if it is."""
        conduct = self.state.ledger.conduct.get(region)
        return conduct.found(None).why or None if conduct else None

    def check_epoch(self, region: str, epoch: int) -> None:
        """Raises unless this epoch speaks for the region now."""
        self.membership.check_epoch(region, epoch)

    def wanted(self, digest: str) -> bool:
        """Says whether an accepted contribution rests on this payload."""
        return any(
            receipt.digest == digest
            for slot in self.state.ledger.slots
            # Versions are made again from theirs, until one is stored that contains them.
            for receipts in (slot.waiting, slot.closing, *(made.receipts for made in slot.made))
            for receipt in receipts.values()
        )

    def evaluator(self) -> str | None:
        """The one live region that evaluates the global weights: one whose copies are fresh."""
        live, spec = self.state.live(), self.state.spec
        # A trainer that is not ours may have no way to measure.
        able = {name for name in live if spec.region(name).trainer is None} or live
        if spec.evaluate.region:
            return spec.evaluate.region if spec.evaluate.region in live else None
        # Held-out texts may differ, so whoever began goes on unless it falls behind.
        patience = max(2, spec.sync.staleness)
        if self._evaluating not in able or self._behind(self._evaluating) > patience:
            behind = {name: self._behind(name) for name in able}
            freshest = min(able, key=lambda name: (behind[name], name), default="")
            late = behind.get(self._evaluating, math.inf)
            if math.isinf(late) or late > behind[freshest] + patience:
                self._evaluating = freshest
        return self._evaluating or None

    def _behind(self, region: str) -> float:
        """Versions that a region is behind; of one that has not trained yet there is no telling."""
        heartbeat = self.state.leases.all[region].heartbeat
        if heartbeat is None or not (heartbeat.training or heartbeat.step):
            return math.inf
        published = [slot.version for slot in self.state.ledger.slots]
        return staleness(published, [fragment.version for fragment in heartbeat.fragments])

    # What operators ask

    async def amend(self, request: Amend, *, by: str) -> tuple[Amended, bool]:
        """Changes settings of the run; says what became of it, and whether it is new."""
        return await amend(self.state, request, by=by)

    # Rounds

    async def run(self) -> None:
        """Ticks whenever something happened, or a moment came that may change an answer."""
        state = self.state
        try:
            self.publisher.resume()
            while not self.done.is_set() and not state.closed:
                state.wake.clear()
                until = self.tick()
                left = None if until is None else max(0.0, until - state.clock())
                with suppress(TimeoutError):
                    await asyncio.wait_for(state.wake.wait(), left)
        except Exception as error:
            state.fail(error)
        self.done.set()

    def tick(self) -> Seconds | None:
        """Does whatever is due and says when to look again; None when only an event matters."""
        state, now = self.state, self.state.clock()
        for region, silence in state.leases.lapses(now=now):
            state.note("lapsed", region=region, silent_seconds=round(silence, 1))
        wakes = [*state.leases.wakes(now=now), *state.lanes.wakes(state.leases, state.spec)]
        try:
            if not state.stopping and not state.ledger.finished:
                self._give_up()
                wakes += self._advance(now)
                state.disk_has_room("journal")
        except DiskFull as error:
            state.disk_full("journal", error)
            state.lanes.stir()  # What was to be dealt is dealt then.
            wakes.append(now + RETRY_SECONDS)
        wakes += self._leave(now)
        return min((wake for wake in wakes if wake > now), default=None)

    def _give_up(self) -> None:
        """Stops a run whose regions all train for nothing; a later start goes on from there."""
        state = self.state
        if why := no_way_on(state):
            state.hopeless = why
            log.error(why)
            self.stop(why)

    def _advance(self, now: Seconds) -> list[Seconds]:
        """Lets the core decide and carries its decisions out."""
        state, until = self.state, now
        while until is not None and until <= now:
            seen = state.attendance(now)
            look = conductor.tick(state.ledger, state.table, seen, state.terms, now=now)
            state.waiting.update(look.waiting)
            if look.asked is not None:
                state.lanes.asked = look.asked
            for action in look.actions:
                self._carry_out(action, now)
            until = look.until
        return [] if until is None else [until]

    def _carry_out(self, action: Action, now: Seconds) -> None:
        state = self.state
        match action:
            case CallFragment(fragment, version, opened):
                state.record(FragmentCalled(fragment, version))
                state.note("called", fragment=fragment, version=version)
                state.table.rounds[fragment] = opened
            case CloseRound(fragment, verdict):
                self._close(fragment, verdict)
            case RetireRegion(region, why):
                self.membership.retire(region, why)
            case EndRun(why, tokens):
                state.record(RunEnded(why))
                state.note("run-ended", why=why, tokens=tokens)
                state.table.ended_at = state.table.moved_at = now
            case FinishRun(why):
                state.record(RunFinished(why))
                tokens = state.ledger.applied(state.settings.sizes)
                state.note("run-finished", why=why, tokens=tokens)
                state.finished_at = now
            case ResumeRun(why):
                state.record(state.rooms.resumed(state, why))
                state.note("run-resumed", why=why)
                state.table.ended_at = None
            case DealLanes(order, why, moves, count):
                state.record(LanesDealt(order, why, moves, count))
                given: dict[str, list[int]] = {}
                for move in moves:
                    given.setdefault(move.to, []).append(move.lane)
                state.note("lanes-dealt", order=order, why=why, lanes=given, count=count)
                state.lanes.stir()
                state.wake.set()
            case _:
                assert_never(action)

    def _deal(self, now: Seconds) -> None:
        """Deals lanes at once, so that whoever joins hears of its own in the answer."""
        state = self.state
        while not state.stopping and not state.ledger.finished:
            actions, asked = conductor.deal_lanes(state.ledger, state.attendance(now))
            state.lanes.asked = state.lanes.asked if asked is None else asked
            for action in actions:
                self._carry_out(action, now)
            if not actions:
                break

    def _close(self, fragment: int, verdict: Close) -> None:
        state, slot = self.state, self.state.ledger.slots[fragment]
        closed = RoundClosed(
            fragment,
            slot.version,
            verdict.members,
            drain=bool(state.ledger.end),
            terms=state.ledger.terms,
            live=verdict.live,
        )
        state.record(closed)
        state.note(
            "closed",
            fragment=fragment,
            version=slot.version,
            members=list(closed.members),
            drain=closed.drain,
            weights=[state.settings.weight(receipt) for receipt in slot.closing.values()],
            why=verdict.why,
        )
        state.table.closed(fragment)
        reach("round.closed")
        self.publisher.merge_soon(fragment)

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

    def _leave(self, now: Seconds) -> list[Seconds]:
        """Says goodbye when everyone has heard it, or has had the time to."""
        state, lease = self.state, self.state.spec.server.lease
        limits = []
        if state.finished_at is not None:
            if state.leases.all_leaving():
                self.done.set()
            here = state.leases.here(now=now)
            limits.append(state.finished_at + (PATIENCE if here else self.late_leases) * lease)
        if state.stopping:
            waits = state.everyone and state.leases.here(now=now)
            limits.append(self._stop_at + lease if waits else now)
        if any(now >= limit for limit in limits) and not self.publisher.merges:
            self.done.set()
        return limits

    # Inside

    def _check_not_behind(self, region: str, versions: list[int]) -> None:
        for fragment, version in enumerate(versions):
            newest = self.state.ledger.slots[fragment].version
            if version > newest:
                raise server_behind(f"{region} holds version {version}", fragment, newest)

    def _heard(self, region: str) -> bool:
        """Renews a lease; says whether it had lapsed."""
        silence = self.state.leases.heard(region, now=self.state.clock())
        if silence is not None:
            self.state.note("revived", region=region, silent_seconds=round(silence, 1))
        return silence is not None

    def _reads(self, region: str, order: CorpusOrder | None) -> None:
        """Takes note that a region reads another text than it said before."""
        state, member = self.state, self.state.ledger.regions[region]
        if order is None or order.digest == member.order or not cut_as_here(state, region, order):
            return
        if state.lanes.may_change(region, state.spec, now=state.clock()):
            state.record(
                RegionJoined(
                    region,
                    member.owner,
                    member.boot,
                    member.epoch,
                    order,
                    at=state.allowance_clock,
                )
            )
            state.note("text-changed", region=region, order=order.digest, tokens=order.tokens)
            state.lanes.stir()

    def _evaluated(self, region: str, heldout: HeldOut | None, *, ema: bool = False) -> None:
        if heldout is None:
            return
        versions, ledger = list(heldout.versions), self.state.ledger
        self._check_not_behind(region, versions)
        known = ledger.ema_evaluations if ema else ledger.evaluations
        # Each is a record: none of weights that were measured before, or are older.
        if not known or sum(versions) > sum(known[-1].versions):
            record = WeightsEvaluated(heldout.versions, heldout.loss, region, ema=ema or None)
            self.state.record(record)
            about = {"region": region, "versions": versions, "loss": heldout.loss}
            kind = "evaluated-ema" if ema else "evaluated"
            self.state.note(kind, **about, outer_steps=ledger.outer_steps)

    def _sampled(self, region: str, sample: TextSample | None) -> None:
        """Passes on what the weights write; nothing rests on it, so it is no record."""
        if sample is None or sum(sample.versions) <= self._sampled_at:
            return
        self._check_not_behind(region, list(sample.versions))
        self._sampled_at = sum(sample.versions)
        tokens = round(self.state.ledger.applied(self.state.settings.sizes), 1)
        said = {"versions": list(sample.versions), "prompt": sample.prompt, "text": sample.text}
        self.state.note(
            "sampled", region=region, **said, outer_steps=self._sampled_at, tokens=tokens
        )

    def _arrived(self, fragment: int, region: str) -> None:
        state, now = self.state, self.state.clock()
        self._heard(region)
        state.table.arrived(fragment, region, need=state.need, now=now)
        state.wake.set()

    def _note_answer(self, receipt: Receipt, answer: rounds.Answer) -> None:
        what = {key: value for key, value in receipt.as_record().items() if key != "prev"}
        slot = self.state.ledger.slots[receipt.fragment]
        version = slot.version
        if isinstance(answer, Accept):
            counted = slot.waiting[receipt.region].worth.steps
            self.state.note("accepted", **what, counted=counted, version=version)
        elif isinstance(answer, Refused):
            del what["steps"], what["bytes"]
            self.state.note("refused", **what, version=version, why=answer.why)
        elif isinstance(answer, Returned | Foreign) and not isinstance(answer, Recorded):
            for key in ("tokens", "steps", "bytes"):
                del what[key]
            kind = "returned" if isinstance(answer, Returned) else "foreign"
            self.state.note(kind, **what, version=version, why=answer.why)


def server_behind(who: str, fragment: int, newest: int) -> HttpRefusal:
    """The server has lost versions that a region has seen."""
    return HttpRefusal(
        "server-behind",
        f"{who} of fragment {fragment}, but {newest} is the newest version here.",
        f"The server was set back, for example to an old copy of its folder. {SET_BACK}",
    )
