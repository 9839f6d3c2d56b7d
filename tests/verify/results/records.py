"""Reads chaos.json files, and says which of them may stand side by side."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ORDER = ("rigid", "elastic", "synchronous", "streaming", "decoupled")
NAMES = {
    "rigid": "data parallel, rigid",
    "elastic": "data parallel, elastic",
    "synchronous": "DiLoCo, synchronous",
    "streaming": "DiLoCo, streaming",
    "decoupled": "DiLoCo, decoupled",
}
KILLS = ("kill-trainer", "kill-region")


@dataclass(frozen=True)
class Record:
    """One run under faults."""

    path: Path
    said: dict[str, Any]

    @staticmethod
    def load(path: Path) -> Record:
        return Record(path, json.loads(path.read_text()))

    @property
    def method(self) -> str:
        return self.said["method"]

    @property
    def label(self) -> str:
        return NAMES.get(self.method, self.method)

    @property
    def schedule(self) -> tuple[tuple[float, str, str], ...]:
        """What was to happen, whoever it happened to."""
        faults = self.said["faults"]
        return tuple((one["time"], one["kind"], one.get("region", "")) for one in faults)

    @property
    def kills(self) -> int:
        """Kills that hit somebody."""
        hits = [one for one in self.said["faults"] if one["kind"] in KILLS]
        return sum("skipped" not in one for one in hits)

    @property
    def kills_an_hour(self) -> float:
        scheduled = sum(kind in KILLS for _, kind, _ in self.schedule)
        return scheduled / self.said["seconds"] * 3600

    @property
    def curve(self) -> list[tuple[float, float]]:
        """Seconds and held-out loss."""
        return [(at, loss) for _, loss, at in self.said["loss"]["curve"]]

    @property
    def name(self) -> str:
        return self.path.parent.name if self.path.name == "chaos.json" else self.path.stem


def read(paths: Iterable[Path]) -> list[Record]:
    return sorted(
        map(Record.load, paths), key=lambda one: (-one.kills_an_hour, ORDER.index(one.method))
    )


def by_schedule(records: Sequence[Record]) -> list[list[Record]]:
    """Groups runs that were given the same faults, the hardest first."""
    groups: dict[Any, list[Record]] = {}
    for one in records:
        groups.setdefault((one.schedule, one.said["regions"]), []).append(one)
    return list(groups.values())


def reached(curve: Sequence[tuple[float, float]], loss: float) -> float | None:
    """Says when a curve first comes down to a loss, between its points in a straight line."""
    for number, (at, now) in enumerate(curve):
        if now <= loss:
            if number == 0:
                return at
            before, high = curve[number - 1]
            return before + (at - before) * (high - loss) / (high - now)
    return None


def keep(records: Iterable[Record], folder: Path) -> None:
    """Copies the records to where the page's readers find them."""
    folder.mkdir(parents=True, exist_ok=True)
    for one in records:
        shutil.copyfile(one.path, folder / f"{one.name}.json")
