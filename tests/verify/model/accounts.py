"""What the model's server keeps of claims and of the budget.

The server's own `RunTotals` and `BudgetRooms` do the sums; here stand the few things they ask
for: who is there, what was heard, and what time it is on the allowance clock.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

from diloco_cli.core.claims import Allowance, ClaimTerms
from diloco_cli.core.journal_records import Record
from diloco_cli.server.rounds.budget import BudgetRooms
from diloco_cli.server.rounds.leases import FIRST_STEPS, FORGIVEN
from diloco_cli.server.rounds.token_totals import RunTotals
from tests.verify.model.amendments import ModelTerms
from tests.verify.model.seeded_run import LEASE
from tests.verify.model.symbols import Beat, ReportedTokens

if TYPE_CHECKING:
    from tests.verify.model.server import Server


@dataclass(slots=True)
class Heard:
    """A region's newest heartbeat."""

    beat: Beat
    idle_since: float | None
    quickest: float
    worked: float = 0.0
    lost: float = 0.0
    lost_with_server: float = 0.0
    pace: float = 0.0

    @property
    def heartbeat(self) -> Beat:
        return self.beat

    @property
    def tokens(self) -> ReportedTokens:
        return self.beat.tokens

    @property
    def pending(self) -> float:
        return max(self.tokens.pending)


class Accounts:
    """As much of the server's state as its sums ask for."""

    def __init__(self, server: Server) -> None:
        self.server, self.world = server, server.world
        self.sizes = range(1, server.fragments + 1)
        self.settings = self.history = self.leases = self
        self.newest = self
        self.all: dict[str, Heard] = {}
        self.totals = RunTotals(cast(Any, self))
        self.rooms = BudgetRooms()
        self.began = self.world.now
        self.allowance_before = 0.0

    # The journal

    def apply(self, record: Record) -> None:
        self.totals.apply(record)

    def opened(self) -> None:
        """The journal is read: from here the clock goes on."""
        self.allowance_before = self.ledger.allowance.restarted(self.wall)

    @property
    def wall(self) -> float:
        return self.world.now + self.world.skew

    @property
    def allowance_clock(self) -> float:
        return self.allowance_before + self.world.now - self.began

    # What sums ask for

    @property
    def ledger(self) -> Any:
        return self.server.ledger

    @property
    def terms(self) -> ModelTerms:
        return self.server.newest

    @property
    def sync(self) -> Any:
        return self.terms.sync

    @property
    def spec(self) -> Any:
        return self

    @property
    def budget(self) -> Any:
        return self

    @property
    def tokens(self) -> float:
        """Of the budget."""
        return self.terms.budget

    def __getitem__(self, terms: int) -> Accounts:
        return self

    def weight(self, receipt: Any) -> float:
        return receipt.worth.tokens + 1e-9

    def step_tokens(self, region: str) -> float:
        return float(self.world.setting.batch[region])

    def clock(self) -> float:
        return self.world.now

    def here(self, *, now: float) -> set[str]:
        return self.server.live()

    def retiring(self) -> set[str]:
        return set()

    def stands_still(self, region: str, *, now: float, times: float = 1.0) -> bool:
        heard = self.all.get(region)
        if heard is None or heard.idle_since is None:
            return False
        return now - heard.idle_since > times * max(LEASE, 4 * heard.beat.step_seconds)

    # What is told and heard

    def allowance(self) -> Allowance:
        sync, ledger = self.sync, self.ledger
        reported = {region: 1 / h.quickest for region, h in self.all.items() if h.quickest}
        cap = float((sync.staleness + 1) * sync.every)
        paces = {region: ledger.paces[region] for region in ledger.members}
        terms = ClaimTerms(cap, self.step_tokens, reported=reported)
        return Allowance([s.claims for s in ledger.slots], paces, terms, at=self.allowance_clock)

    def hear(self, region: str, beat: Beat) -> None:
        before, now = self.all.get(region), self.world.now
        trained, idle = max(beat.tokens.trained), before.idle_since if before else None
        if before is None or trained != max(before.tokens.trained):
            idle = None
        if beat.until is not None and trained < beat.until:
            idle = now if idle is None else idle
        elif not self.stands_still(region, now=now) or self.stands_still(
            region, now=now, times=FORGIVEN
        ):
            idle = None
        quickest = before.quickest if before else 0.0
        if beat.step_seconds > 0 and beat.made >= FIRST_STEPS:
            quickest = min(quickest or beat.step_seconds, beat.step_seconds)
        heard = Heard(beat, idle, quickest)
        self.all[region] = heard
        self.totals.account(region).update_from_heartbeat(cast(Any, heard))

    def forget(self, region: str) -> None:
        self.all.pop(region, None)

    def tell(self, region: str) -> float:
        return self.rooms.tell(cast(Any, self), region)

    def unsent(self, live: Collection[str]) -> dict[str, list[float]]:
        return self.rooms.unsent(cast(Any, self), live)
