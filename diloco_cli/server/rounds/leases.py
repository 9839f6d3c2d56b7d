"""Which regions are there, and what did they last report?

A lease lives in memory only and ends when nothing was heard for `lease` seconds. After
a restart of the server every region that ever joined counts as alive for one lease, so
no region is declared dead because the *server* was away. Time is an argument.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from diloco_cli.core.pace import Report
from diloco_cli.wire.messages import Heartbeat

Seconds = float


@dataclass(slots=True)
class Lease:
    """One region, as it was last heard."""

    seen: Seconds
    heartbeat: Heartbeat | None = None
    """Its newest heartbeat since it joined; None before the first."""
    lapsed: bool = False
    """Its silence has been noted."""

    @property
    def leaving(self) -> bool:
        """The region has said goodbye."""
        return bool(self.heartbeat and self.heartbeat.stopping)

    @property
    def drained(self) -> bool:
        """The region holds nothing any more."""
        return bool(self.heartbeat and self.heartbeat.drained)


class Leases:
    """The leases of all regions that ever joined."""

    def __init__(self, regions: Iterable[str], seconds: Seconds, *, now: Seconds) -> None:
        self.seconds = seconds
        self.all = {region: Lease(now) for region in regions}

    def joined(self, region: str, *, now: Seconds) -> None:
        self.all[region] = Lease(now)

    def heard(self, region: str, *, now: Seconds) -> Seconds | None:
        """Renews a lease; says how long the region was silent if that had lapsed it."""
        lease = self.all[region]
        silent = now - lease.seen if lease.lapsed else None
        lease.seen, lease.lapsed = now, False
        return silent

    def lapses(self, *, now: Seconds) -> list[tuple[str, Seconds]]:
        """Lists (region, silence) of leases that ran out since the last time asked."""
        over = []
        for region, lease in sorted(self.all.items()):
            if not lease.lapsed and now >= lease.seen + self.seconds:
                lease.lapsed = True
                over.append((region, now - lease.seen))
        return over

    def lease_left(self, region: str, *, now: Seconds) -> Seconds:
        lease = self.all.get(region)
        if lease is None or lease.leaving:
            return 0.0  # A region that is leaving gives up its lease at once.
        return max(0.0, lease.seen + self.seconds - now)

    def here(self, *, now: Seconds) -> set[str]:
        """Regions with a lease that do not say they are leaving."""
        return {
            region
            for region, lease in self.all.items()
            if now < lease.seen + self.seconds and not lease.leaving
        }

    def reports(self) -> dict[str, list[Report]]:
        """What each region holds, by fragment."""
        return {
            region: [Report(each.version, each.steps) for each in lease.heartbeat.fragments]
            for region, lease in self.all.items()
            if lease.heartbeat
        }

    def drained(self, fragment: int) -> set[str]:
        """Regions that have nothing of this fragment to send any more."""
        return {
            region
            for region, lease in self.all.items()
            if lease.heartbeat
            and (lease.heartbeat.drained or lease.heartbeat.tokens.pending[fragment] <= 0)
        }

    def undrained(self, *, since: Seconds, now: Seconds) -> list[str]:
        """Regions that `finished` must wait for: not drained, and not silent for two leases.

        One that said goodbye is given a single lease to come back, as it does when a worker
        is started anew.
        """

        def until(lease: Lease) -> Seconds:
            if lease.leaving:
                return lease.seen + self.seconds
            return max(since, lease.seen) + 2 * self.seconds

        return [region for region in self.not_drained() if now < until(self.all[region])]

    def not_drained(self) -> list[str]:
        """Regions that have not said that they hold nothing any more."""
        return sorted(region for region, lease in self.all.items() if not lease.drained)

    def undrain(self, *regions: str) -> None:
        """Forgets that these regions, or all, said they were drained: it is no longer so."""
        for region in regions or self.all:
            lease = self.all.get(region)
            if lease and lease.heartbeat:
                lease.heartbeat = lease.heartbeat.model_copy(update={"drained": False})

    def all_leaving(self) -> bool:
        """Says whether every region has said goodbye."""
        return all(lease.leaving for lease in self.all.values())

    def wakes(self, *, now: Seconds) -> list[Seconds]:
        """Moments at which silence alone changes something."""
        seen = [lease.seen for lease in self.all.values()]
        ends = [moment + times * self.seconds for moment in seen for times in (1, 2)]
        return [end for end in ends if end > now]
