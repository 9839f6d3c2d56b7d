"""How does a measured figure stand beside its limit and its goal?"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True)
class Figure:
    """What every benchmark reports: a value, and the limit measured in the same run."""

    name: str
    value: float
    unit: str
    reference: float | None
    """The limit."""
    goal: float | None = None
    """Without one the figure is only reported."""
    goal_of: Literal["ratio", "value"] = "ratio"
    """What the goal bounds: the value itself, or the value as a multiple of the limit."""
    lower: bool = False
    """Whether less is better."""
    details: Mapping[str, object] = field(default_factory=dict)
    """More keys for the JSON document."""

    @property
    def ratio(self) -> float | None:
        return self.value / self.reference if self.reference else None

    @property
    def met(self) -> bool | None:
        if self.goal is None:
            return None
        judged = self.value if self.goal_of == "value" else self.ratio or 0.0
        return judged <= self.goal if self.lower else judged >= self.goal

    def plain(self) -> dict[str, object]:
        return {
            "name": self.name,
            "value": self.value,
            "unit": self.unit,
            "reference": self.reference,
            "ratio": self.ratio,
            "goal": self.goal,
            "met": self.met,
            **({"better": "lower"} if self.lower else {}),
            **self.details,
        }
