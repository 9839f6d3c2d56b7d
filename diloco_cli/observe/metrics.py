"""The figures that tell how well a run goes, each defined once.

Server, chaos report and benchmarks all compute them here; everything is a pure function.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from diloco_cli.observe.status import Goodputs, Status


def bits_per_parameter(bytes_moved: float, parameters_moved: float) -> float | None:
    """Says how many bits on the wire one parameter cost, headers included; None before any did."""
    return 8 * bytes_moved / parameters_moved if parameters_moved else None


def goodput(applied: float, trained: float) -> float | None:
    """Says which share of the tokens trained has reached the global weights.

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
    kept: float = 0.0
    """Of these, what is applied or still can be: not lost, not refused, not discarded."""
    applied: float = 0.0
    """Of these, what is in published weights."""
    pace: float = 0.0
    """Tokens per second when nothing is wrong; 0 if it is not known yet."""


def goodputs(
    efforts: Sequence[Effort], *, elapsed: float, rounds: int, contributions: int
) -> Goodputs:
    """Says the three goodputs of a run: of its time, of its tokens, of its rounds.

    `contributions` is the sum over `rounds` of how many regions each one merged.
    """
    return Goodputs(
        time=time_goodput(efforts, elapsed),
        tokens=token_goodput(efforts, elapsed),
        participation=participation(rounds, contributions, len(efforts)),
    )


def time_goodput(efforts: Sequence[Effort], elapsed: float) -> float | None:
    """Says which share of the regions' time went into inner steps whose work was kept."""
    if not efforts or elapsed <= 0:
        return None
    kept = [effort.worked * effort.kept / effort.trained for effort in efforts if effort.trained]
    return sum(kept) / (len(efforts) * elapsed)


def token_goodput(efforts: Sequence[Effort], elapsed: float) -> float | None:
    """Says which share of the tokens that a run without faults trains was applied.

    A region whose pace is not known yet counts as fast as the others on average.
    """
    paces = [effort.pace for effort in efforts if effort.pace > 0]
    if not paces or elapsed <= 0:
        return None
    fault_free = sum(paces) / len(paces) * len(efforts)
    return sum(effort.applied for effort in efforts) / (fault_free * elapsed)


def participation(rounds: int, contributions: int, regions: int) -> float | None:
    """Says which share of the regions a round merged, on average."""
    return contributions / (rounds * regions) if rounds and regions else None


def blocked_share(blocked: float, worked: float) -> float | None:
    """Says which share of a trainer's time the exchange held up; None before its first steps.

    `worked` are its seconds in steps, `blocked` those between steps that went into mail, new
    versions and waiting for them.
    """
    return round(blocked / (blocked + worked), 5) if worked > 0 else None


def staleness(published: Sequence[int], adopted: Sequence[int]) -> int:
    """Says how many versions the furthest fragment of a region is behind."""
    return max((max(0, new - old) for new, old in zip(published, adopted, strict=True)), default=0)


def seconds_left(points: Sequence[tuple[float, float]], budget: float) -> float | None:
    """Estimates the time to the budget from (time, applied tokens); None if there is no telling."""
    if len(points) < 2:
        return None
    (began, first), (now, applied) = points[0], points[-1]
    if applied <= first or now <= began or applied >= budget:
        return None
    return (budget - applied) * (now - began) / (applied - first)


def warnings(status: Status) -> list[str]:
    """Names what a glance at the figures would miss, one sentence each."""
    return [status.trouble] * bool(status.trouble) + _loneliness(status)


def _loneliness(status: Status) -> list[str]:
    regions, tokens = status.regions, status.tokens
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


RECOVERY_PARTS = ("detect", "start", "compile", "fetch")


def recoveries(recoveries: Sequence[Mapping[str, float]]) -> dict[str, Any]:
    """Sums up how long it took from a kill to the next finished step, as a whole and by part.

    Each recovery has its `total`, in seconds, and those parts that were seen.
    """
    totals = [recovery["total"] for recovery in recoveries]
    parts = {part: [one[part] for one in recoveries if part in one] for part in RECOVERY_PARTS}
    return {
        "count": len(totals),
        **_median_and_tail(totals),
        "max": max(totals, default=None),
        "parts": {part: _median_and_tail(values) for part, values in parts.items()},
    }


def _median_and_tail(values: Sequence[float]) -> dict[str, float | None]:
    return {"p50": quantile(values, 0.5), "p95": quantile(values, 0.95)}


def quantile(values: Iterable[float], share: float) -> float | None:
    """The smallest value that so large a share of all does not exceed; None without values."""
    if not (ranked := sorted(values)):
        return None
    # Rounded first: 0.95 × 20 is a hair above 19.
    rank = math.ceil(round(share * len(ranked), 9))
    return ranked[max(1, rank) - 1]
