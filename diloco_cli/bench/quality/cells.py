"""Which ways to synchronise are compared, and what is hoped for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Settings = tuple[tuple[str, Any], ...]


@dataclass(frozen=True)
class Cell:
    """One way to train; whatever it leaves out is the spec's default."""

    name: str
    regions: int
    """0: data parallel, every step of all regions together."""
    settings: Settings = ()
    """Keys of the spec, as in `--set`, with their values."""
    against: str = ""
    """The cell that it is compared with."""
    speeds: tuple[float, ...] = ()
    jitter: float = 0.0
    """Standard deviation of a step's time, as a share of it."""
    travel: float = 2.0
    """Inner steps from a frame's post to the new version's arrival."""
    kills: float = 0.0
    """SIGKILLs of trainers an hour, all regions together, at four steps per second."""
    lockstep: bool = False
    """Every region makes `every` steps and waits, as DiLoCo was first published."""
    absence: tuple[float, float] | None = None
    """Between these shares of the run something has happened to the last region."""
    struck: Literal["cut", "leave", "kill-trainer", "kill-region"] = "cut"
    """It trains on and cannot be reached; or it stands still and comes back as it was, from its
    disk, or without one, and goes on with the newest weights."""
    turns: float = 0.0
    """The last two regions are there in turns, each for this share of the run: compute that comes
    and goes. 0: everybody is there all the time."""
    slower: float = 0.0
    """How many times slower data parallel, which sends 16 bits per parameter each step, is on the
    lines than it computes; 0: the lines carry everything at once."""
    told: bool = True
    """The spec knows the speeds."""


@dataclass(frozen=True)
class QualityGoal:
    """A figure of a cell is at most, or for goodput at least, so many times another's."""

    cell: str
    against: str
    limit: float
    figure: Literal["loss", "goodput"] = "loss"

    @property
    def unit(self) -> str:
        return "nats" if self.figure == "loss" else "of full speed"


PARALLEL = "data parallel"
HASTY: Settings = (("outer.kind", "nesterov"), ("outer.lr", 0.7), ("outer.momentum", 0.6))
"""The outer optimiser for a run of some tens of rounds."""
MIXED = (1.0, 1.0, 0.8, 0.25)
HALF = (1.0,) * 4 + (1 / 1.18,) * 4
"""Half of the regions 18 % slower, as in the paper's comparison of two generations of chips."""
SYNCHRONOUS: Settings = (
    ("sync.overlap", 0),
    ("sync.fragments", 1),
    ("sync.grace.kind", "none"),
)
CUT = (0.2, 0.7)
DISK = (0.75, 0.76)
"""A region is killed here, and back so much later."""
TURNS = 0.1
MUON: Settings = (("inner.optimizer.kind", "muon"),)
DROPPED: Settings = (("sync.adopt", "replace"),)
"""Whoever comes back gives up what it did alone."""
FP32 = {"kind": "fp32"}
UP = ("int8", "int4", "uniform", "sparse")

GOALS = (
    QualityGoal("regions 2", PARALLEL, 1.007),
    QualityGoal("regions 4", PARALLEL, 1.020),
    QualityGoal("regions 8", PARALLEL, 1.039),
    QualityGoal("kills 125 an hour", "regions 8", 1.005),
    QualityGoal("mixed, quorum 1, grace", "mixed, synchronous", 1.15, "goodput"),
    QualityGoal("mixed, quorum 1, grace", "mixed, quorum all", 1.0),
    QualityGoal("mixed, quorum 1, grace", "mixed, quorum 1, no grace", 1.0),
    QualityGoal("half slower, quorum 1, grace", "half slower, synchronous", 1.15, "goodput"),
    QualityGoal("half slower, quorum 1, grace", "half slower, quorum all", 1.0),
    QualityGoal("half slower, quorum 1, grace", "half slower, quorum 1, no grace", 1.0),
)


def table() -> list[Cell]:
    """Every cell of the table, the ones that most depends on first."""
    return [
        Cell(PARALLEL, 0),
        *(Cell(f"regions {count}", count, against=PARALLEL) for count in (1, 2, 4, 8)),
        *_speeds("mixed", MIXED),
        Cell("kills 125 an hour", 8, against="regions 8", kills=125.0),
        *(_merging(count, "mean", (("merge.kind", "mean"),)) for count in (2, 4, 8)),
        *(_merging(count, "outer 0.7, 0.6", HASTY) for count in (2, 8)),
        *_adopting(),
        *_wires(),
        *_speeds("half slower", HALF, jitter=0.1),
        Cell("kills 324 an hour", 8, against="regions 8", kills=324.0),
        Cell("cut off from 20 to 70 %", 4, against="regions 4", absence=CUT),
        Cell("cut off, its work dropped", 4, DROPPED, against="regions 4", absence=CUT),
        Cell("mixed, unknown", 4, against="regions 4", speeds=MIXED, told=False),
        Cell("disk lost at 75 %", 4, against="regions 4", absence=DISK, struck="kill-region"),
        Cell("two of four in turns", 4, against="regions 4", turns=TURNS),
        Cell("data parallel, muon", 0, MUON, against=PARALLEL),
        Cell("regions 8, muon", 8, MUON, against=PARALLEL),
    ]


def _merging(count: int, name: str, settings: Settings) -> Cell:
    return Cell(f"regions {count}, {name}", count, settings, against=f"regions {count}")


def _adopting() -> list[Cell]:
    four = "regions 4"
    return [
        Cell("adopt replace", 4, (("sync.adopt", "replace"),), against=four),
        Cell("adopt blend", 4, (("sync.adopt", "blend"),), against=four),
        Cell("overlap 0", 4, (("sync.overlap", 0),), against=four),
        Cell("overlap 5", 4, (("sync.overlap", 5),), against=four, travel=5.0),
        Cell(
            "overlap 5, replace",
            4,
            (("sync.overlap", 5), ("sync.adopt", "replace")),
            against=four,
            travel=5.0,
        ),
    ]


def _wires() -> list[Cell]:
    both: Settings = (("wire.up", FP32), ("wire.down", FP32))
    cells = [Cell("fp32 up and down", 4, both, against="regions 4")]
    for kind in UP:
        up: Settings = (("wire.up", {"kind": kind}), ("wire.down", FP32))
        cells.append(Cell(f"{kind} up, fp32 down", 4, up, against="fp32 up and down"))
    for kind in UP:
        down: Settings = (("wire.up", FP32), ("wire.down", {"kind": kind}))
        cells.append(Cell(f"fp32 up, {kind} down", 4, down, against="fp32 up and down"))
    return cells


def _speeds(name: str, speeds: tuple[float, ...], jitter: float = 0.0) -> list[Cell]:
    everybody: Settings = (("sync.quorum", len(speeds)),)
    ways: list[tuple[str, Settings, bool]] = [
        ("quorum 1, grace", (), False),
        ("quorum 1, no grace", (("sync.grace.kind", "none"),), False),
        ("quorum all", (*everybody, ("sync.grace.kind", "none")), False),
        ("synchronous", (*everybody, *SYNCHRONOUS), True),
    ]
    return [
        Cell(
            f"{name}, {way}",
            len(speeds),
            settings,
            against=f"{name}, quorum 1, grace" if number else f"regions {len(speeds)}",
            speeds=speeds,
            jitter=jitter,
            lockstep=lockstep,
        )
        for number, (way, settings, lockstep) in enumerate(ways)
    ]
