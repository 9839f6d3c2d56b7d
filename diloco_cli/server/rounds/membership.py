"""Lets regions join and retires them: who is a member of the run from now on.

    join ─▶ same program and run? ─▶ may this name join? ─▶ may this folder speak for it? ─▶ record

What is decided is in core/members.py; here it is journaled and takes effect.
"""

from __future__ import annotations

import hashlib
import time
from typing import assert_never

from diloco_cli.core.journal_records import RegionJoined, RegionRetired
from diloco_cli.core.lanes import CorpusOrder
from diloco_cli.core.members import (
    AdmissionRule,
    Retirement,
    TurnedAway,
    admit_name,
    admit_worker,
)
from diloco_cli.server.refusals import HttpRefusal
from diloco_cli.server.rounds.lanes import lanes_of
from diloco_cli.server.rounds.state import Seconds, State
from diloco_cli.spec.schema import is_a_name
from diloco_cli.wire.messages import WIRE_VERSION, Join

REMOVED = "removed"
"""Why a region was removed, where nobody said."""


class Membership:
    """Answers joins, fences epochs, and lets members go."""

    def __init__(self, state: State) -> None:
        self.state = state
        self._joined_at: dict[str, Seconds] = {}
        """When this server last journaled a join, by name."""

    def join(self, region: str, request: Join, order: CorpusOrder | None = None) -> int:
        """Makes a worker speak for a region; gives the epoch, or says why it may not."""
        self._check_program(region, request)
        if order and not cut_as_here(self.state, region, order):
            raise _cut_otherwise(self.state, region, order)
        state, now = self.state, self.state.clock()
        member, gone = state.ledger.regions.get(region), state.ledger.retired.get(region)
        key = hashlib.sha256(request.key.encode()).hexdigest() if request.key else ""
        server = state.spec.server
        rule = AdmissionRule(
            server.admit, tuple(each.name for each in state.spec.regions), server.members
        )
        refusal = admit_name(
            region, rule, members=state.ledger.members, known=member, retired=gone, key=key
        )
        left = state.leases.lease_left(region, now=now)
        answer = refusal or admit_worker(
            member, request.owner, request.boot, lease_left=left, retired=gone is not None
        )
        if isinstance(answer, TurnedAway):
            raise _turned_away(region, answer, gone, left)
        if not answer.new:
            state.leases.count_anew(region)
            return answer.epoch
        self._refuse_haste(region, now)
        owner, boot, epoch = request.owner, request.boot, answer.epoch
        known = order and member and order.digest == member.order
        state.record(
            RegionJoined(
                region,
                owner,
                boot,
                epoch,
                order=None if known else order,
                key=key if server.admit == "open" else None,
                at=state.allowance_clock,
            )
        )
        state.note("joined", region=region, owner=owner, boot=boot, epoch=epoch)
        state.leases.joined(region, now=now)
        self._joined_at[region] = now
        return epoch

    def check_epoch(self, region: str, epoch: int) -> None:
        """Raises unless this epoch speaks for the region now."""
        ledger = self.state.ledger
        member, gone = ledger.regions.get(region), ledger.retired.get(region)
        if member and not gone and member.epoch == epoch:
            return
        current = f"{member.epoch} is current" if member else "nobody has joined for it yet"
        if gone:
            current = f"it is no member any more ({in_words(gone)})"
        self.state.note("fenced", region=region, epoch=epoch)
        raise HttpRefusal(
            "fenced",
            f"Epoch {epoch} of {region} is over: {current}.",
            "Stop training and join again.",
        )

    def retire(self, region: str, why: str) -> None:
        """Ends a membership; the region may join again."""
        self.state.record(RegionRetired(region, why))
        let_go(self.state, region, why)

    def _refuse_haste(self, region: str, now: Seconds) -> None:
        """Every join is a record: one that is made again and again would fill the journal."""
        pause = self.state.spec.server.lease / 2
        wait = self._joined_at.get(region, now - pause) + pause - now
        if wait > 0:
            raise HttpRefusal(
                "too-soon",
                f"{region} has joined {pause - wait:.1f} s ago, and may join once in {pause:g} s.",
                "It is asked again by itself.",
                retry_seconds=wait,
            )

    def _check_program(self, region: str, request: Join) -> None:
        if not is_a_name(region):
            raise HttpRefusal("bad-request", f"{region[:80]!r} cannot be the name of a region.")
        if request.wire != WIRE_VERSION:
            raise other_wire(request.wire)
        # A region may come with any terms that the run has had: it is told the newest.
        for what, theirs, ours in (
            ("spec", request.spec_digest, self.state.history.digests),
            ("layout", request.layout_digest, (self.state.settings.layout.digest,)),
        ):
            if theirs not in ours:
                raise HttpRefusal(
                    "other-spec",
                    f"{region} runs another {what}: its digest is {theirs[:12]}, "
                    f"this run's is {ours[-1][:12]}.",
                    "Give every region the server's spec; `GET /v1/run` shows what must agree.",
                )


def cut_as_here(state: State, region: str, order: CorpusOrder) -> bool:
    """Says whether a region's text has as many lanes as some terms of the run give it.

    Whoever joins first under an order would otherwise say for all who share it how many there
    are; with one lane, nobody else would have any to read.
    """
    return order.lanes in {lanes_of(settings.spec, region) for settings in state.history}


def _cut_otherwise(state: State, region: str, order: CorpusOrder) -> HttpRefusal:
    return HttpRefusal(
        "other-spec",
        f"{region} cuts its text into {order.lanes} lanes, the run into "
        f"{lanes_of(state.spec, region)}.",
        "Give data.lanes, or regions[].data.lanes, the value of the server's spec.",
    )


def let_go(state: State, region: str, why: str, by: str = "") -> None:
    """Follows a record that ended a membership: nobody waits for the region any more."""
    state.note("retired", region=region, why=why or REMOVED, by=by)
    state.leases.drop(region)
    state.lanes.stir()
    state.wake.set()


def _turned_away(
    region: str, answer: TurnedAway, gone: Retirement | None, left: Seconds
) -> HttpRefusal:
    why, wait = answer.why, None
    match answer.code:
        case "unknown-region":
            message = f"This run has no region {region!r}; {why.replace('the run', 'it')}."
            hint = (
                f"Use one of these with --region. An operator adds it with `diloco amend "
                f"--add-region {region}`, or opens the run to all who have a credential with "
                "server.admit: credentialed."
            )
        case "retired":
            message = f"{region} was {in_words(gone) if gone else REMOVED}."
            hint = f"An operator lets it in again with `diloco amend --add-region {region}`."
        case "name-taken":
            message = f"The name {region!r} is taken: {why}."
            hint = "Use another name with --region, or the folder of that worker with --dir."
        case "full":
            message = f"{region} cannot join: {why}, and there may be no more."
            hint = "An operator raises server.members with `diloco amend`."
        case "held":
            message, wait = f"{region}: {why}.", left
            hint = "It takes over by itself when the other worker is gone."
        case "older-copy":
            message, wait = f"{region}: {why}.", left
            hint = "It goes on under a new identity and drops the work it has not sent."
        case _:
            assert_never(answer.code)
    if wait is None:
        return HttpRefusal(answer.code, message, hint)
    return HttpRefusal(answer.code, message, hint, retry_seconds=wait)


def in_words(gone: Retirement) -> str:
    """Says who ended a membership, when and why."""
    when = (
        "" if gone.time is None else time.strftime(" on %Y-%m-%d %H:%M UTC", time.gmtime(gone.time))
    )
    if not gone.by:
        return f"retired{when}: {gone.why or REMOVED}"
    return f"removed by {gone.by}{when}{f': {gone.why}' if gone.why else ''}"


def other_wire(theirs: object) -> HttpRefusal:
    """The two sides speak different versions."""
    return HttpRefusal(
        "other-wire",
        f"This server speaks wire version {WIRE_VERSION}, not {theirs}.",
        "Update the older side; a server is updated first.",
        headers={"upgrade": f"diloco-wire/{WIRE_VERSION}"},
        wire=WIRE_VERSION,
    )
