"""What a seed stands for: the run, and everything that goes wrong in it."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random
from typing import Any

import numpy as np

from diloco_cli.core.fragments import Tensor
from diloco_cli.server.settings import ServerSettings
from diloco_cli.spec.schema import RunSpec
from tests.verify.dst.host import Deaths
from tests.verify.dst.network import Weather
from tests.verify.dst.text import LANES

NAMES = ("iowa", "paris", "tokyo")
UNLISTED = ("oslo", "turku")
TENSORS = (Tensor("embed", (6, 4), embedding=True), Tensor("w1", (4, 5)), Tensor("w2", (5, 4)))
TOKENS = 8
"""Of one inner step."""

MEMBERS_SHARE = 3
"""All but one run in so many have regions that join unasked, leave for good, are forgotten, or
removed and added again."""
FORGOTTEN = ("7d", "7d", "30s", "12s")
CALM_SHARE = 8
"""One run in so many has no faults: some promises are only made then."""


@dataclass(frozen=True)
class Blow:
    """Something that happens to a region, or to the server, at a moment."""

    at: float
    kind: str
    region: str = ""
    length: float = 0.0


@dataclass(frozen=True)
class Wish:
    """An amendment that an operator asks for, again and again until it is answered."""

    at: float
    id: str
    set: dict[str, Any] = field(default_factory=dict)
    add: str = ""
    remove: str = ""
    """Regions."""


@dataclass
class Setting:
    seed: int
    spec: RunSpec
    speeds: dict[str, float]
    starts: dict[str, float]
    weather: Weather = field(default_factory=Weather)
    deaths: Deaths = field(default_factory=Deaths)
    blows: list[Blow] = field(default_factory=list)
    wishes: list[Wish] = field(default_factory=list)
    faults_end: float = 0.0
    shuffled: bool = False
    interrupted: float = 0.0
    slow: float = 0.0
    """Seconds that a thread may take."""
    sluggish: float = 0.02
    """Share of the work in threads that takes so long."""
    in_parts: float = 0.0
    poisoned: float = 0.0


def drawn(seed: int) -> Setting:
    """The run of a seed."""
    rng = Random(f"setting {seed}")
    names = NAMES[: rng.choice((1, 2, 2, 3))]
    setting = Setting(
        seed,
        _spec(rng, names),
        speeds={name: rng.choice((0.3, 0.5, 1.0)) for name in names},
        starts={name: rng.uniform(0.1, 3.0) for name in names},
        shuffled=rng.random() < 0.5,
        interrupted=rng.choice((0.0, 0.1, 0.4)),
        in_parts=rng.choice((0.0, 0.0, 0.5, 1.0)),
        slow=rng.choice((0.1, 0.5, 3.0)),
        sluggish=rng.choice((0.02, 0.02, 0.25)),
    )
    if seed % CALM_SHARE:
        _spoil(setting, rng)
    # Drawn apart, so that the faults of a seed stay what they were.
    setting.wishes = _wishes(Random(f"wishes {seed}"), setting)
    if seed % MEMBERS_SHARE:
        _come_and_go(Random(f"members {seed}"), setting)
    return setting


def _come_and_go(rng: Random, setting: Setting) -> None:
    """Draws who joins although no spec lists it, who leaves for good, who is removed and added."""
    names, quorum = tuple(setting.speeds), setting.spec.sync.quorum
    changes = {"admit": "open", "grant": rng.choice((0.0, 4.0)), "forget": rng.choice(FORGOTTEN)}
    server = setting.spec.server.model_copy(update=changes)
    setting.spec = setting.spec.model_copy(update={"server": server})
    end = max(12.0, setting.faults_end)
    joining = [name for name in UNLISTED if rng.random() < 0.6]
    for name in joining:
        setting.speeds[name] = rng.choice((0.3, 0.5, 1.0))
        setting.starts[name] = rng.uniform(1.0, end)
    gone = {blow.region for blow in setting.blows if blow.kind == "leave"}
    # Whoever is left must be enough for a quorum, and there is no telling who comes in time.
    spare = [name for name in names if name not in gone][quorum:]
    for number, name in enumerate([*spare, *joining]):
        kind = rng.choice(("", "", "retire", "remove", "remove"))
        at = rng.uniform(max(2.0, setting.starts[name]), end)
        if kind == "retire":
            setting.blows.append(Blow(at, "retire", name))
        elif kind == "remove":
            setting.wishes.append(Wish(at, f"remove-{number}", remove=name))
            if rng.random() < 0.6:
                back = at + rng.uniform(0.5, 10.0)
                setting.wishes.append(Wish(back, f"add-{number}", add=name))


def _wishes(rng: Random, setting: Setting) -> list[Wish]:
    """Amendments of a run, at moments of their own; in some runs there are none."""
    spec = setting.spec
    choices: dict[str, tuple[Any, ...]] = {
        "outer.lr": (0.1, 0.3, 0.7),
        "outer": ({"kind": "sgd", "lr": 0.5}, {"kind": "nesterov", "lr": 0.4}),
        "merge": ({"kind": "mean"}, {"kind": "radial"}),
        "wire.down": ({"kind": "int4", "block": 256}, {"kind": "fp32"}),
        "wire.up": ({"kind": "int8", "block": 256}, {"kind": "int4", "block": 512}),
        # Never more than the run began with: whoever left for good would be missed.
        "sync.quorum": tuple(range(1, spec.sync.quorum + 1)),
        "sync.every": (spec.sync.every, spec.sync.every + 1),
        "sync.grace": ({"kind": "fixed", "seconds": 1.0}, {"kind": "none"}),
        "budget.tokens": tuple(round(spec.budget.tokens * share) for share in (1.5, 2.5)),
    }
    keys = [*choices, "outer.lr", "outer.lr", "merge"]  # What a version is made by, more often.
    end = max(10.0, setting.faults_end)
    return [
        Wish(rng.uniform(0.5, end), f"wish-{number}", {key: rng.choice(choices[key])})
        for number in range(rng.choice((0, 1, 3, 6)))
        for key in [rng.choice(keys)]
    ]


def swept(step: int, *, power: bool, cut_after: float = 4.0) -> Setting:
    """A small run whose server dies at one step of its disk and, a little later, loses power."""
    rng = Random("swept")
    setting = Setting(
        step,
        _spec(rng, NAMES[:2]),
        speeds={"iowa": 0.3, "paris": 0.3},
        starts={"iowa": 0.2, "paris": 0.3},
        interrupted=0.2,
        slow=0.1,
        faults_end=30.0,
    )
    setting.deaths = Deaths(power=float(power), steps={step}, cut_after=cut_after)
    return setting


def silenced(number: int) -> Setting:
    """A small run without faults, but one region sleeps through its end, `number` s or more."""
    rng = Random("silenced")
    spec = _spec(rng, NAMES[:2])
    alone = spec.sync.model_copy(update={"quorum": 1, "adopt": "rebase"})
    setting = Setting(
        number,
        spec.model_copy(update={"sync": alone}),
        speeds={"iowa": 0.3, "paris": 0.3},
        starts={"iowa": 0.2, "paris": 0.3},
        faults_end=200.0,
    )
    setting.blows = [Blow(6.0, "pause", "paris", float(number))]
    return setting


def _spec(rng: Random, names: tuple[str, ...]) -> RunSpec:
    every = rng.choice((2, 3, 4))
    adopt = rng.choice(("rebase", "rebase", "replace", "blend"))
    return RunSpec.model_validate(
        {
            "spec": 1,
            "name": "trial",
            "budget": {"tokens": TOKENS * every * len(names) * rng.choice((2, 4, 7))},
            "data": {"kind": "python-source", "lanes": LANES},
            "inner": {"batch": 1, "sequence": TOKENS},
            "regions": [{"name": name} for name in names],
            "sync": {
                "fragments": rng.choice((1, 2)),
                "every": every,
                "quorum": rng.randint(1, len(names)),
                "overlap": rng.choice((0, 1, 1)),
                "grace": {"kind": "fixed", "seconds": rng.choice((0.0, 0.5, 2.0))},
                "adopt": adopt,
            },
            "server": {
                "lease": rng.choice((5.0, 8.0)),
                "store": {
                    "kind": "folder",
                    "history": rng.choice((2, 3, 8)),
                    "whole": rng.choice((1, 2, 4, 4)),
                },
            },
        }
    )


def _spoil(setting: Setting, rng: Random) -> None:
    """Draws the faults; each kind is missing from many runs, so that others are seen alone."""
    setting.faults_end = end = rng.uniform(8.0, 30.0)
    often = rng.random() < 0.5
    setting.weather = Weather(
        delay=rng.choice((0.02, 0.05, 0.3)),
        loss=rng.choice((0.0, 0.0, 0.05, 0.2)),
        twice=rng.choice((0.0, 0.0, 0.1, 0.3)),
        cut=rng.choice((0.0, 0.0, 0.1)),
        gone=rng.choice((0.0, 0.0, 0.5)),
    )
    setting.poisoned = rng.choice((0.0, 0.0, 0.0, 0.1))
    if rng.random() < 0.7:
        setting.deaths = Deaths(
            share=rng.choice((0.0, 0.003, 0.01)) if often else 0.0,
            power=rng.choice((0.0, 0.5, 1.0)),
            steps={rng.randrange(1, rng.choice((40, 300))) for _ in range(rng.randint(1, 4))},
        )
    elif rng.random() < 0.4:
        # It dies early in its life, and the power goes early in the next.
        setting.deaths = Deaths(power=0.0, steps={rng.randrange(1, 60)}, cut_after=4.0)
    kinds = ["kill", "power", "power", "term", "full", "failing", "sick", "clock"]
    for _ in range(rng.choice((0, 0, 1, 2, 3))):
        at, length = rng.uniform(0.5, end), rng.uniform(1.0, 8.0)
        setting.blows.append(Blow(at, rng.choice(kinds), length=length))
    theirs = ["restart"] * 3 + ["pause", "cut", "rival", "copy", "restore", "lose", "leave", "stop"]
    for _ in range(rng.choice((0, 1, 3, 6))):
        region, at, length = (
            rng.choice(list(setting.speeds)),
            rng.uniform(1, end),
            rng.uniform(2, 12),
        )
        setting.blows.append(Blow(at, kind := rng.choice(theirs), region, length))
        # Whoever is left must be enough for a quorum, or the run waits for ever, as it should.
        if kind == "leave" and len(setting.speeds) == setting.spec.sync.quorum:
            setting.blows.pop()
        elif kind == "leave":
            theirs = [each for each in theirs if each != "leave"]
    setting.blows.sort(key=lambda blow: blow.at)


def settings_of(spec: RunSpec) -> ServerSettings:
    return ServerSettings.of(spec, TENSORS)


def initial() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(7)
    return {each.name: rng.normal(size=each.shape).astype(np.float32) for each in TENSORS}
