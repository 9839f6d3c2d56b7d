"""What did the faults cost? One document for every method, whoever measured it.

All figures are of the time between the first step of the last region and the end of the
schedule. Tokens a fault-free run would have trained follow from the pace that the spec
sets, or from the record of such a run.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NotRequired, TypedDict

from diloco_cli.chaos.inflict import InflictedFault, InflictedRecord, LinkBytes
from diloco_cli.observe.events import Event
from diloco_cli.observe.metrics import RecoverySummary, participation, recoveries
from diloco_cli.observe.status import Status
from diloco_cli.spec.fault_kinds import FAULT_KINDS, KILLS
from diloco_cli.spec.schema import RunSpec

Seconds = float


@dataclass(frozen=True)
class Span:
    """The time that is looked at, and the run's status at both of its ends."""

    began: Seconds
    """Seconds since 1970."""
    seconds: Seconds
    before: Status
    after: Status
    carried: Mapping[str, LinkBytes] = field(default_factory=dict)
    """By emulated links, by region."""

    def trained(self) -> float:
        return self.after.tokens.trained - self.before.tokens.trained

    def applied(self) -> float:
        """Tokens of this time alone: what was trained before it and applied within is left out,
        and what is still pending at its end does not count."""
        before = self.before.tokens
        return self.after.tokens.applied - before.applied - before.pending


class TokenSums(TypedDict):
    trained: float
    applied: float
    pending: NotRequired[float]
    fault_free: float | None


class GoodputShares(TypedDict):
    """The three definitions of docs/concepts/goodput.md."""

    time: float | None
    tokens: float | None
    participation: float | None


class LossRecord(TypedDict):
    heldout: float | None
    curve: list[list[float]]
    """Tokens, loss and seconds of every evaluation."""


class LinkRecord(TypedDict):
    """Bytes that a region's emulated link carried, HTTP and heartbeats included."""

    up: int
    down: int


class ChaosRecord(TypedDict):
    """chaos.json; whoever trains gives all but the first four keys."""

    method: NotRequired[str]
    name: NotRequired[str]
    spec: NotRequired[str]
    seed: NotRequired[int]
    seconds: Seconds
    regions: int
    faults: list[InflictedRecord]
    tokens: TokenSums
    goodput: GoodputShares
    blocked: NotRequired[float | None]
    links: NotRequired[Mapping[str, LinkRecord]]
    recovery: RecoverySummary
    loss: LossRecord
    parallel: NotRequired[Mapping[str, object]]
    """Of the data-parallel baselines."""


def fault_free_rate(spec: RunSpec) -> float | None:
    """Tokens a second of all regions together, when nothing goes wrong; None without a pace."""
    if spec.chaos is None or spec.chaos.step_seconds is None:
        return None
    pace = spec.chaos.step_seconds
    inners = [(spec.inner_of(region.name), region.speed) for region in spec.regions]
    return sum(inner.batch * inner.sequence * speed / pace for inner, speed in inners)


def aftermath(
    spec: RunSpec,
    span: Span,
    struck: Sequence[InflictedFault],
    events: Iterable[Event],
    *,
    rate: float | None,
) -> ChaosRecord:
    """Everything of the record that can be read off a run that went through LocalRun."""
    seen = [event for event in events if event.time >= span.began]
    ends = span.began + span.seconds
    faults = [
        _with_recovery(each, struck[number + 1 :], seen) for number, each in enumerate(struck)
    ]
    trained, applied = span.trained(), max(0.0, span.applied())
    fault_free = rate * span.seconds if rate else None
    return {
        "seconds": round(span.seconds, 3),
        "regions": len(spec.regions),
        "faults": faults,
        "tokens": {
            "trained": round(trained, 1),
            "applied": round(applied, 1),
            "pending": round(span.after.tokens.pending, 1),
            "fault_free": fault_free and round(fault_free, 1),
        },
        "goodput": {
            "time": trained / fault_free if fault_free else None,
            "tokens": applied / fault_free if fault_free else None,
            "participation": _participation(spec, [e for e in seen if e.time <= ends]),
        },
        "blocked": _blocked(span.after),
        "links": {name: {"up": up, "down": down} for name, (up, down) in span.carried.items()},
        "recovery": recoveries([fault["recovery"] for fault in faults if "recovery" in fault]),
        "loss": {
            "heldout": span.after.loss.heldout,
            "curve": loss_curve(seen, span),
        },
    }


def _blocked(status: Status) -> float | None:
    """Mean over regions of the share of training time that the exchange blocked."""
    shares = [region.blocked for region in status.regions if region.blocked is not None]
    return statistics.mean(shares) if shares else None


def _participation(spec: RunSpec, events: Iterable[Event]) -> float | None:
    rounds = [
        len(event.fields["members"])
        for event in events
        if event.kind == "published" and "members" in event.fields
    ]
    return participation(sum(rounds), len(rounds) * len(spec.regions))


def loss_curve(events: Iterable[Event], span: Span) -> list[list[float]]:
    """Held-out loss over applied tokens and seconds."""
    applied = before = span.before.tokens.applied
    curve = []
    for event in events:
        if event.kind == "published" and event.fields.get("tokens") is not None:
            applied = float(event.fields["tokens"])
        if event.kind == "evaluated" and event.fields.get("loss") is not None:
            since = round(event.time - span.began, 3)
            curve.append([round(applied - before, 1), float(event.fields["loss"]), since])
    return curve


def _with_recovery(
    struck: InflictedFault, later: Iterable[InflictedFault], events: Sequence[Event]
) -> InflictedRecord:
    """The fault as it was inflicted, and how its region came back, if it could in peace."""
    record, region = struck.as_record(), struck.fault.region
    if struck.skipped or struck.fault.kind not in KILLS:
        return record
    disturbing = [
        each.wall
        for each in later
        if each.fault.region == region
        and not each.skipped
        and FAULT_KINDS[each.fault.kind].strikes not in ("link", "pace")
    ]
    until = min(disturbing, default=math.inf)
    # The log's clock has milliseconds.
    since = struck.wall - 0.001
    own = [e for e in events if e.fields.get("region") == region and since <= e.time <= until]
    step = next((event for event in own if event.kind == "first-step"), None)
    if step is None:
        return record
    died = next((event for event in own if event.kind in ("trainer-died", "trainer-exited")), None)
    recovery: dict[str, float] = {}
    if died is not None and died.time <= step.time:
        recovery["detect"] = max(0.0, died.time - struck.wall)
    parts = {"start": "import", "compile": "compile", "fetch": "restore"}
    for name, key in parts.items():
        if step.fields.get(key) is not None:
            recovery[name] = float(step.fields[key])
    recovery["total"] = step.time - struck.wall
    record["recovery"] = {key: round(value, 3) for key, value in recovery.items()}
    return record
