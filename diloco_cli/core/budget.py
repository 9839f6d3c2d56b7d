"""How far may each region train, and when is the budget used up?

A frame carries all that its region holds, and after the end everything that is held is merged.
So the budget is a limit only if it binds the training, not the merging:

    spoken for = counted + accepted and waiting + held by live regions
    until      = what the region has trained + its share of what is neither spoken for nor
                 somebody else's room

Every region is told its `until` with every heartbeat and makes no inner step beyond it. The
run ends when all of the budget is spoken for. What was held then and is lost on the way, with
a region that dies, leaves the run short, and it goes on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean

from diloco_cli.core.claims import Allowance
from diloco_cli.core.ledger import FragmentState, Resumption

AT_HAND = 2.0
"""Rounds of all that must be left for a region to have a share that makes no steps. Less is for
those who train: a trainer that compiles, or is stuck, would keep it from them."""

MOST_TOKENS = 2.0**53 - 1
"""No message says more: beyond it a float does not count one by one."""

NEAR = 1e-6
"""Tokens by which sums in another order differ."""


@dataclass(frozen=True, slots=True)
class BudgetStanding:
    """One live region, as far as the budget is concerned."""

    step_tokens: float
    trained: float = 0.0
    """Tokens since its folder began, of the fragment of which it trained most."""
    unheard: float = 0.0
    """Tokens that it holds beyond what is spoken for: they would not count if claimed now."""
    until: float | None = 0.0
    """How far it may train with what it was told; None if that is not known."""
    pace: float = 0.0
    """Tokens per second; 0 before it has made a step."""
    still: bool = False
    """It has made no step for long, although it might."""
    stuck: bool = False
    """For so long that starting and compiling do not explain it."""

    @property
    def room(self) -> float:
        """Tokens that it may still train without another word."""
        return max(0.0, (self.until or 0.0) - self.trained)


Standings = Mapping[str, BudgetStanding]


@dataclass(frozen=True, slots=True)
class HeldTokens:
    """What a region says it holds of one fragment."""

    region: str
    fragment: int
    pending: float
    """Neither merged here nor given up."""
    waiting: float = 0.0
    """Of these, in a frame that was accepted."""
    trained: float = 0.0
    """Of the fragment of which it trained most."""


def unsent(held: HeldTokens, resumed: Resumption | None) -> float:
    """Tokens that a region holds and that are in no frame here.

    When a run went on after a drain it had said that it held nothing, or had given nothing: since
    then it has what it trained since. Otherwise work that never comes would be spoken for again
    at once, and the run end and go on for ever.
    """
    tokens = max(0.0, held.pending - held.waiting)
    if resumed is None:
        return tokens
    return min(tokens, max(0.0, held.trained - resumed.trained.get(held.region, 0.0)))


def countable(
    held: HeldTokens, allowance: Allowance, step_tokens: float, resumed: Resumption | None
) -> float:
    """Tokens of these that would count if they were claimed now."""
    credit = allowance.credit(held.region, held.fragment)
    if resumed is not None:
        since = max(0.0, allowance.at - resumed.at)
        credit = min(credit, allowance.rate(held.region) * since)
    return min(unsent(held, resumed), credit * step_tokens)


def spoken(
    slots: Sequence[FragmentState], sizes: Sequence[int], unsent: Mapping[str, Sequence[float]]
) -> float:
    """Tokens that are merged, or will be once all that is held is drained."""
    total = 0.0
    for number, (slot, size) in enumerate(zip(slots, sizes, strict=True)):
        tokens = sum(slot.applied.values())
        for receipts in (slot.waiting, slot.closing):
            tokens += sum(receipt.worth.tokens for receipt in receipts.values())
        tokens += sum(each[number] for each in unsent.values())
        total += size * tokens
    return total / sum(sizes)


def until(
    region: str,
    standings: Standings,
    *,
    budget: float,
    spoken: float,
    every: int,
    quorum: int = 1,
) -> float:
    """How far a region may train: its own total beyond which it makes no inner step."""
    own = standings[region]
    others = [each for name, each in standings.items() if name != region]
    if any(each.until is None for each in others):
        # A server that has just started does not know yet what it has promised to whom.
        return max(own.trained, own.until or 0.0)
    # What it holds counts against itself whole: work that may not count is no reason for more.
    left = budget - spoken - own.unheard - sum(each.room for each in others)
    if left <= 0:
        return own.trained
    plenty = budget - spoken > AT_HAND * every * sum(each.step_tokens for each in (own, *others))
    weights = _weights([own, *others], plenty=plenty, quorum=quorum)
    if not weights[0]:
        # A stuck one may show that it is not, as long as there is enough for everybody.
        return own.trained + (min(left, every * own.step_tokens) if plenty else 0.0)
    # Whatever is left is worth a step of somebody.
    share = max(left * weights[0] / sum(weights), own.step_tokens)
    return own.trained + min(left, share)


def _weights(everybody: Sequence[BudgetStanding], *, plenty: bool, quorum: int) -> list[float]:
    """By how much each region's share goes; one without a pace is as fast as the others."""
    paces = [each.pace for each in everybody if each.pace > 0]
    usual = fmean(paces) if paces else 1.0
    active = [not each.stuck if plenty else each.pace > 0 and not each.still for each in everybody]
    if not plenty and sum(active) < quorum:
        # Those who train cannot make a round by themselves: whoever had no room yet, as after a
        # run was opened again, has no pace because of that.
        active = [not each.still for each in everybody]
    if not any(active):
        active = [True] * len(everybody)
    return [
        (each.pace or usual) if counts else 0.0
        for each, counts in zip(everybody, active, strict=True)
    ]


def steady(told: float | None, fresh: float, trained: float) -> float:
    """What to tell a region that was told something before: the same, as long as it is about right.

    Its files would otherwise change with every heartbeat. Whatever it says it has trained, it is
    told a number that a message can hold.
    """
    fresh = min(fresh, MOST_TOKENS)
    if told is None:
        return fresh
    before, now = told - trained, fresh - trained
    return told if now / 2 < before <= 1.25 * now else fresh


def is_short(*, budget: float, counted: float, round_tokens: float) -> bool:
    """Says whether a drained run has a round or more left to train."""
    return budget - counted >= max(round_tokens, 1.0)
