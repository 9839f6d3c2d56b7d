"""How weights move inside a region: inner optimisers and learning-rate schedules.

Both are plain options here; optax is imported when one is built, by what trains.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Protocol

from pydantic import Field

from diloco_cli.registry import Registry

if TYPE_CHECKING:
    import optax

Positive = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0, lt=1)]
Count = Annotated[int, Field(ge=0)]


class Optimizer(Protocol):
    @property
    def lr(self) -> float: ...

    def build(self, rate: optax.Schedule, decayed: dict[str, bool]) -> optax.GradientTransformation:
        """Makes the transformation; `decayed` says by name which weights may shrink."""
        ...


class Schedule(Protocol):
    def build(self, peak: float, horizon: int) -> optax.Schedule:
        """Gives the learning rate of every step of a run of about `horizon` steps."""
        ...


optimizers: Registry[Optimizer] = Registry("optimizer")
schedules: Registry[Schedule] = Registry("schedule")


@optimizers.register("adamw")
@dataclass(frozen=True)
class AdamW:
    """Adam with decoupled weight decay; norms do not decay."""

    lr: Positive = 3.0e-3
    """Learning rate at its highest."""

    beta1: Share = 0.9
    beta2: Share = 0.99
    epsilon: Positive = 1.0e-8
    decay: Annotated[float, Field(ge=0)] = 0.1
    """Weight decay, multiplied by the learning rate of the step."""

    def build(self, rate: optax.Schedule, decayed: dict[str, bool]) -> optax.GradientTransformation:
        import optax

        return optax.adamw(
            rate, self.beta1, self.beta2, self.epsilon, weight_decay=self.decay, mask=decayed
        )


@optimizers.register("sgd")
@dataclass(frozen=True)
class SGD:
    """Gradient descent with momentum; mostly for comparisons."""

    lr: Positive = 0.1
    """Learning rate at its highest."""

    momentum: Share = 0.9
    nesterov: bool = False

    def build(self, rate: optax.Schedule, decayed: dict[str, bool]) -> optax.GradientTransformation:
        import optax

        return optax.sgd(rate, momentum=self.momentum or None, nesterov=self.nesterov)


@schedules.register("cosine")
@dataclass(frozen=True)
class Cosine:
    """Up in a straight line, then down along half a cosine to `floor`, and stays there."""

    warmup: Count = 50
    """Steps to the highest rate; at most a quarter of the run."""

    floor: Annotated[float, Field(ge=0, le=1)] = 0.05
    """Share of the highest rate at the end."""

    def build(self, peak: float, horizon: int) -> optax.Schedule:
        import optax

        warmup = min(self.warmup, horizon // 4)
        decay = optax.cosine_decay_schedule(peak, max(1, horizon - warmup), self.floor)
        return _after_warmup(peak, warmup, decay)


@schedules.register("constant")
@dataclass(frozen=True)
class Constant:
    """Up in a straight line, then always the same."""

    warmup: Count = 0
    """Steps to the full rate; at most a quarter of the run."""

    def build(self, peak: float, horizon: int) -> optax.Schedule:
        import optax

        return _after_warmup(peak, min(self.warmup, horizon // 4), optax.constant_schedule(peak))


def _after_warmup(peak: float, warmup: int, then: optax.Schedule) -> optax.Schedule:
    import optax

    if not warmup:
        return then
    # Starts one notch above zero: a first step at rate 0 would be a step thrown away.
    rise = optax.linear_schedule(peak / (warmup + 1), peak, warmup)
    return optax.join_schedules([rise, then], [warmup])
