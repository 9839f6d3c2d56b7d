"""How far the regions may train, as they were told, and what of the budget they speak for.

Rooms live in memory. A restarted server learns from each region's next heartbeat how far that
may train, and promises nothing to others before it has.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from diloco_cli.core import budget
from diloco_cli.core.budget import BudgetStanding, HeldTokens
from diloco_cli.core.claims import Allowance
from diloco_cli.core.journal_records import RunResumed
from diloco_cli.server.rounds.leases import STUCK

if TYPE_CHECKING:
    from diloco_cli.server.rounds.state import State


PROGRESS_SECONDS = 1.0
"""The run's progress is as fresh as this: it takes a look at every region's books."""


class BudgetRooms:
    """What was promised to whom."""

    def __init__(self) -> None:
        self._told: dict[str, tuple[str, float]] = {}
        """By region: its folder, and the last `until` it was told."""
        self.brought: dict[str, float] = {}
        """By region: tokens that it held when it came back from an absence."""
        self._progress = -math.inf, -1, 0.0
        """When it was last looked up, under which terms, and what it was."""

    def unsent(self, state: State, live: Collection[str]) -> dict[str, list[float]]:
        """By live region and fragment: tokens held and in no frame here, as far as they count.

        Far from the budget nobody asks, and reports of many regions are long.
        """
        sizes = state.settings.sizes
        held = sum(lease.pending for lease in state.leases.all.values())
        near = budget.spoken(state.ledger.slots, sizes, {}) + held
        if near < state.spec.budget.tokens:
            return {}
        allowance = state.allowance()
        return {region: self._unsent(state, region, allowance) for region in live}

    def progress(self, state: State) -> float:
        """Which share of the budget is trained, as far as it counts; not looked up every time.

        What is merged or waits, and what live regions hold: so it does not go back when a round
        is merged, and work that was lost is not in it.
        """
        now = state.clock()
        at, terms, known = self._progress
        if terms != state.ledger.terms or not 0 <= now - at < PROGRESS_SECONDS:
            here = state.leases.here(now=now) & set(state.ledger.members)
            allowance = state.allowance()
            unsent = {region: self._unsent(state, region, allowance) for region in here}
            spoken = budget.spoken(state.ledger.slots, state.settings.sizes, unsent)
            known = min(1.0, round(spoken / state.spec.budget.tokens, 4))
            self._progress = now, state.ledger.terms, known
        return known

    def _unsent(self, state: State, region: str, allowance: Allowance) -> list[float]:
        step_tokens, resumed = state.settings.step_tokens(region), state.ledger.resumed
        return [
            budget.countable(held, allowance, step_tokens, resumed)
            for held in self._held(state, region)
        ]

    def _held(self, state: State, region: str) -> list[HeldTokens]:
        """What a region says it holds, by fragment; nothing of one whose work is kept out."""
        account, owner = state.totals.account(region), state.ledger.regions[region].owner
        kept_out, trained = region in state.ledger.quarantined(), account.trained
        return [
            HeldTokens(
                region,
                fragment,
                pending=0.0 if kept_out else account.fates(fragment).pending,
                waiting=state.totals.waiting(region, owner, fragment),
                trained=trained,
            )
            for fragment in range(len(state.settings.sizes))
        ]

    def tell(self, state: State, region: str) -> float:
        """Works out how far a region may train, and remembers that it was told so."""
        here = state.leases.here(now=state.clock()) & set(state.ledger.members)
        allowance = state.allowance()
        # Nothing of those in quarantine is merged: room that they have is nobody else's loss.
        training = {*(here - state.leases.retiring() - state.ledger.quarantined()), region}
        standings = {name: self._standing(state, name, allowance) for name in training}
        unsent = self.unsent(state, here)
        spoken = budget.spoken(state.ledger.slots, state.settings.sizes, unsent)
        if unsent:
            unheard = self._unheard(state, region, unsent.get(region, []))
            standings[region] = replace(standings[region], unheard=unheard)
        else:
            # More than is spoken for, but only far from the budget.
            spoken += sum(lease.pending for lease in state.leases.all.values())
        fresh = budget.until(
            region,
            standings,
            budget=state.spec.budget.tokens,
            spoken=spoken,
            every=state.sync.every,
            quorum=state.sync.quorum,
        )
        owner, told = self._told.get(region, ("", None))
        told = told if owner == state.ledger.regions[region].owner else None
        until = budget.steady(told, fresh, standings[region].trained)
        self._told[region] = state.ledger.regions[region].owner, until
        return until

    def _unheard(self, state: State, region: str, counts: Sequence[float]) -> float:
        """Tokens that a region holds and that would not count, averaged with the sizes."""
        sizes, resumed = state.settings.sizes, state.ledger.resumed
        held = [budget.unsent(each, resumed) for each in self._held(state, region)]
        return sum(
            size * (tokens - countable)
            for size, tokens, countable in zip(sizes, held, counts, strict=False)
        ) / sum(sizes)

    def _standing(self, state: State, region: str, allowance: Allowance) -> BudgetStanding:
        account = state.totals.account(region)
        step_tokens = float(state.settings.step_tokens(region))
        return BudgetStanding(
            step_tokens=step_tokens,
            trained=account.trained,
            until=self.outstanding(state, region),
            pace=self._pace(state, region, allowance) * step_tokens,
            still=state.leases.stands_still(region, now=state.clock()),
            stuck=state.leases.stands_still(region, now=state.clock(), times=STUCK),
        )

    def outstanding(self, state: State, region: str) -> float | None:
        """How far a region may train with what it was told, or says that it was told."""
        owner, told = self._told.get(region, ("", None))
        if owner != state.ledger.regions[region].owner:
            told = None
        lease = state.leases.all.get(region)
        echoed = lease.heartbeat.until if lease and lease.heartbeat else None
        known = [until for until in (told, echoed) if until is not None]
        if known:
            return max(known)
        # It has said something, and nothing about any room: then it has none.
        return 0.0 if lease is None or lease.heartbeat else None

    def _pace(self, state: State, region: str, allowance: Allowance) -> float:
        """Steps per second that a region makes, as far as its word is taken."""
        lease = state.leases.all.get(region)
        if lease is None or lease.heartbeat is None or not lease.heartbeat.step_seconds:
            return 0.0
        return min(1.0 / lease.heartbeat.step_seconds, allowance.rate(region))

    def came_back(self, state: State, region: str) -> None:
        """Takes note of what a region holds that was not known to be there."""
        sizes, account = state.settings.sizes, state.totals.account(region)
        held = [account.fates(fragment).pending for fragment in range(len(sizes))]
        tokens = sum(size * each for size, each in zip(sizes, held, strict=True)) / sum(sizes)
        self.brought[region] = max(tokens, self.brought.get(region, 0.0))

    def resumed(self, state: State, why: str) -> RunResumed:
        """The record of a run that goes on after a drain."""
        members = state.ledger.members
        trained = {region: state.totals.account(region).trained for region in members}
        return RunResumed(why, trained, state.allowance_clock)
