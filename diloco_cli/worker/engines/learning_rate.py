"""Which learning rate does an inner step have, also after the settings of the run were changed?

A plan says it for every place in a schedule. Places are counted in steps that all regions of the
spec make together, from 0 to the horizon where the budget is spent; which place comes next is the
run's progress, told by the server (`trainer/schedule_place.py`), so a region's speed, and when it
joined, bend nothing. When the settings change, the next plan goes on where the last one stood,
counted in tokens of the run. If its rate there differs by more than a tenth, it is reached in a
straight line over the places that the schedule warms up for.

    rate   ╲___ plan 0            ╭───╮ plan 1: a larger budget, so higher up on a longer curve
               ╲____             ╱     ╲____
                    ╲___________╱           ╲_______
                                └─ since

An optimiser whose averages were lost is led back slowly too: the rate rises from nothing to where
the schedule stands, over at least `REWARM` places.

A plan is plain data and is kept in the checkpoint: a restart gives the same rates.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from diloco_cli.spec.schema import InnerSpec
from diloco_cli.worker.engines.optimizers import WarmsUp, optimizers, schedules

if TYPE_CHECKING:
    import optax

TOLERANCE = 0.1
"""A rate that changes by a larger share of itself is approached slowly."""
REWARM = 100
"""Places of a rise from nothing, or the schedule's own warm-up if that is longer."""


@dataclass(frozen=True)
class RatePlan:
    """The learning rate at every place, from one change of the settings to the next."""

    lr: float
    """At its highest."""
    schedule: Mapping[str, Any]
    """The choice of kind."""
    horizon: int
    """Places of the whole run."""
    budget: float = 1.0
    """Tokens of the whole run."""
    since: int = 0
    """The place at which the plan began."""
    before: float | None = None
    """The rate there under the plan before; None for the first plan, 0 where the averages of the
    optimiser were lost."""

    @classmethod
    def of(cls, inner: InnerSpec, horizon: int, budget: float = 1.0) -> RatePlan:
        """The plan of a region that begins."""
        lr = optimizers.build(inner.optimizer).lr
        return cls(lr, inner.schedule, max(1, horizon), float(budget))

    def followed_by(self, new: RatePlan, place: int) -> tuple[RatePlan, int]:
        """The plan after this one, and where it begins, once the run has come to a place."""
        if replace(new, since=self.since, before=self.before) == self:
            return self, place
        tokens = place / self.horizon * self.budget
        there = round(tokens / new.budget * new.horizon)
        return replace(new, since=there, before=self.at(place)), there

    def warmed_again(self, place: int) -> RatePlan:
        """The plan of an optimiser that has lost its averages when the run had come to a place."""
        return replace(self, since=place, before=0.0)

    def at(self, place: int) -> float:
        """The rate of a step at this place."""
        import numpy as np

        return float(np.asarray(self.build()(place)))

    @property
    def rise(self) -> int:
        """Places over which a rate that differs is reached."""
        schedule = schedules.build(dict(self.schedule))
        own = schedule.rise(self.horizon) if isinstance(schedule, WarmsUp) else 0
        return max(own, min(REWARM, self.horizon // 4)) if self.before == 0.0 else own

    def build(self) -> optax.Schedule:
        """Makes what an optimiser asks for the rate at a place."""
        import jax.numpy as jnp

        schedule = schedules.build(dict(self.schedule))
        curve = schedule.build(self.lr, self.horizon)
        since, before = self.since, self.before
        if before is None:
            return curve
        rise = self.rise
        target = float(jnp.asarray(curve(since)))
        if not rise or abs(target - before) <= TOLERANCE * before:
            return curve

        def approach(place: Any) -> Any:
            share = jnp.clip((place - since + 1) / (rise + 1), 0.0, 1.0)
            return before + share * (curve(place) - before)

        return approach
