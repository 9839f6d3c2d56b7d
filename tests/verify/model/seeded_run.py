"""Everything that is drawn before a run: its shape, its network, its misfortunes."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from diloco_cli.core.members import MOST_RETIRED
from diloco_cli.spec.schema import GraceSpec, SyncSpec

NAMES = ("iowa", "lima", "paris", "tokyo")
LATE = ("oslo", "turku")
LEASE = 12.0
LONGEST_GAP = 30.0
"""What a restart adds to the allowance clock at most, however far the wall clock was moved."""
FAR = 4.0


@dataclass(frozen=True, slots=True)
class Misfortune:
    at: float
    kind: str
    """pause, cut, leave, lose, copy, restore or rival; remove: by an operator, and added again
    after `length`; clock: the server's wall clock is set forward by `length`, and it restarts."""
    region: str
    length: float = 0.0


@dataclass(frozen=True)
class Setting:
    seed: int
    sync: SyncSpec
    speeds: dict[str, float]
    """Seconds an inner step takes, by region."""
    batch: dict[str, int]
    budget: float
    delay: float = 0.5
    """Mean seconds that a message takes."""
    far: frozenset[str] = frozenset()
    """Regions whose messages take `FAR` seconds."""
    loss: float = 0.0
    twice: float = 0.0
    crash: float = 0.0
    poison: float = 0.0
    """Chance that a step makes every frame containing it unfit."""
    unreadable: float = 0.0
    writing: float = 0.0
    """A post is durable up to this much later than it was taken."""
    checkpoint: int = 8
    quiet: float = 0.0
    """Faults stop here."""
    misfortunes: tuple[Misfortune, ...] = ()
    crash_at: int = 0
    """Counts crash points; 0 for none."""
    calm: bool = False
    late: tuple[tuple[str, float], ...] = ()
    """Regions that come when the run has begun, and when."""
    forget: float = math.inf
    """Silence after which the server retires a region."""
    keeps: int = MOST_RETIRED
    """Retired names of which the server keeps everything."""
    wishes: tuple[tuple[float, dict[str, Any]], ...] = ()
    """Amendments that operators ask for, and when."""
    reopenings: tuple[float, ...] = ()
    """Operators give the run a larger budget so many seconds after an end."""
    lies: Mapping[str, float] = field(default_factory=dict)
    """By region: times what it has done that it claims."""
    unbalanced: frozenset[str] = frozenset()
    """Of these: those whose books say otherwise."""
    phantoms: Mapping[str, float] = field(default_factory=dict)
    """By region: tokens that it says it holds, and does not."""
    mute: bool = False
    """Nobody says how long a step takes."""
    lanes: int = 12
    """Of the text that all regions read; at least one for each."""

    @property
    def regions(self) -> tuple[str, ...]:
        return tuple(self.speeds)


def drawn(seed: int, *, calm: bool = False) -> Setting:
    """Draws a run. A calm one has a slow, reordering network and no faults."""
    rng = random.Random(f"setting {seed}")
    names = NAMES[: rng.randint(1, 4)]
    sync = _sync(rng, len(names))
    batch = {name: rng.choice((4, 8)) for name in names}
    quiet = 0.0 if calm else rng.uniform(60, 220)
    return Setting(
        seed=seed,
        sync=sync,
        speeds={name: rng.choice((1.0, 1.0, 1.3, 2.0, 4.0)) for name in names},
        batch=batch,
        budget=sum(batch.values()) * rng.uniform(25, 90) / (1 if len(names) < 3 else 2),
        delay=rng.choice((0.2, 0.5, 1.0, 2.0, 4.0)),
        far=frozenset(rng.sample(names, 1 if rng.random() < 0.2 else 0)),
        loss=0.0 if calm else rng.choice((0.0, 0.05, 0.15, 0.3)),
        twice=0.0 if calm else rng.choice((0.0, 0.1, 0.3)),
        crash=0.0 if calm else rng.choice((0.0, 0.003, 0.01, 0.02)),
        poison=0.0 if calm else rng.choice((0.0, 0.0, 0.004)),
        unreadable=0.0 if calm else rng.choice((0.0, 0.0, 0.05)),
        writing=rng.choice((0.0, 3.0)),
        checkpoint=rng.randint(3, 20),
        quiet=quiet,
        misfortunes=() if calm else _misfortunes(rng, names, sync.quorum, quiet),
        calm=calm,
        lanes=rng.choice((6, 7, 12)),
    )


def with_members(setting: Setting) -> Setting:
    """The same run with regions that come late, are forgotten, or are removed and added again."""
    rng = random.Random(f"members {setting.seed}")
    names, quorum = setting.regions, setting.sync.quorum
    gone = {blow.region for blow in setting.misfortunes if blow.kind == "leave"}
    until = max(setting.quiet, 120.0)
    late = tuple((name, rng.uniform(5, until)) for name in LATE if rng.random() < 0.4)
    came = [name for name, _ in late]
    removed = []
    # Whoever is left must still make a quorum.
    for name in [*names[quorum + len(gone) :], *came]:
        if name not in gone and rng.random() < 0.3:
            back = rng.choice((0.0, rng.uniform(3, 40)))
            removed.append(Misfortune(rng.uniform(5, until), "remove", name, back))
    blows = sorted([*setting.misfortunes, *removed], key=lambda event: event.at)
    return replace(
        setting,
        speeds={**setting.speeds, **{name: rng.choice((1.0, 1.3, 2.0)) for name in came}},
        batch={**setting.batch, **{name: rng.choice((4, 8)) for name in came}},
        misfortunes=tuple(blows),
        late=late,
        forget=rng.choice((math.inf, rng.uniform(14, 60))),
        keeps=rng.choice((MOST_RETIRED, MOST_RETIRED, 0, 1)),
    )


def with_claims(setting: Setting) -> Setting:
    """The same run with a region that claims too much, and a wall clock that jumps."""
    rng = random.Random(f"claims {setting.seed}")
    liar = setting.regions[-1]
    # Nothing is accepted of one whose books disagree: the others must make a quorum.
    first = len([name for name in setting.regions if name not in dict(setting.late)])
    gone = sum(blow.kind in ("leave", "remove") for blow in setting.misfortunes)
    spare = first - (liar not in dict(setting.late)) - gone >= setting.sync.quorum
    jumps = [
        Misfortune(rng.uniform(5, 100), "clock", liar, rng.choice((-100.0, 50.0, 1e6)))
        for _ in range(rng.choice((0, 1, 3)))
    ]
    blows = sorted([*setting.misfortunes, *jumps], key=lambda event: event.at)
    return replace(
        setting,
        lies={liar: rng.choice((2.0, 100.0, 1e6))},
        unbalanced=frozenset({liar} if spare and rng.random() < 0.5 else ()),
        misfortunes=tuple(blows),
    )


def _sync(rng: random.Random, regions: int) -> SyncSpec:
    grace = rng.choice(
        (
            GraceSpec(),
            GraceSpec(),
            GraceSpec(kind="none"),
            GraceSpec(kind="fixed", seconds=rng.uniform(0.5, 6)),
        )
    )
    return SyncSpec(
        fragments=rng.randint(1, 3),
        every=rng.randint(2, 8),
        overlap=rng.choice((0, 2, 2)),
        quorum=rng.randint(1, regions),
        grace=grace,
        staleness=rng.randint(0, 3),
        adopt=rng.choice(("rebase", "rebase", "replace", "blend")),
    )


def _misfortunes(
    rng: random.Random, names: tuple[str, ...], quorum: int, quiet: float
) -> tuple[Misfortune, ...]:
    def somewhere() -> tuple[float, str]:
        return rng.uniform(5, quiet), rng.choice(names)

    found: list[Misfortune] = []
    for kind, chance in (("pause", 0.5), ("cut", 0.4), ("lose", 0.15), ("rival", 0.25)):
        while rng.random() < chance:
            at, region = somewhere()
            found.append(Misfortune(at, kind, region, rng.uniform(5, 60)))
    if rng.random() < 0.2:
        at, region = somewhere()
        found.append(Misfortune(at, "copy", region))
        found.append(Misfortune(rng.uniform(at, quiet + 1), "restore", region))
    # Whoever is left must still make a quorum: a run that cannot is not asked to finish.
    for region in rng.sample(names, len(names) - quorum):
        if rng.random() < 0.25:
            found.append(Misfortune(rng.uniform(5, quiet), "leave", region))
    return tuple(sorted(found, key=lambda event: event.at))


def fixed(name: str, crash_at: int = 0) -> Setting:
    """One of a few small schedules, in each of which every crash point is tried."""
    sync = {
        "rebase": SyncSpec(fragments=2, every=4, quorum=1),
        "quorum of two": SyncSpec(fragments=2, every=4, quorum=2),
        "replace": SyncSpec(fragments=2, every=4, quorum=1, adopt="replace", staleness=1),
        "waiting": SyncSpec(fragments=1, every=3, quorum=2, overlap=0),
        "blend": SyncSpec(fragments=1, every=4, quorum=1, adopt="blend", staleness=2),
        "members": SyncSpec(fragments=2, every=4, quorum=1),
    }[name]
    setting = Setting(
        seed=len(name),
        sync=sync,
        speeds={"iowa": 1.0, "paris": 1.6},
        batch={"iowa": 8, "paris": 4},
        budget=360.0,
        delay=0.6,
        loss=0.05,
        twice=0.1,
        writing=1.5,
        checkpoint=5,
        quiet=60.0,
        crash_at=crash_at,
    )
    if name != "members":
        return setting
    cut, removed = Misfortune(12, "cut", "paris", 30), Misfortune(25, "remove", "oslo", 10)
    return replace(
        setting,
        speeds={**setting.speeds, "oslo": 1.0},
        batch={**setting.batch, "oslo": 4},
        late=(("oslo", 8.0),),
        forget=16.0,
        misfortunes=(cut, removed),
    )


SCHEDULES = ("rebase", "quorum of two", "replace", "waiting", "blend", "members")
