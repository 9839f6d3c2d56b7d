"""Who is there: leases and what regions last said.

A lease lives in memory only and ends when nothing was heard for `lease` seconds. After
a restart of the server every region that ever joined counts as alive for one lease, so
nobody is declared dead because *we* were away. Time is an argument.
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
    said: Heartbeat | None = None
    """Its newest heartbeat since it joined; None before the first."""
    lapsed: bool = False
    """Its silence has been noted."""


class Leases:
    """The leases of all regions that ever joined."""

    def __init__(self, regions: Iterable[str], lease: Seconds, *, now: Seconds) -> None:
        self.lease = lease
        self.all = {region: Lease(now) for region in regions}

    def joined(self, region: str, *, now: Seconds) -> None:
        self.all[region] = Lease(now)

    def heard(self, region: str, *, now: Seconds) -> Seconds | None:
        """Renews a lease; says how long the region was silent if that had lapsed it."""
        presence = self.all[region]
        silent = now - presence.seen if presence.lapsed else None
        presence.seen, presence.lapsed = now, False
        return silent

    def lapses(self, *, now: Seconds) -> list[tuple[str, Seconds]]:
        """Lists (region, silence) of leases that ran out since the last time asked."""
        over = []
        for region, presence in sorted(self.all.items()):
            if not presence.lapsed and now >= presence.seen + self.lease:
                presence.lapsed = True
                over.append((region, now - presence.seen))
        return over

    def lease_left(self, region: str, *, now: Seconds) -> Seconds:
        presence = self.all.get(region)
        if presence is None or (presence.said and presence.said.stopping):
            return 0.0  # Whoever said goodbye makes room at once.
        return max(0.0, presence.seen + self.lease - now)

    def here(self, *, now: Seconds) -> set[str]:
        """Regions with a lease that do not say they are leaving."""
        return {
            region
            for region, presence in self.all.items()
            if now < presence.seen + self.lease and not (presence.said and presence.said.stopping)
        }

    def reports(self) -> dict[str, list[Report]]:
        """What each region holds, by fragment."""
        return {
            region: [Report(each.version, each.steps) for each in presence.said.fragments]
            for region, presence in self.all.items()
            if presence.said
        }

    def drained(self, fragment: int) -> set[str]:
        """Regions that have nothing of this fragment to send any more."""
        return {
            region
            for region, presence in self.all.items()
            if presence.said
            and (presence.said.drained or presence.said.tokens.pending[fragment] <= 0)
        }

    def undrained(self, *, since: Seconds, now: Seconds) -> list[str]:
        """Regions that `finished` must wait for: not drained, and not silent for two leases.

        One that said goodbye is given a single lease to come back, as it does when a worker
        is started anew.
        """

        def until(presence: Lease) -> Seconds:
            if presence.said and presence.said.stopping:
                return presence.seen + self.lease
            return max(since, presence.seen) + 2 * self.lease

        return [region for region in self.not_drained() if now < until(self.all[region])]

    def not_drained(self) -> list[str]:
        """Regions that have not said that they hold nothing any more."""
        return sorted(
            region
            for region, presence in self.all.items()
            if not (presence.said and presence.said.drained)
        )

    def undrain(self, *regions: str) -> None:
        """Forgets that these regions, or all, said they were drained: it is no longer so."""
        for region in regions or self.all:
            presence = self.all.get(region)
            if presence and presence.said:
                presence.said = presence.said.model_copy(update={"drained": False})

    def all_leaving(self) -> bool:
        """Says whether every region has said goodbye."""
        return all(presence.said and presence.said.stopping for presence in self.all.values())

    def wakes(self, *, now: Seconds) -> list[Seconds]:
        """Moments at which silence alone changes something."""
        seen = [presence.seen for presence in self.all.values()]
        ends = [moment + times * self.lease for moment in seen for times in (1, 2)]
        return [end for end in ends if end > now]
