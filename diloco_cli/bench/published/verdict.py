"""A rehearsal's answer: a table, what the literature says in the same cells, and goals."""

from __future__ import annotations

import math
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class PublishedGoal:
    name: str
    value: float
    bound: float
    lower: bool = False
    """Whether less is better."""
    unit: str = ""

    @property
    def met(self) -> bool:
        return self.value <= self.bound if self.lower else self.value >= self.bound

    @property
    def limit(self) -> str:
        return f"{'≤' if self.lower else '≥'} {self.bound:g}"

    def as_data(self) -> dict[str, object]:
        value = self.value if math.isfinite(self.value) else None
        shown = {"name": self.name, "value": value, "unit": self.unit}
        return {**shown, "goal": self.limit, "met": self.met}


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a preset found."""

    name: str
    about: str
    columns: tuple[str, ...]
    rows: dict[str, list[float]]
    paper: dict[str, list[float]] = field(default_factory=dict)
    """The published cells; rows may be missing."""
    goals: tuple[PublishedGoal, ...] = ()
    misses: tuple[str, ...] = ()
    assumptions: tuple[str, ...] = ()
    """All that was chosen; what was fitted says so."""

    @property
    def met(self) -> bool:
        return all(goal.met for goal in self.goals)

    def as_data(self) -> dict[str, object]:
        return {
            "name": self.name,
            "about": self.about,
            "columns": list(self.columns),
            "rows": {name: [_plain(value) for value in row] for name, row in self.rows.items()},
            "paper": self.paper,
            "goals": [goal.as_data() for goal in self.goals],
            "misses": list(self.misses),
            "assumptions": list(self.assumptions),
            "met": self.met,
        }


def _plain(value: float) -> float | None:
    return round(value, 6) if math.isfinite(value) else None
