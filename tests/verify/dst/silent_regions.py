"""Who was silent for so long that a run may be finished without its work.

The rule: a server that has called the end waits for a region that still holds work until
nothing was heard of it for two leases, and says whom it did not wait for. What is kept here
is seen from outside, by the requests alone: the server's own word is what is looked at.
"""

from __future__ import annotations

from diloco_cli.core.journal_records import Record, RunEnded, RunFinished

EXACT = 1e-6
"""Seconds by which sums of clocks may differ."""


class Silence:
    def __init__(self, lease: float) -> None:
        self.lease = lease
        self._heard: dict[str, float] = {}
        self._since = 0.0
        self.excused: set[str] = set()
        """Regions without whose work the run was rightly finished."""

    def opened(self, *, now: float) -> None:
        """A server that was away begins to count anew."""
        self._since = now

    def heard(self, region: str, *, at: float) -> None:
        """A request that renews the lease came `at` that moment, and was answered."""
        self._heard[region] = max(at, self._heard.get(region, 0.0))

    def recorded(self, record: Record, *, now: float) -> None:
        if isinstance(record, RunEnded):
            self._since = now
        elif isinstance(record, RunFinished):
            self.excused = {
                region
                for region, at in self._heard.items()
                if region in record.why.partition("not waited for: ")[2].split(", ")
                and self._is_over(at, now)
            }

    def _is_over(self, heard: float, now: float) -> bool:
        return now - max(heard, self._since) >= 2 * self.lease - EXACT
