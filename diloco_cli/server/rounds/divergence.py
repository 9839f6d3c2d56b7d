"""Whose work is thrown away again and again, and is there any use in going on?

Either a region gives its work up itself, because it is not finite, and says so in its heartbeats;
or rounds that it is in come to nothing, because the outer step is not finite. Both show in
`status` and warn. Where it is so for *every* region that belongs to the run, the run is stopped.
One that says so wrongly ends nothing, because all others would have to say the same.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from diloco_cli.core.guard import STRIKES
from diloco_cli.core.rounds import Receipt
from diloco_cli.observe.metrics import is_exploded
from diloco_cli.observe.units import amount
from diloco_cli.server.rounds.state import FailedRounds, State
from diloco_cli.wire.messages import MOST_LETTERS, Divergence

log = logging.getLogger(__name__)

HOPELESS = 20
"""Times in a row that every region's work was thrown away, after which the run is stopped."""


def divergence_of(state: State, region: str) -> Divergence | None:
    """What of a region's work is thrown away; a single time, or two, pass by themselves."""
    found = _found(state, region)
    return found if found and found.times >= STRIKES else None


def _found(state: State, region: str, *, in_a_row: bool = False) -> Divergence | None:
    """What the region says of itself, or the rounds that it was in; the worse of them.

    With `in_a_row` a fragment whose rounds come to nothing does not count while others' do.
    """
    lease = state.leases.all.get(region)
    heartbeat = lease.heartbeat if lease else None
    here = state.leases.lease_left(region, now=state.clock()) > 0
    if heartbeat is None or not (here and heartbeat.training):
        return None
    failed = [
        each.report(now=state.clock())
        for (fragment, name), each in state.failed_rounds.items()
        if name == region and (fragment is None or not in_a_row)
    ]
    both = filter(None, (heartbeat.divergence, *failed))
    return max(both, key=lambda found: found.times, default=None)


def note_divergence(state: State, region: str, before: Divergence | None) -> None:
    """Tells people, once, that a region's work has begun to be thrown away."""
    found = divergence_of(state, region)
    if found and not before:
        log.warning(f"{region}: {found.in_words()}")
        state.note("diverging", region=region, why=found.in_words())


def note_failed_round(state: State, receipts: Iterable[Receipt], why: str) -> None:
    """Counts a round that came to nothing for each of its members, until one comes to something."""
    now, sizes = state.clock(), state.settings.sizes
    for receipt in receipts:
        region, known = receipt.region, divergence_of(state, receipt.region)
        for key in ((None, region), (receipt.fragment, region)):
            failed = state.failed_rounds.setdefault(key, FailedRounds(now, _step(state, region)))
            failed.times += 1
            failed.tokens += receipt.tokens * sizes[receipt.fragment] / sum(sizes)
            failed.why = why[:MOST_LETTERS]
        note_divergence(state, region, known)
    state.wake.set()


def note_sound_round(state: State, fragment: int) -> None:
    """A version was published: what failed of this fragment, or of all of them, is over."""
    for key in [key for key in state.failed_rounds if key[0] in (None, fragment)]:
        del state.failed_rounds[key]


def _step(state: State, region: str) -> int:
    lease = state.leases.all.get(region)
    return lease.heartbeat.step if lease and lease.heartbeat else 0


def no_way_on(state: State) -> str:
    """Says why nothing will come of this run any more; empty if something may.

    Every region of the spec and every other member must be there, train, and have had its work
    thrown away `HOPELESS` times in a row. Whoever is away, only starting or never came may do
    better.
    """
    listed = {region.name for region in state.spec.regions} - set(state.ledger.retired)
    names, reports = sorted(listed | set(state.ledger.members)), list[Divergence]()
    for name in names:
        found = _found(state, name, in_a_row=True)
        if found is None or found.times < HOPELESS:
            return ""
        reports.append(found)
    least = min(reports, key=lambda found: found.times)
    tokens = sum(found.tokens for found in reports)
    who = f"all work of {names[0]}" if len(names) == 1 else f"the work of all {len(names)} regions"
    spoiled = all(found.published for found in reports)
    so = "; the published weights themselves are spoiled" if spoiled else ""
    return (
        f"{who} is thrown away, {least.times} times in a row at least and {amount(tokens)} "
        f"tokens in all: {least.why}{so}. {_newest_sound(state)}"
    )


def _newest_sound(state: State) -> str:
    """Names the newest weights whose held-out loss was measured and is a sensible one."""
    measured = state.ledger.evaluations
    first = float(measured[0].loss) if measured else None
    for each in reversed(measured):
        if not is_exploded(float(each.loss), first):
            versions = ", ".join(map(str, each.versions))
            return (
                f"The newest weights known to be sound are those of outer step "
                f"{sum(each.versions)} (versions {versions} of the fragments), "
                f"held-out loss {float(each.loss):.4g}."
            )
    return "No weights of it are known to be sound but the first ones, version 0."
