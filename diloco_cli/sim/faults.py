"""What goes wrong, when, and for how long?

A schedule is a list of faults on the run's clock. It is drawn from a law (exponential,
Weibull), or read from a file that somebody recorded, and whoever inflicts it, a rehearsal
or a real run, reads the same file:

    {"faults": [{"time": 12.5, "kind": "kill-trainer", "region": "paris"},
                {"time": 40, "kind": "cut", "region": "tokyo", "duration": 20}]}

Randomness comes from the seed alone: the same law and seed give the same schedule.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

from diloco_cli.errors import SpecError
from diloco_cli.registry import nearest

Seconds = float
Kind = Literal["kill-trainer", "kill-region", "kill-server", "cut", "slow"]
KINDS = get_args(Kind)
LASTING = ("cut", "slow")
"""Kinds that end by themselves and so need a duration."""
EXAMPLE = '{"faults": [{"time": 12.5, "kind": "kill-trainer", "region": "paris"}]}'


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that goes wrong.

    kill-trainer   the training process dies; its agent keeps the lease and starts it again
    kill-region    the whole host dies; the lease lapses
    kill-server    the server dies; regions train on
    cut            nothing passes between the region and the server
    slow           inner steps take `factor` times as long
    """

    time: Seconds
    kind: Kind
    region: str = ""
    """Empty for the server."""
    duration: Seconds | None = None
    """None: as long as it takes to come back."""
    factor: float = 1.0

    def as_record(self) -> dict[str, Any]:
        record: dict[str, Any] = {"time": self.time, "kind": self.kind}
        if self.region:
            record["region"] = self.region
        if self.duration is not None:
            record["duration"] = self.duration
        if self.kind == "slow":
            record["factor"] = self.factor
        return record


@dataclass(frozen=True, slots=True)
class Law:
    """How long until the next failure of one region."""

    mean: Seconds
    shape: float = 1.0
    """Weibull's; 1 is the exponential law, below it failures come in clusters."""

    def __post_init__(self) -> None:
        if not self.mean > 0 or not self.shape > 0:
            raise ValueError(f"mean {self.mean:g} s and shape {self.shape:g} must be above 0")

    def draw(self, chance: random.Random) -> Seconds:
        if self.shape == 1.0:
            return chance.expovariate(1.0 / self.mean)
        scale = self.mean / math.gamma(1.0 + 1.0 / self.shape)
        return chance.weibullvariate(scale, self.shape)


def drawn(
    law: Law,
    regions: Sequence[str],
    *,
    until: Seconds,
    seed: int,
    kind: Kind = "kill-trainer",
    duration: Seconds | None = None,
) -> list[Fault]:
    """Draws every region's failures until a moment; each region has its own stream."""
    if not math.isfinite(law.mean):
        return []
    found = []
    for region in regions or [""]:
        chance = random.Random(f"{seed} {kind} {region}")
        now = law.draw(chance)
        while now < until:
            found.append(Fault(now, kind, region, duration))
            now += law.draw(chance)
    return in_order(found)


def in_order(faults: Iterable[Fault]) -> list[Fault]:
    return sorted(faults, key=lambda fault: (fault.time, fault.region, fault.kind))


def save(faults: Iterable[Fault], file: Path) -> None:
    records = [fault.as_record() for fault in in_order(faults)]
    lines = ",\n  ".join(json.dumps(record) for record in records)
    file.write_text(f'{{"faults": [\n  {lines}\n]}}\n' if lines else '{"faults": []}\n')


def load(file: Path, regions: Sequence[str]) -> list[Fault]:
    """Reads a recorded schedule, or says which of its lines cannot be."""
    try:
        data = json.loads(file.read_text())
    except OSError as error:
        raise SpecError(f"{file} cannot be read: {error.strerror}.") from None
    except ValueError as error:
        raise SpecError(f"{file} is no JSON: {error}.", hint=f"Write {EXAMPLE}") from None
    records = data.get("faults") if isinstance(data, dict) else data
    if not isinstance(records, list):
        raise SpecError(f"{file} holds no list of faults.", hint=f"Write {EXAMPLE}")
    return in_order(
        _fault(record, f"{file}, fault {number}", regions)
        for number, record in enumerate(records, 1)
    )


def _fault(record: Any, where: str, regions: Sequence[str]) -> Fault:
    if not isinstance(record, dict):
        raise SpecError(f"{where} is {record!r}, not a fault.", hint=f"Write {EXAMPLE}")
    if unknown := set(record) - {"time", "kind", "region", "duration", "factor"}:
        raise SpecError(f"{where} has keys nobody knows: {', '.join(sorted(unknown))}.")
    kind: Any = record.get("kind")
    if kind not in KINDS:
        raise SpecError(f"{where} is of kind {kind!r}.", hint=nearest(str(kind), KINDS, "Kinds"))
    region = record.get("region", "")
    if (kind == "kill-server") == bool(region) or (region and region not in regions):
        known = ", ".join(regions[:8])
        raise SpecError(
            f"{where} strikes region {region!r}.",
            hint=f"The server has no region; everything else strikes one of {known}.",
        )
    numbers = {
        key: _number(record[key], f"{where}, {key}")
        for key in ("time", "duration", "factor")
        if record.get(key) is not None
    }
    if "time" not in numbers or (kind in LASTING and "duration" not in numbers):
        raise SpecError(f"{where} does not say when it begins or how long it lasts.")
    if kind == "slow" and not numbers.get("factor", 1.0) > 0:
        raise SpecError(f"{where}: a factor of 0 would make steps that take no time.")
    return Fault(kind=kind, region=region, **numbers)


def _number(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise SpecError(f"{where} is {value!r}, not a number of 0 or more.")
    return float(value)
