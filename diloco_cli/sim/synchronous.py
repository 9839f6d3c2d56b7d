"""What would one synchronous job make of the same faults? The two usual answers.

    rigid     any failure stops everybody until the lost part is back, and throws the whole
              job back to its last checkpoint
    elastic   everybody stops until the failure is noticed; then the others go on without
              the lost part, which joins again when it is back

Gradients are reduced over the slowest link at every step, in bf16, during the backward pass.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from diloco_cli.sim.overlap import Buckets, bucket_utilisation
from diloco_cli.sim.scenario import Scenario
from diloco_cli.spec.fault_kinds import FAULT_KINDS

Seconds = float


@dataclass(frozen=True, slots=True)
class Synchronous:
    step: Seconds
    """With the reduction, without a fault."""
    goodput: float
    """Tokens ÷ what the same regions would train alone, without links and faults."""
    uptime: float


def synchronous(scenario: Scenario, *, elastic: bool) -> Synchronous:
    """Simulates the scenario's faults on one job of all its regions."""
    step = _step(scenario)
    recovery, whole = scenario.recovery, len(scenario.sites)
    back = recovery.detect + recovery.restart
    still: Seconds = 0.0
    """Time in which nobody trains."""
    missing: Seconds = 0.0
    """Time of single regions that the others trained without."""
    resumes: Seconds = 0.0
    saved: Seconds = 0.0
    for fault in scenario.faults:
        unaffected = FAULT_KINDS[fault.kind].strikes in ("server", "pace")
        if unaffected or fault.time >= scenario.duration:
            continue
        away = back if fault.duration is None else fault.duration
        stop = min(away, recovery.detect) if elastic else away
        if elastic:
            missing += min(away - stop, scenario.duration - fault.time)
        elif fault.kind != "cut" and fault.time >= resumes:
            since = fault.time - max(saved, resumes)
            kept = since % recovery.checkpoint if math.isfinite(recovery.checkpoint) else since
            stop += min(since, kept)
            saved = fault.time
        begins = max(fault.time, resumes)
        resumes = max(resumes, min(fault.time + stop, scenario.duration))
        still += max(0.0, resumes - begins)
    share = max(0.0, 1 - still / scenario.duration)
    alone = sum(site.tokens / site.step for site in scenario.sites)
    together = sum(site.tokens for site in scenario.sites) / step
    present = max(0.0, 1 - missing / (whole * scenario.duration))
    return Synchronous(step, share * present * together / alone, share)


def _step(scenario: Scenario) -> Seconds:
    slowest = max(site.step for site in scenario.sites)
    rate = min(site.link.rate for site in scenario.sites)
    if math.isinf(rate) or len(scenario.sites) < 2:
        return slowest
    job = Buckets(scenario.parameters, slowest, len(scenario.sites))
    return slowest / bucket_utilisation(job, rate, steps=50)
