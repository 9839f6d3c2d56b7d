"""The figures that tell how well a run goes, each defined once.

Server, chaos report and benchmarks all compute them here; everything is a pure function.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypedDict

from diloco_cli.observe.status import (
    Goodputs,
    HostStatus,
    LossStatus,
    RegionStatus,
    RunTokens,
    Status,
    TextStatus,
)
from diloco_cli.observe.units import amount, bytes_, loss, percent, seconds

SLOW_HOST = 1.3
"""Times the usual time from which on a host of a region is called slow."""
EXPLODED = 10.0
"""Times the loss of the first weights that no training reaches by chance."""
WORST_GUESS = 15.0
"""No loss below it has exploded: who knows nothing of a million tokens has 13.8, and weights that a
run began with may be far better on the evaluator's text than on another region's."""
UNSTABLE = "look at the data, or lower inner.optimizer.lr or outer.lr with `diloco amend`"
SPOILED = (
    "the published weights are spoiled: begin anew from sound ones, with a lower outer.lr or "
    "inner.optimizer.lr"
)
MUCH_THROWN = 0.1
"""Share of the tokens trained from which on those thrown away are said in a short line."""
MOST_NAMES = 3
"""Regions that one alarm names."""


def bits_per_parameter(bytes_moved: float, parameters_moved: float) -> float | None:
    """Says how many bits on the wire one parameter cost, headers included; None before any did."""
    return 8 * bytes_moved / parameters_moved if parameters_moved else None


def goodput(applied: float, trained: float) -> float | None:
    """Says which share of the tokens trained has reached the global weights: the part kept.

    Tokens on their way count as trained and not yet as applied, so a healthy run shows
    a little less than 1 until it is drained. Time lost to restarts is not in it: a
    region that stands still trains no tokens.
    """
    return applied / trained if trained else None


@dataclass(frozen=True, slots=True)
class Effort:
    """What one region has done so far, or within a window of time."""

    worked: float = 0.0
    """Seconds spent in inner steps, those whose work was lost included."""
    trained: float = 0.0
    """Tokens of all inner steps, lost ones included."""
    useful: float = 0.0
    """Of these, what is applied or still can be: not lost, not refused, not discarded."""
    applied: float = 0.0
    """Of these, what is in published weights."""
    pace: float = 0.0
    """Tokens per second when nothing is wrong; 0 if it is not known yet."""
    present: float | None = None
    """Seconds that it was a member; None: all the time."""

    def time_of(self, elapsed: float) -> float:
        return elapsed if self.present is None else self.present


def goodputs(
    efforts: Sequence[Effort], *, elapsed: float, contributions: int, chances: int
) -> Goodputs:
    """Says the three goodputs of a run: of its time, of its tokens, of its rounds.

    `contributions` is the sum over rounds of how many regions each one merged, `chances` that of
    how many were members.
    """
    return Goodputs(
        time=time_goodput(efforts, elapsed),
        tokens=token_goodput(efforts, elapsed),
        participation=participation(contributions, chances),
    )


def time_goodput(efforts: Sequence[Effort], elapsed: float) -> float | None:
    """Says which share of the regions' time went into inner steps whose work is useful."""
    together = sum(effort.time_of(elapsed) for effort in efforts)
    if together <= 0:
        return None
    useful = [
        effort.worked * effort.useful / effort.trained for effort in efforts if effort.trained
    ]
    return _finite(sum(useful) / together)


def token_goodput(efforts: Sequence[Effort], elapsed: float) -> float | None:
    """Says which share of the tokens that a run without faults trains was applied.

    A region whose pace is not known yet counts as fast as the others on average. Whatever it was,
    without faults a region trains no less than it did: a pace from a few slow first steps, on a
    busy machine, would make the share of a short run larger than the whole.
    """
    paces = [effort.pace for effort in efforts if effort.pace > 0]
    if not paces:
        return None
    usual = sum(paces) / len(paces)
    fault_free = sum(
        max((effort.pace or usual) * effort.time_of(elapsed), effort.applied) for effort in efforts
    )
    if fault_free <= 0:
        return None
    return _finite(sum(effort.applied for effort in efforts) / fault_free)


def _finite(share: float) -> float | None:
    """None for what is no share: regions say themselves how fast they are, and may say anything."""
    return share if math.isfinite(share) else None


def participation(contributions: int, chances: int) -> float | None:
    """Says which share of the members a round merged, on average."""
    return contributions / chances if chances else None


def blocked_share(blocked: float, worked: float) -> float | None:
    """Says which share of a trainer's time the exchange held up; None before its first steps.

    `worked` are its seconds in steps, `blocked` those between steps that went into mail, new
    versions and waiting for them.
    """
    return round(blocked / (blocked + worked), 5) if worked > 0 else None


def staleness(published: Sequence[int], adopted: Sequence[int]) -> int:
    """Says how many versions the furthest fragment of a region is behind."""
    return max((max(0, new - old) for new, old in zip(published, adopted, strict=True)), default=0)


def slow_line(
    *,
    up: tuple[float | None, float | None],
    down: tuple[float | None, float | None],
    fragments: int,
    cycle_seconds: float,
) -> str:
    """Says that a line cannot keep up with the training on it; empty if it can, or who knows.

    `up` and `down` are bytes of a frame and bytes per second; in `cycle_seconds` every fragment
    goes each way once.
    """
    slow = []
    for word, (size, rate) in (("up", up), ("down", down)):
        if not size or not rate or cycle_seconds <= 0:
            continue
        seconds = size / rate
        if fragments * seconds > cycle_seconds:
            slow.append(
                f"{bytes_(rate)}/s {word}, a frame of {bytes_(size)} takes {seconds:.0f} s, and "
                f"{fragments} are due every {cycle_seconds:.0f} s"
            )
    return f"slow line: {'; '.join(slow)}" if slow else ""


def is_exploded(loss: float | None, first: float | None) -> bool:
    """Says whether a loss is worse by far than that of weights that know nothing."""
    if loss is None or first is None or first <= 0:
        return False
    return loss > max(EXPLODED * first, WORST_GUESS)


def thrown_away(tokens: RunTokens) -> str:
    """Says how much work was refused or discarded, where that is a sizeable share."""
    thrown = tokens.refused + tokens.discarded - tokens.given_up  # Who retired may return.
    if tokens.trained <= 0 or thrown < MUCH_THROWN * tokens.trained:
        return ""
    return f"{amount(thrown)} tokens thrown away ({percent(thrown / tokens.trained)} of all)"


def seconds_left(points: Sequence[tuple[float, float]], budget: float) -> float | None:
    """Estimates the time to the budget from (time, applied tokens); None if there is no telling."""
    if len(points) < 2:
        return None
    (began, first), (now, applied) = points[0], points[-1]
    if applied <= first or now <= began or applied >= budget:
        return None
    return (budget - applied) * (now - began) / (applied - first)


def overshoot(
    applied: float, budget: float, *, step: float, away: Mapping[str, float], lowered: bool
) -> str:
    """Says by how much more than the budget was applied, and why; empty where it was kept.

    `step` is a step of every region: so much, and as much again, is within the rules. `away` is
    what regions held when they came back, while the others had their part of the budget.
    """
    if applied <= budget + 2 * step:
        return ""
    told = [
        f"{name} was away with {amount(tokens)} tokens"
        for name, tokens in sorted(away.items(), key=lambda each: -each[1])
        if tokens > step
    ]
    if lowered:
        told.append("it was lowered below what was trained")
    share = f"{100 * applied / budget:.0f} % of the budget"
    return f"{share}: {', '.join(told)}" if told else share


def standing(status: Status) -> dict[str, int]:
    """Counts the regions by what they are to the run; who is unlisted is a member as well."""
    members = [region for region in status.regions if region.member]
    return {
        "member": len(members),
        "unlisted": sum(not region.listed for region in members),
        "expected": sum(not (region.member or region.retired) for region in status.regions),
        "retired": sum(bool(region.retired) for region in status.regions),
    }


def standing_in_words(status: Status) -> str:
    """Says who counts and who does not; nothing where all that are listed are members."""
    counts = standing(status)
    parts = [f"{counts[what]} {what}" for what in ("expected", "retired") if counts[what]]
    if not parts and not counts["unlisted"]:
        return ""
    unlisted = f" ({counts['unlisted']} not listed)" if counts["unlisted"] else ""
    noun = "member" if counts["member"] == 1 else "members"
    return ", ".join([f"{counts['member']} {noun}{unlisted}", *parts])


def average_in_words(losses: LossStatus) -> str:
    """Says the loss of the average of the published weights, and of which outer step it is.

    It is measured at moments of its own: beside another loss it stands with its own step.
    """
    if losses.ema is None:
        return ""
    return f"of the average {loss(losses.ema)} at outer step {amount(losses.ema_at)}"


def warnings(status: Status) -> list[str]:
    """Names what a glance at the figures would miss, one sentence each."""
    trouble = [status.trouble] * bool(status.trouble)
    return (
        trouble
        + _divergence(status)
        + _loneliness(status)
        + _overclaims(status)
        + _other_texts(status)
        + _slow_hosts(status)
    )


def _divergence(status: Status) -> list[str]:
    """Regions that train for nothing, and weights that nothing is left of."""
    if status.ended:
        return []
    alive = [region for region in status.regions if region.alive]
    throwing = [(region.name, found) for region in alive if (found := region.divergence)]
    alarms = []
    if throwing:
        names = [name for name, _ in throwing]
        worst = max((found for _, found in throwing), key=lambda found: found.times)
        spoiled = len(throwing) == len(alive) and all(found.published for _, found in throwing)
        alarms.append(
            f"all work of {_named(names)} is thrown away, {worst.times} times in a row since "
            f"step {amount(worst.step)} ({seconds(worst.seconds)} ago), "
            f"{amount(sum(found.tokens for _, found in throwing))} tokens so far: {worst.why}; "
            + (SPOILED if spoiled else UNSTABLE)
        )
    first, heldout = status.loss.first, status.loss.heldout
    exploded = [region for region in alive if region.exploded and not region.divergence]
    if exploded:
        names, largest = [region.name for region in exploded], max(r.loss or 0.0 for r in exploded)
        alarms.append(
            f"the training loss of {_named(names)} has exploded: {largest:.3g}, that of the first "
            f"weights was {loss(first)}; {UNSTABLE}"
        )
    if is_exploded(heldout, first):
        at = amount(status.loss.heldout_at)
        alarms.append(
            f"the held-out loss has exploded: {heldout:.3g} at outer step {at}, that of the first "
            f"weights was {loss(first)}; {SPOILED}"
        )
    return alarms


def _named(names: Sequence[str]) -> str:
    more = len(names) - MOST_NAMES
    return ", ".join(names[:MOST_NAMES]) + (f" and {more} more" if more > 0 else "")


def _slow_hosts(status: Status) -> list[str]:
    """Hosts that the others of their region wait for in every step."""
    return [
        f"host {slow.host} of {region.name} holds its region up: it takes {times:.1f} times as "
        f"long as the others for the same work (a step takes {slow.step_seconds:.3g} s, and "
        f"{slow.step_seconds / times:.3g} s without it)"
        for region in status.regions
        if region.alive and (found := slowest_host(region.hosts))
        for slow, times in [found]
    ]


def slowest_host(hosts: Sequence[HostStatus]) -> tuple[HostStatus, float] | None:
    """The host that the others wait for, and how many times their time it takes; None if all
    are about equally fast."""
    ranked = sorted(hosts, key=lambda host: host.work_seconds)
    if len(ranked) < 2:
        return None
    *others, slow = ranked
    usual = statistics.median_high(host.work_seconds for host in others)
    times = slow.work_seconds / usual if usual else 1.0
    return (slow, times) if times >= SLOW_HOST else None


def _other_texts(status: Status) -> list[str]:
    """Regions that should divide a text, and do not because one has a file more."""
    alike: dict[str, list[TextStatus]] = {}
    for text in status.texts:
        alike.setdefault(text.settings, []).append(text)
    return [
        "texts differ although their settings are equal, so each region reads all of its own: "
        + "; ".join(f"{', '.join(text.regions)} has {text.tokens:,} tokens" for text in texts)
        for texts in alike.values()
        if len(texts) > 1
    ]


def _loneliness(status: Status) -> list[str]:
    regions, tokens = [each for each in status.regions if each.member], status.tokens
    if status.state != "training" or len(regions) < 2 or not status.outer_steps:
        return []
    if tokens.applied >= tokens.budget:
        return []  # The rest is draining; a region that is done has nothing left to give.
    if any(region.alive and not region.step for region in regions):
        return []  # A region is still starting; that is not yet worth an alarm.
    active = [region.name for region in regions if region.contributing]
    others = [region.name for region in regions if not region.contributing]
    if len(active) == 1:
        return [f"{active[0]} is training alone: nothing arrives from {', '.join(others)}"]
    if not active:
        return ["no region's work reaches the global weights at the moment"]
    return []


def _overclaims(status: Status) -> list[str]:
    found = []
    for region in status.regions:
        if region.overclaim:
            hint = f"diloco amend --repace {region.name}"
            found.append(f"{region.name} {region.overclaim} ({hint} lets it be learnt anew)")
        if region.unbalanced:
            found.append(f"{region.name} reports tokens that contradict what is merged")
    return found


def per_device(region: RegionStatus) -> str:
    """What a region gets out of each of its devices; nothing where that says nothing new.

    A single processor, whose kind is not known and which does not say what is in use, is left
    out: its tokens per second are those of the region.
    """
    known = (region.devices or 1) > 1 or region.mfu is not None or region.device_memory is not None
    if not (known and region.alive and region.devices):
        return ""
    speed = region.tokens_per_second
    several = [f"{len(region.hosts)} hosts"] * (len(region.hosts) > 1)
    facts = [
        *several,
        f"{region.devices} device{'s' * (region.devices > 1)}",
        f"{amount(None if speed is None else speed / region.devices)} tok/s each",
        f"{'–' if region.tflops is None else f'{region.tflops:.3g}'} TFLOP/s each",
    ]
    if region.mfu is not None:
        facts.append(f"MFU {percent(region.mfu)}")
    if region.device_memory is not None:
        facts.append(f"{bytes_(region.device_memory)} in use")
    if region.blocked is not None:
        facts.append(f"{100 * region.blocked:.1f}% of the time held up by the exchange")
    return ", ".join(facts)


class MedianAndTail(TypedDict):
    p50: float | None
    p95: float | None


RECOVERY_PARTS = ("detect", "start", "compile", "fetch")


class RecoverySummary(TypedDict):
    """How long recoveries took, in seconds."""

    count: int
    p50: float | None
    p95: float | None
    max: float | None
    parts: dict[str, MedianAndTail]


def recoveries(recoveries: Sequence[Mapping[str, float]]) -> RecoverySummary:
    """Sums up how long it took from a kill to the next finished step, as a whole and by part.

    Each recovery has its `total`, in seconds, and those parts that were seen.
    """
    totals = [recovery["total"] for recovery in recoveries]
    parts = {
        part: [recovery[part] for recovery in recoveries if part in recovery]
        for part in RECOVERY_PARTS
    }
    return {
        "count": len(totals),
        **_median_and_tail(totals),
        "max": max(totals, default=None),
        "parts": {part: _median_and_tail(values) for part, values in parts.items()},
    }


def _median_and_tail(values: Sequence[float]) -> MedianAndTail:
    return {"p50": quantile(values, 0.5), "p95": quantile(values, 0.95)}


def quantile(values: Iterable[float], share: float) -> float | None:
    """The smallest value that so large a share of all does not exceed; None without values."""
    if not (ranked := sorted(values)):
        return None
    # Rounded first: 0.95 × 20 is a hair above 19.
    rank = math.ceil(round(share * len(ranked), 9))
    return ranked[max(1, rank) - 1]
