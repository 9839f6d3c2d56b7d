"""Answers the regions: who may speak, what is accepted, what is new.

    request ─▶ decide (core) ─▶ journal ─▶ ledger ─▶ flush ─▶ reply

Every answer waits until all that was recorded before is on the disk, also when somebody
else recorded it: nobody is ever told what a crash could take back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict

from diloco_cli.core import pace, rounds
from diloco_cli.core.journal_records import FrameDecided, RegionJoined, WeightsEvaluated
from diloco_cli.core.ledger import TurnedAway, admit_worker
from diloco_cli.core.rounds import Accept, Foreign, Receipt, Recorded, Refused, Returned
from diloco_cli.server.refusals import HttpRefusal
from diloco_cli.server.rounds.conductor import Conductor
from diloco_cli.server.rounds.state import Seconds
from diloco_cli.system.failpoints import reach
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


class Coordinator(Conductor):
    """The server's one authority: requests come in here, the rounds move in `Conductor`."""

    async def join(self, region: str, asked: Join) -> Joined:
        """Gives a worker the region's lease, or says why it may not have it."""
        self._check_join(region, asked)
        state, now = self.state, self.state.clock()
        left = state.presences.lease_left(region, now=now)
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
            state.presences.joined(region, now=now)
        else:
            self._heard(region)
        state.wake.set()
        epoch, high = answer.epoch, state.ledger.high(region)
        return await state.said(lambda: Joined(**dict(self.news(region)), epoch=epoch, high=high))

    async def heartbeat(self, region: str, said: Heartbeat) -> News:
        """Renews a lease, takes the report, and answers with the news."""
        self.check_epoch(region, said.epoch)
        state = self.state
        self._check_not_behind(region, [progress.version for progress in said.fragments])
        self._heard(region)
        presence = state.presences.all[region]
        if said.stopping and not (presence.said and presence.said.stopping):
            state.note("left", region=region, why=said.why)
        presence.said = said
        state.tally.account(region).hear(said)
        if said.step_seconds > 0:
            state.averages = pace.stepped(state.averages, region, said.step_seconds)
        if said.heldout:
            self._evaluated(region, said.heldout)
        state.wake.set()
        return await state.said(lambda: self.news(region))

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
        presence = self.state.presences.all.get(region)
        held = presence.said.images if presence and presence.said else {}
        newest = dict(enumerate(self.state.weights.newest))
        return {
            fragment: one.digest
            for fragment, one in held.items()
            if fragment in newest
            and one.version == newest[fragment].number
            and one.digest != newest[fragment].digest
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
        return await state.said(lambda: self.news(region)) if ready() else None

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
        return await state.said(build) if ready() else None

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
        answer = rounds.admit(
            receipt,
            state.ledger.standing(region, fragment),
            epoch=epoch,
            alpha=state.sync.alpha,
            staleness=state.sync.staleness,
            unfit=unfit or self._kept_out(region),
        )
        totals = dict(totals or {})
        if isinstance(answer, Accept):
            size = state.recipe.sizes[fragment]
            state.record(
                FrameDecided(receipt, "pending", answer.why, totals, values=size, norm=norm)
            )
            self._arrived(fragment, region)
            state.room_again("upload")
        elif isinstance(answer, Refused):
            before = state.ledger.quarantined()
            sound = unfit is None
            state.record(FrameDecided(receipt, "refused", answer.why, totals, sound=sound))
            if region in state.ledger.quarantined() - before:
                state.note("quarantined", region=region, why=state.ledger.conduct[region].why)
                state.wake.set()  # Nobody waits for it any more.
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

    # Inside

    def _check_join(self, region: str, asked: Join) -> None:
        recipe = self.state.recipe
        known = [each.name for each in recipe.spec.regions]
        if region not in known:
            raise HttpRefusal(
                "unknown-region",
                f"This run has no region {region!r}; it has {', '.join(known)}.",
                "Use one of these with --region, or begin a run whose spec lists it.",
            )
        if asked.wire != WIRE_VERSION:
            raise other_wire(asked.wire)
        for what, theirs, ours in (
            ("spec", asked.spec_digest, recipe.spec_digest),
            ("layout", asked.layout_digest, recipe.layout.digest),
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
        silence = self.state.presences.heard(region, now=self.state.clock())
        if silence is not None:
            self.state.note("revived", region=region, silent_seconds=round(silence, 1))

    def _evaluated(self, region: str, said: HeldOut) -> None:
        versions = list(said.versions)
        self._check_not_behind(region, versions)
        if all(known.versions != said.versions for known in self.state.ledger.evaluations):
            self.state.record(WeightsEvaluated(said.versions, said.loss, region))
            steps = self.state.ledger.outer_steps
            self.state.note(
                "evaluated", region=region, versions=versions, loss=said.loss, outer_steps=steps
            )

    def _arrived(self, fragment: int, region: str) -> None:
        state, now = self.state, self.state.clock()
        self._heard(region)
        before = state.rounds[fragment]
        after = rounds.joined(before, region, need=state.need, now=now)
        if before.called_at is not None:
            state.averages = pace.answered(state.averages, region, now - before.called_at)
            if before.met_at is None and after.met_at is not None:
                state.averages = pace.met(state.averages, now - before.called_at)
        state.rounds[fragment] = after
        state.moved_at = now
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
