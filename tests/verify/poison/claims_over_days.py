"""Days of claims in seconds: what counts of honest work, and what of lies?

The real rules and records, on a virtual clock: regions of different speeds that join late, are
away for a day or upgraded in mid-run, a server that restarts with clocks that jump, and one
region that may claim up to 10^9 steps in a frame.

    python -m tests.verify.poison.claims_over_days --runs 400 --days 3
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from diloco_cli.core.claims import Allowance, ClaimTerms
from diloco_cli.core.journal_records import FrameDecided, RegionJoined, RegionPaced, TermsAmended
from diloco_cli.core.ledger import Ledger
from diloco_cli.core.rounds import Receipt

DAY = 86400.0
CAP = 720.0
"""Of rounds that are called after 240 steps."""
LIES = (1e4, 1e6, 1e9)


@dataclass(frozen=True, slots=True)
class Share:
    """How one region came out."""

    kind: str
    """honest, upgraded, liar from the first frame, liar with a pace on record."""
    counted: float
    """Times the steps that it really made."""
    against: float
    """Times the others' median speed, over the time since it joined."""


class Records:
    """A server that does nothing but judge."""

    def __init__(self) -> None:
        self.ledger, self.number, self.clock, self.at, self.wall = Ledger.empty(1), 0, 0, 0.0, 0.0
        self.reported: dict[str, float] = {}

    def record(self, record: RegionJoined | FrameDecided | RegionPaced | TermsAmended) -> None:
        self.number += 1
        self.ledger.apply(self.number, record)

    def allowance(self) -> Allowance:
        terms = ClaimTerms(CAP, lambda region: 1.0, reported=self.reported)
        return Allowance([self.ledger.slots[0].claims], self.ledger.paces, terms, at=self.at)

    def join(self, region: str) -> None:
        self.record(RegionJoined(region, region, 1, 1, at=self.at, time=self.wall))

    def claim(self, region: str, steps: float) -> float:
        self.clock += 1
        receipt = Receipt(region, 0, 0, self.clock, str(self.clock), "", steps, steps)
        verdict = self.allowance().judge(receipt)
        about = {"at": self.at, "counted": verdict.counted, "credit": verdict.credit}
        self.record(FrameDecided(receipt, "pending", **about, time=self.wall))
        if pace := self.allowance().learnt(region):
            self.record(RegionPaced(region, pace, self.at, CAP, time=self.wall))
        return verdict.counted.steps

    def repace(self, region: str) -> None:
        number = self.ledger.terms + 1
        self.record(TermsAmended(number, str(number), repace=(region,), at=self.at, time=self.wall))


class Run:
    """One drawn run."""

    def __init__(self, seed: int, days: float) -> None:
        self.rng = rng = Random(f"claims {seed}")
        self.end = days * DAY
        names = [f"r{number}" for number in range(rng.randint(2, 6))]
        self.speed = {name: rng.choice((0.5, 1.0, 1.0, 2.0, 4.0)) for name in names}
        self.liar = rng.choice(("", "r0", "r0"))
        self.lies_after = rng.choice((0.0, self.end / 3)) if self.liar else self.end
        self.joins = {name: rng.choice((0.0, 0.0, 0.0, 3600.0, 20000.0)) for name in names}
        self.joins["r1"] = 0.0
        self.compiles = {name: rng.choice((0.0, 60.0, 1200.0)) for name in names}
        self.away = {name: self._absence() if rng.random() < 0.3 else (0.0, 0.0) for name in names}
        self.faster = {
            name: (rng.uniform(0.1, 0.5) * self.end, rng.choice((2.0, 4.0)))
            for name in names
            if name != self.liar and rng.random() < 0.25
        }
        self.period = rng.uniform(20, 120)
        self.begins: dict[str, float] = {}
        """When regions that have joined make their first step."""

    def _absence(self) -> tuple[float, float]:
        began = self.rng.uniform(0.1, 0.4) * self.end
        return began, began + self.rng.uniform(0.1, 0.4) * self.end

    def play(self) -> list[Share]:
        rng, records = self.rng, Records()
        made, held, counted = (dict.fromkeys(self.speed, 0.0) for _ in range(3))
        wall, gap, down_until, repaced = 0.0, 0.0, 0.0, set[str]()
        while wall < self.end:
            passed = self.period * rng.uniform(0.5, 1.5)
            wall += passed
            for name in self.speed:
                steps = self._pace(name, wall) * passed
                held[name] += steps
                made[name] += steps
            if wall < down_until:
                continue
            if down_until:
                jump = rng.choice((0.0, 0.0, 0.0, -3600.0, 7200.0))
                records.wall += gap + jump
                records.at = records.ledger.allowance.restarted(records.wall)
                down_until = 0.0
            else:
                records.at, records.wall = records.at + passed, records.wall + passed
            if rng.random() < 0.0008:
                gap = rng.choice((60.0, 3600.0, 20000.0))
                down_until = wall + gap
                continue
            for name in self.speed:
                if wall < self.joins[name] or self.away[name][0] < wall < self.away[name][1]:
                    continue
                self._join(records, name, wall)
                since, _ = self.faster.get(name, (self.end, 1.0))
                if wall > since + 3600 and name not in repaced:
                    repaced.add(name)
                    records.repace(name)
                pace = self._pace(name, wall)
                if pace:
                    records.reported[name] = 1e9 if name == self.liar else pace
                lying = name == self.liar and wall > self.lies_after
                claim = rng.choice(LIES) if lying else held[name]
                if claim >= 1 and rng.random() < 0.8:
                    counted[name] += records.claim(name, claim)
                    held[name] = 0.0
        return [self._share(name, made[name], counted[name]) for name in self.speed]

    def _join(self, records: Records, name: str, wall: float) -> None:
        """Before a region has joined it has no weights to train."""
        if name not in self.begins:
            records.join(name)
            self.begins[name] = wall + self.compiles[name]

    def _pace(self, name: str, wall: float) -> float:
        if wall < self.begins.get(name, self.end + 1):
            return 0.0
        since, factor = self.faster.get(name, (self.end, 1.0))
        return self.speed[name] * (factor if wall > since else 1.0)

    def _share(self, name: str, made: float, counted: float) -> Share:
        kind = "upgraded" if name in self.faster else "honest"
        if name == self.liar:
            kind = "liar, later" if self.lies_after else "liar, at once"
        usual = statistics.median(self._pace(one, self.end) for one in self.speed if one != name)
        lasted = self.end - self.joins[name]
        return Share(kind, counted / max(1.0, made), counted / (usual * lasted))


def summary(shares: Sequence[Share]) -> dict[str, dict[str, float]]:
    """By kind of region: quantiles of what counted."""
    table = {}
    for kind in sorted({share.kind for share in shares}):
        found = sorted(share.counted for share in shares if share.kind == kind)
        table[kind] = {
            "regions": len(found),
            "least": round(found[0], 3),
            "1 %": round(found[len(found) // 100], 3),
            "median": round(statistics.median(found), 3),
            "most": round(found[-1], 3),
            "most, of the others' pace": round(
                max(share.against for share in shares if share.kind == kind), 3
            ),
        }
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runs", type=int, default=400)
    parser.add_argument("--days", type=float, default=3.0)
    asked = parser.parse_args()
    shares = [share for seed in range(asked.runs) for share in Run(seed, asked.days).play()]
    for kind, figures in summary(shares).items():
        print(json.dumps({"region": kind, **figures}))


if __name__ == "__main__":
    main()
