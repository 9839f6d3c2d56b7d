"""Answers the regions and moves the rounds, as the core decides.

    request ─▶ decide (core) ─▶ journal ─▶ ledger ─▶ flush ─▶ reply
    tick ─▶ actions (core) ─▶ journal ─▶ ledger ─▶ publish.py merges what is closed

Every answer waits until all that was recorded before is on the disk, whichever request
recorded it: no region is ever told what a crash could take back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from typing import assert_never

from diloco_cli.core import conductor, pace, rounds
from diloco_cli.core.conductor import (
    PATIENCE,
    Action,
    CallFragment,
    CloseRound,
    EndRun,
    FinishRun,
)
from diloco_cli.core.journal_records import (
    FragmentCalled,
    FrameDecided,
    RegionJoined,
    RoundClosed,
    RunEnded,
    RunFinished,
    WeightsEvaluated,
)
from diloco_cli.core.ledger import TurnedAway, admit_worker
from diloco_cli.core.rounds import (
    Accept,
    Close,
    Foreign,
    Receipt,
    Recorded,
    Refused,
    Returned,
    Round,
)
from diloco_cli.server.refusals import HttpRefusal
from diloco_cli.server.rounds.publish import Publisher
from diloco_cli.server.rounds.state import Seconds, State
from diloco_cli.server.store.group_commit import RETRY_SECONDS
from diloco_cli.system.failpoints import reach
from diloco_cli.system.files import DiskFull
from diloco_cli.wire.messages import (
    WIRE_VERSION,
    Decided,
    Heartbeat,
    HeldOut,
    Join,
    Joined,
    Latest,
    News,
)

LONGEST_WHY = 900
"""Letters of a reason that travel."""


class Coordinator:
    """The server's one authority: it answers regions and moves the rounds."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.publisher = Publisher(state)
        self.done = asyncio.Event()
        """Set when there is nothing left to serve for."""
        self._stop_at: Seconds = 0.0

    # What regions ask

    async def join(self, region: str, asked: Join) -> Joined:
        """Gives a worker the region's lease, or says why it may not have it."""
        self._check_join(region, asked)
        state, now = self.state, self.state.clock()
        left = state.leases.lease_left(region, now=now)
        member = state.ledger.regions.get(region)
        answer = admit_worker(member, asked.owner, asked.boot, lease_left=left)
        if isinstance(answer, TurnedAway):
            raise HttpRefusal(
                answer.code,
                f"{region}: {answer.why}.",
                _TURNED_AWAY[answer.code],
                retry_seconds=left,
            )
        if answer.new:
            owner, boot, epoch = asked.owner, asked.boot, answer.epoch
            state.record(RegionJoined(region, owner, boot, epoch))
            state.note("joined", region=region, owner=owner, boot=boot, epoch=epoch)
            state.leases.joined(region, now=now)
        else:
            self._heard(region)
        state.wake.set()
        epoch, high = answer.epoch, state.ledger.high(region)
        return await state.answer_when_durable(
            lambda: Joined(**dict(self.news(region)), epoch=epoch, high=high)
        )

    async def heartbeat(self, region: str, heartbeat: Heartbeat) -> News:
        """Renews a lease, takes the report, and answers with the news."""
        self.check_epoch(region, heartbeat.epoch)
        state = self.state
        self._check_not_behind(region, [progress.version for progress in heartbeat.fragments])
        self._heard(region)
        lease = state.leases.all[region]
        if heartbeat.stopping and not lease.leaving:
            state.note("left", region=region, why=heartbeat.why)
        lease.heartbeat = heartbeat
        state.totals.account(region).update_from_heartbeat(heartbeat)
        if heartbeat.step_seconds > 0:
            state.table.averages = pace.stepped(
                state.table.averages, region, heartbeat.step_seconds
            )
        if heartbeat.heldout:
            self._evaluated(region, heartbeat.heldout)
        state.wake.set()
        return await state.answer_when_durable(lambda: self.news(region))

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
            finished=bool(ledger.finished),
            stop=bool(state.stopping) and state.everyone,
            evaluate=region == self.evaluator(),
            lease_seconds=state.spec.server.lease,
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
            size = state.settings.sizes[fragment]
            state.record(
                FrameDecided(receipt, "pending", answer.why, totals, values=size, norm=norm)
            )
            self._arrived(fragment, region)
            state.disk_has_room("upload")
        elif isinstance(answer, Refused):
            before = state.ledger.quarantined()
            sound = unfit is None
            state.record(FrameDecided(receipt, "refused", answer.why, totals, sound=sound))
            if region in state.ledger.quarantined() - before:
                state.note("quarantined", region=region, why=state.ledger.conduct[region].why)
                state.wake.set()  # No round waits for it any more.
        elif isinstance(answer, Returned) and answer.sticky:
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
        member = self.state.ledger.regions.get(region)
        if member is None or member.epoch != epoch:
            current = f"{member.epoch} is current" if member else "nobody has joined for it yet"
            self.state.note("fenced", region=region, epoch=epoch)
            raise HttpRefusal(
                "fenced",
                f"Epoch {epoch} of {region} is over: {current}.",
                "Stop training and join again.",
            )

    def wanted(self, digest: str) -> bool:
        """Says whether an accepted contribution rests on this payload."""
        return any(
            receipt.digest == digest
            for slot in self.state.ledger.slots
            # Versions are made again from theirs, until one is stored that contains them.
            for found in (slot.waiting, slot.closing, *(made.receipts for made in slot.made))
            for receipt in found.values()
        )

    def evaluator(self) -> str | None:
        """The one live region that evaluates the global weights."""
        live = self.state.live()
        chosen = self.state.spec.evaluate.region or min(live, default=None)
        return chosen if chosen in live else None

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
        wakes = state.leases.wakes(now=now)
        try:
            if not state.stopping and not state.ledger.finished:
                wakes += self._advance(now)
                state.disk_has_room("journal")
        except DiskFull as error:
            state.disk_full("journal", error)
            wakes.append(now + RETRY_SECONDS)
        wakes += self._leave(now)
        return min((wake for wake in wakes if wake > now), default=None)

    def _advance(self, now: Seconds) -> list[Seconds]:
        """Lets the core decide and carries its decisions out."""
        state, until = self.state, now
        while until is not None and until <= now:
            seen = state.attendance(now)
            look = conductor.tick(state.ledger, state.table, seen, state.terms, now=now)
            state.waiting.update(look.waiting)
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
            case EndRun(why, tokens):
                state.record(RunEnded(why))
                state.note("run-ended", why=why, tokens=tokens)
                state.table.ended_at = state.table.moved_at = now
                state.leases.undrain()
            case FinishRun(why):
                state.record(RunFinished(why))
                tokens = state.ledger.applied(state.settings.sizes)
                state.note("run-finished", why=why, tokens=tokens)
                state.finished_at = now
            case _:
                assert_never(action)

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
            weights=[state.settings.weight(receipt) for receipt in slot.closing.values()],
            why=verdict.why,
        )
        state.table.rounds[fragment] = Round()
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
            limits.append(state.finished_at + (PATIENCE if here else 1) * lease)
        if state.stopping:
            waits = state.everyone and state.leases.here(now=now)
            limits.append(self._stop_at + lease if waits else now)
        if any(now >= limit for limit in limits) and not self.publisher.merges:
            self.done.set()
        return limits

    # Inside

    def _check_join(self, region: str, asked: Join) -> None:
        settings = self.state.settings
        known = [each.name for each in settings.spec.regions]
        if region not in known:
            raise HttpRefusal(
                "unknown-region",
                f"This run has no region {region!r}; it has {', '.join(known)}.",
                "Use one of these with --region, or begin a run whose spec lists it.",
            )
        if asked.wire != WIRE_VERSION:
            raise other_wire(asked.wire)
        for what, theirs, ours in (
            ("spec", asked.spec_digest, settings.spec_digest),
            ("layout", asked.layout_digest, settings.layout.digest),
        ):
            if theirs != ours:
                raise HttpRefusal(
                    "other-spec",
                    f"{region} runs another {what}: its digest is {theirs[:12]}, "
                    f"this run's is {ours[:12]}.",
                    "Give every region the server's spec; `GET /v1/run` shows what must agree.",
                )

    def _check_not_behind(self, region: str, versions: list[int]) -> None:
        for fragment, version in enumerate(versions):
            newest = self.state.ledger.slots[fragment].version
            if version > newest:
                raise server_behind(f"{region} holds version {version}", fragment, newest)

    def _heard(self, region: str) -> None:
        silence = self.state.leases.heard(region, now=self.state.clock())
        if silence is not None:
            self.state.note("revived", region=region, silent_seconds=round(silence, 1))

    def _evaluated(self, region: str, heldout: HeldOut) -> None:
        versions = list(heldout.versions)
        self._check_not_behind(region, versions)
        if all(known.versions != heldout.versions for known in self.state.ledger.evaluations):
            self.state.record(WeightsEvaluated(heldout.versions, heldout.loss, region))
            steps = self.state.ledger.outer_steps
            self.state.note(
                "evaluated", region=region, versions=versions, loss=heldout.loss, outer_steps=steps
            )

    def _arrived(self, fragment: int, region: str) -> None:
        state, now = self.state, self.state.clock()
        self._heard(region)
        state.table.arrived(fragment, region, need=state.need, now=now)
        state.wake.set()

    def _note_answer(self, receipt: Receipt, answer: rounds.Answer) -> None:
        what = {key: value for key, value in asdict(receipt).items() if key != "prev"}
        version = self.state.ledger.slots[receipt.fragment].version
        if isinstance(answer, Accept):
            self.state.note("accepted", **what, version=version)
        elif isinstance(answer, Refused):
            del what["steps"], what["bytes"]
            self.state.note("refused", **what, version=version, why=answer.why)
        elif isinstance(answer, Returned | Foreign) and not isinstance(answer, Recorded):
            for key in ("tokens", "steps", "bytes"):
                del what[key]
            kind = "returned" if isinstance(answer, Returned) else "foreign"
            self.state.note(kind, **what, version=version, why=answer.why)


_TURNED_AWAY = {
    "held": "It takes over by itself when the other worker is gone.",
    "older-copy": "It goes on under a new identity and drops the work it has not sent.",
}


def server_behind(who: str, fragment: int, newest: int) -> HttpRefusal:
    """The server has lost versions that a region has seen."""
    return HttpRefusal(
        "server-behind",
        f"{who} of fragment {fragment}, but {newest} is the newest version here.",
        "The server was set back, for example to an old copy of its folder. "
        "Restore the newest copy; this run's regions must not train on from here.",
    )


def other_wire(theirs: object) -> HttpRefusal:
    """The two sides speak different versions."""
    return HttpRefusal(
        "other-wire",
        f"This server speaks wire version {WIRE_VERSION}, not {theirs}.",
        "Update the older side; a server is updated first.",
        headers={"upgrade": f"diloco-wire/{WIRE_VERSION}"},
        wire=WIRE_VERSION,
    )
