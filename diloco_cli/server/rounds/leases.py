"""Which regions are there, and what did they last report?

A lease lives in memory only and ends when nothing was heard for `lease` seconds. After
a restart of the server every member counts as alive for one lease, so
no region is declared dead because the *server* was away. Time is an argument.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from diloco_cli.core.pace import Report
from diloco_cli.wire.messages import Heartbeat

Seconds = float

FIRST_STEPS = 8
"""Steps before which a region's word about its speed tells mostly how it started."""

STEPS_AWAITED = 4.0
"""Step times after which a region that might train counts as standing still."""

FORGIVEN = 3.0
"""Times that, after which one that stood still and lost its room for it may have some again."""

STUCK = 12.0
"""Times that, after which it is stuck: a trainer may restart and compile in between."""


FAILED_STARTS = 5
"""Trainers in a row that ended and changed nothing, after which the end waits for none of them. The
pauses between them grow, so what passes by itself has had some time."""


@dataclass(slots=True)
class Lease:
    """One region, as it was last heard."""

    seen: Seconds
    seconds: Seconds
    """Its length, as the region was last told; the run's own may have changed since."""
    heartbeat: Heartbeat | None = None
    """Its newest heartbeat since it joined; None before the first."""
    idle_since: Seconds | None = None
    """It might train since then, and has not; None if it did, or had used up its room."""
    quickest: Seconds = math.inf
    """The shortest step time that it reported, once it was past its first steps."""
    evaluates: bool = False
    """It was told to evaluate since it joined."""
    lapsed: bool = False
    """Its silence has been noted."""
    failed_starts: int = 0
    """Trainers of the region that ended since its books last changed."""
    silent_before: Seconds = 0.0
    """Silence that was on record when this server started; over with the first word."""

    @property
    def leaving(self) -> bool:
        """The region has said goodbye."""
        return bool(self.heartbeat and self.heartbeat.stopping)

    @property
    def retiring(self) -> bool:
        """The region trains no more, and leaves for good when what it holds is merged."""
        return bool(self.heartbeat and self.heartbeat.retiring)

    @property
    def pending(self) -> float:
        """Tokens that it says are neither merged nor given up, of the fragment with most."""
        return max(self.heartbeat.tokens.pending, default=0.0) if self.heartbeat else 0.0

    @property
    def until(self) -> Seconds:
        """When it ends if nothing is heard."""
        return self.seen + self.seconds


class Leases:
    """The leases of all members, whether they are there or not."""

    def __init__(self, silences: Mapping[str, Seconds], seconds: Seconds, *, now: Seconds) -> None:
        """`silences` are the members, with how long each has not been on record."""
        self.seconds = seconds
        """Of the leases that are given or renewed from now on."""
        self.all = {
            region: Lease(now, seconds, silent_before=silence)
            for region, silence in silences.items()
        }

        self.end = 0
        """Number of the record that called the end; 0 while none stands."""

    def joined(self, region: str, *, now: Seconds) -> None:
        self.all[region] = Lease(now, self.seconds)

    def count_anew(self, region: str) -> None:
        """Takes the next heartbeat of a region whatever its number.

        A folder put back to an older copy may come under the number of the start before, and so
        under its epoch; it counts its heartbeats from 1.
        """
        lease = self.all.get(region)
        if lease and lease.heartbeat:
            lease.heartbeat = lease.heartbeat.model_copy(update={"n": 0})

    def drop(self, region: str) -> None:
        """Ends the lease of a region that is no member any more."""
        self.all.pop(region, None)

    def heard(self, region: str, *, now: Seconds) -> Seconds | None:
        """Renews a lease; says how long the region was silent if that had lapsed it."""
        lease = self.all[region]
        silent = now - lease.seen if lease.lapsed else None
        lease.seen, lease.seconds, lease.lapsed = now, self.seconds, False
        lease.silent_before = 0.0
        return silent

    def take(self, region: str, heartbeat: Heartbeat, *, now: Seconds) -> None:
        """Makes a heartbeat the region's newest."""
        lease = self.all[region]
        before, trained = lease.heartbeat, max(heartbeat.tokens.trained)
        if before is None or trained != max(before.tokens.trained):
            lease.idle_since = None
        if heartbeat.until is not None and trained < heartbeat.until:
            lease.idle_since = now if lease.idle_since is None else lease.idle_since
        elif not self.stands_still(region, now=now) or self.stands_still(
            region, now=now, times=FORGIVEN
        ):
            # Whoever was given room and did not use it is not waiting for more; for a while, in
            # which others may use it.
            lease.idle_since = None
        if before is None or heartbeat.training or heartbeat.tokens != before.tokens:
            lease.failed_starts = 0
        else:
            lease.failed_starts += max(0, heartbeat.restarts - before.restarts)
        if heartbeat.step_seconds > 0 and heartbeat.step >= FIRST_STEPS:
            lease.quickest = min(lease.quickest, heartbeat.step_seconds)
        lease.heartbeat = heartbeat

    def stands_still(self, region: str, *, now: Seconds, times: float = 1.0) -> bool:
        """Says whether a region might train and has not, for a lease or as long as steps take."""
        lease = self.all.get(region)
        if lease is None or lease.heartbeat is None or lease.idle_since is None:
            return False
        patience = max(lease.seconds, STEPS_AWAITED * lease.heartbeat.step_seconds)
        return now - lease.idle_since > times * patience

    def silences(self, *, now: Seconds) -> dict[str, Seconds]:
        """How long those whose lease is over have not been heard."""
        # Not before: after a restart of the server the others have not had time to be heard.
        return {
            region: lease.silent_before + now - lease.seen
            for region, lease in self.all.items()
            if now >= lease.until
        }

    def lapses(self, *, now: Seconds) -> list[tuple[str, Seconds]]:
        """Lists (region, silence) of leases that ran out since the last time asked."""
        over = []
        for region, lease in sorted(self.all.items()):
            if not lease.lapsed and now >= lease.until:
                lease.lapsed = True
                over.append((region, now - lease.seen))
        return over

    def lease_left(self, region: str, *, now: Seconds) -> Seconds:
        lease = self.all.get(region)
        if lease is None or lease.leaving:
            return 0.0  # A region that is leaving gives up its lease at once.
        return max(0.0, lease.until - now)

    def here(self, *, now: Seconds) -> set[str]:
        """Regions with a lease that do not say they are leaving."""
        return {
            region for region, lease in self.all.items() if now < lease.until and not lease.leaving
        }

    def silent(self, seconds: Seconds, *, now: Seconds) -> set[str]:
        """Regions that were not heard for so long."""
        return {region for region, lease in self.all.items() if now >= lease.seen + seconds}

    def retiring(self) -> set[str]:
        """Regions that are about to leave for good."""
        return {region for region, lease in self.all.items() if lease.retiring}

    def reports(self) -> dict[str, list[Report]]:
        """What each region holds, by fragment."""
        return {
            region: [Report(each.version, each.steps) for each in lease.heartbeat.fragments]
            for region, lease in self.all.items()
            if lease.heartbeat
        }

    def paces(self) -> dict[str, float]:
        """Steps per second that each region says it makes, at best."""
        return {
            region: 1.0 / lease.quickest
            for region, lease in self.all.items()
            if lease.quickest < math.inf
        }

    def drained(self, fragment: int) -> set[str]:
        """Regions that have nothing of this fragment to send any more."""
        return {
            region
            for region, lease in self.all.items()
            if lease.heartbeat
            and (self._is_drained(lease) or lease.heartbeat.tokens.pending[fragment] <= 0)
        }

    def undrained(self, *, since: Seconds, now: Seconds) -> list[str]:
        """Regions that `finished` must wait for: not drained, and not silent for two leases.

        One that said goodbye is given a single lease to come back, as it does when a worker
        is started anew. One whose trainers only end is given as long as one that fell silent at
        the end, for what its agent is sending.
        """

        def until(lease: Lease) -> Seconds:
            if lease.leaving:
                return lease.until
            heard = since if lease.failed_starts >= FAILED_STARTS else max(since, lease.seen)
            return heard + 2 * lease.seconds

        return [region for region in self.not_drained() if now < until(self.all[region])]

    def not_drained(self) -> list[str]:
        """Regions that have not said that they hold nothing any more."""
        return sorted(region for region, lease in self.all.items() if not self._is_drained(lease))

    def _is_drained(self, lease: Lease) -> bool:
        """Says whether the region said since this end, and no other, that it holds nothing."""
        return bool(self.end and lease.heartbeat and lease.heartbeat.ended == self.end)

    def undrain(self, region: str) -> None:
        """Forgets that a region said it was drained: it is no longer so."""
        lease = self.all.get(region)
        if lease and lease.heartbeat:
            lease.heartbeat = lease.heartbeat.model_copy(update={"ended": 0})

    def all_leaving(self) -> bool:
        """Says whether every region has said goodbye."""
        return all(lease.leaving for lease in self.all.values())

    def wakes(self, *, now: Seconds) -> list[Seconds]:
        """Moments at which silence alone changes something."""
        leases = self.all.values()
        ends = [lease.seen + times * lease.seconds for lease in leases for times in (1, 2)]
        return [end for end in ends if end > now]
