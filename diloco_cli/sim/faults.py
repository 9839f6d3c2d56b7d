"""What goes wrong, when, and for how long?

A schedule is a list of faults on the run's clock. It is drawn from a law (exponential,
Weibull) or read from a file; simulated and real runs read the same file:

    {"faults": [{"time": 12.5, "kind": "kill-trainer", "region": "paris"},
                {"time": 40, "kind": "cut", "region": "tokyo", "duration": 20}]}

Randomness comes from the seed alone: the same law and seed give the same schedule.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NotRequired, TypedDict

from diloco_cli.errors import SpecError
from diloco_cli.sim.network import parse_link
from diloco_cli.spec.fault_kinds import FAULT_KINDS, Kind
from diloco_cli.spec.schema import ChaosSpec, FaultSpec
from diloco_cli.validation import nearest

Seconds = float
EXAMPLE = '{"faults": [{"time": 12.5, "kind": "kill-trainer", "region": "paris"}]}'


class FaultRecord(TypedDict):
    """A fault as JSON."""

    time: Seconds
    kind: Kind
    region: NotRequired[str]
    duration: NotRequired[Seconds]
    factor: NotRequired[float]
    link: NotRequired[str]


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that goes wrong; spec/fault_kinds.py says what each kind does."""

    time: Seconds
    kind: Kind
    region: str = ""
    """Empty for the server."""
    duration: Seconds | None = None
    """None: as long as it takes to come back."""
    factor: float = 1.0
    link: str = ""

    def as_record(self) -> FaultRecord:
        record: FaultRecord = {"time": self.time, "kind": self.kind}
        if self.region:
            record["region"] = self.region
        if self.duration is not None:
            record["duration"] = self.duration
        if FAULT_KINDS[self.kind].key == "factor":
            record["factor"] = self.factor
        if self.link:
            record["link"] = self.link
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
    seed: int | str,
    kind: Kind = "kill-trainer",
    duration: Seconds | None = None,
) -> list[Fault]:
    """Draws every region's failures until a moment; each region has its own stream."""
    if not math.isfinite(law.mean):
        return []
    faults = []
    for region in regions or [""]:
        chance = random.Random(f"{seed} {kind} {region}")
        now = law.draw(chance)
        while now < until:
            faults.append(Fault(now, kind, region, duration))
            now += law.draw(chance)
    return in_order(faults)


def planned(chaos: ChaosSpec, regions: Sequence[str]) -> list[Fault]:
    """Draws the whole schedule of a spec; each of its entries has streams of its own."""
    faults: list[Fault] = []
    for number, entry in enumerate(chaos.faults):
        seed = f"{chaos.seed}.{number}"
        at_random = entry.per_hour is not None
        faults += _drawn(entry, regions, chaos.seconds, seed) if at_random else []
        faults += [] if at_random else _periodic(entry, regions, chaos.seconds, seed)
    return in_order(faults)


def _drawn(entry: FaultSpec, regions: Sequence[str], until: Seconds, seed: str) -> Iterable[Fault]:
    assert entry.per_hour is not None
    struck = () if _on_server(entry.kind) else (entry.region,) if entry.region else regions
    law = Law(3600.0 * max(1, len(struck)) / entry.per_hour, entry.shape or 1.0)
    for fault in drawn(law, struck, until=until, seed=seed, kind=entry.kind):
        yield _like(entry, fault.time, fault.region)


def _periodic(
    entry: FaultSpec, regions: Sequence[str], until: Seconds, seed: str
) -> Iterable[Fault]:
    chance = random.Random(f"{seed} {entry.kind}")
    now = entry.every if entry.at is None else entry.at
    while now is not None and now < until:
        region = entry.region or ("" if _on_server(entry.kind) else chance.choice(regions))
        yield _like(entry, now, region)
        now = now + entry.every if entry.every else None


def _on_server(kind: Kind) -> bool:
    return FAULT_KINDS[kind].strikes == "server"


def _like(entry: FaultSpec, time: Seconds, region: str) -> Fault:
    # As it is read again from a file: numbers with more digits than that mean nothing.
    time = round(time, 3)
    return Fault(time, entry.kind, region, entry.duration, entry.factor or 1.0, entry.link or "")


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
    if unknown := set(record) - {f.name for f in fields(Fault)}:
        raise SpecError(f"{where} has unknown keys: {', '.join(sorted(unknown))}.")
    kind: Any = record.get("kind")
    if kind not in FAULT_KINDS:
        hint = nearest(str(kind), list(FAULT_KINDS), "Kinds")
        raise SpecError(f"{where} is of kind {kind!r}.", hint=hint)
    row = FAULT_KINDS[kind]
    region = record.get("region", "")
    if (row.strikes == "server") == bool(region) or (region and region not in regions):
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
    if "time" not in numbers or (row.duration == "required" and "duration" not in numbers):
        raise SpecError(f"{where} does not say when it begins or how long it lasts.")
    if row.key == "factor" and not numbers.get("factor", 1.0) > 0:
        raise SpecError(f"{where}: a factor of 0 would make steps that take no time.")
    link = str(record.get("link", ""))
    if (row.key == "link") != bool(link):
        raise SpecError(f"{where}: a narrow needs a link, as in 1Mbit/200ms; nothing else does.")
    if link:
        parse_link(link)
    return Fault(kind=kind, region=region, link=link, **numbers)


def _number(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise SpecError(f"{where} is {value!r}, not a number of 0 or more.")
    return float(value)
