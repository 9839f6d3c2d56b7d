"""How weights move inside a region: inner optimisers and learning-rate schedules.

Both are plain options here; optax is imported when one is built, by what trains.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol, runtime_checkable

from pydantic import Field

from diloco_cli.registry import Advised, Registry

if TYPE_CHECKING:
    import optax

Positive = Annotated[float, Field(gt=0)]
LearningRate = Annotated[float, Field(gt=0, le=10)]
Share = Annotated[float, Field(ge=0, lt=1)]
WarmupSteps = Annotated[
    int,
    Field(ge=0),
    Advised("It counts steps of the run, as in 50; the warm-up of `wsd` alone is a share of it."),
]
WarmupShare = Annotated[
    float,
    Field(ge=0, le=0.25),
    Advised("It is a share of the run, as in 0.01; the warm-up of other schedules counts steps."),
]
ADAM_LENGTH = 0.2
"""Root mean square of an Adam step, in learning rates: that of Muon's is made the same."""


class Optimizer(Protocol):
    @property
    def lr(self) -> float: ...

    def build(self, rate: optax.Schedule, decayed: dict[str, bool]) -> optax.GradientTransformation:
        """Makes the transformation; `decayed` says by name which weights may shrink."""
        ...


@runtime_checkable
class MovesMatrices(Protocol):
    """An optimiser that treats hidden matrices as wholes, and everything else otherwise."""

    def build_by_matrix(
        self, rate: optax.Schedule, matrices: dict[str, tuple[int, int] | None]
    ) -> optax.GradientTransformation:
        """Makes the transformation; `matrices` says by name which two axes are a matrix's."""
        ...


class Schedule(Protocol):
    def build(self, peak: float, horizon: int) -> optax.Schedule:
        """Gives the learning rate at every place of a run, from 0 to `horizon`."""
        ...


@runtime_checkable
class WarmsUp(Protocol):
    """A schedule that begins with a rise."""

    def rise(self, horizon: int) -> int:
        """Places to the highest rate; at most a quarter of the run."""
        ...


optimizers: Registry[Optimizer] = Registry("optimizer")
schedules: Registry[Schedule] = Registry("schedule")


@optimizers.register("adamw")
@dataclass(frozen=True)
class AdamW:
    """Adam with decoupled weight decay; norms do not decay."""

    lr: LearningRate = 3.0e-3
    """Learning rate at its highest."""

    beta1: Share = 0.9
    """Share of the last gradients' direction that is kept."""

    beta2: Share = 0.99
    """Share of the last gradients' squares that is kept."""

    epsilon: Positive = 1.0e-8
    """Added to the root of the squares."""

    decay: Annotated[float, Field(ge=0)] = 0.1
    """Weight decay, multiplied by the learning rate of the step."""

    def build(self, rate: optax.Schedule, decayed: dict[str, bool]) -> optax.GradientTransformation:
        import optax

        return optax.adamw(
            rate, self.beta1, self.beta2, self.epsilon, weight_decay=self.decay, mask=decayed
        )


@optimizers.register("muon")
@dataclass(frozen=True)
class Muon:
    """Momentum made orthogonal, for hidden matrices; Adam without decay for all else.

    Every update has the length of an Adam step, so rates that suit `adamw` are about right.
    """

    lr: LearningRate = 3.0e-3
    """Learning rate at its highest, of both."""

    beta: Share = 0.95
    """Share of the last gradients' direction that is kept."""

    decay: Annotated[float, Field(ge=0)] = 0.1
    """Weight decay of hidden matrices, multiplied by the learning rate of the step."""

    beta1: Share = 0.9
    """Share of the last gradients' direction that is kept, by Adam."""

    beta2: Share = 0.99
    """Share of the last gradients' squares that is kept, by Adam."""

    epsilon: Positive = 1.0e-8
    """Added to the root of Adam's squares and to a matrix's length, so that neither is 0."""

    def build(self, rate: optax.Schedule, decayed: dict[str, bool]) -> optax.GradientTransformation:
        return self.build_by_matrix(
            rate, {name: (0, 1) if it else None for name, it in decayed.items()}
        )

    def build_by_matrix(
        self, rate: optax.Schedule, matrices: dict[str, tuple[int, int] | None]
    ) -> optax.GradientTransformation:
        import optax

        axes = {
            name: optax.contrib.MuonDimensionNumbers(*both) if both else None
            for name, both in matrices.items()
        }

        def of(params: Any) -> Any:
            return {name: axes[name] for name in params}

        return optax.contrib.muon(
            rate,
            beta=self.beta,
            eps=self.epsilon,
            weight_decay=self.decay,
            adam_b1=self.beta1,
            adam_b2=self.beta2,
            muon_weight_dimension_numbers=of,
            consistent_rms=ADAM_LENGTH,
        )


@optimizers.register("sgd")
@dataclass(frozen=True)
class SGD:
    """Gradient descent with momentum; mostly for comparisons."""

    lr: LearningRate = 0.1
    """Learning rate at its highest."""

    momentum: Share = 0.9
    """Share of the last gradients' direction that is kept; 0: plain descent."""

    nesterov: bool = False
    """Whether the step looks ahead along the momentum."""

    def build(self, rate: optax.Schedule, decayed: dict[str, bool]) -> optax.GradientTransformation:
        import optax

        return optax.sgd(rate, momentum=self.momentum or None, nesterov=self.nesterov)


@schedules.register("cosine")
@dataclass(frozen=True)
class Cosine:
    """Up in a straight line, then down along half a cosine to `floor`, and stays there."""

    warmup: WarmupSteps = 50
    """Steps of the run to the highest rate; at most a quarter of the run."""

    floor: Annotated[float, Field(ge=0, le=1)] = 0.05
    """Share of the highest rate at the end."""

    def rise(self, horizon: int) -> int:
        return min(self.warmup, horizon // 4)

    def build(self, peak: float, horizon: int) -> optax.Schedule:
        import optax

        warmup = self.rise(horizon)
        decay = optax.cosine_decay_schedule(peak, max(1, horizon - warmup), self.floor)
        return _after_warmup(peak, warmup, decay)


@schedules.register("wsd")
@dataclass(frozen=True)
class WarmupStableDecay:
    """Up in a straight line, then always the same, then down to `floor` at the end.

    The same run can be made longer at any moment before it goes down, at no loss.
    """

    warmup: WarmupShare = 0.01
    """Share of the run up to the highest rate."""

    decay: Annotated[float, Field(ge=0, le=0.75)] = 0.2
    """Share of the run, at its end, in which the rate falls."""

    shape: Literal["linear", "cosine", "sqrt"] = "linear"
    """How it falls; `sqrt` falls fastest at first."""

    floor: Annotated[float, Field(ge=0, le=1)] = 0.0
    """Share of the highest rate at the end."""

    def rise(self, horizon: int) -> int:
        return int(self.warmup * horizon)

    def build(self, peak: float, horizon: int) -> optax.Schedule:
        import jax.numpy as jnp

        warmup, falling = self.rise(horizon), max(1.0, self.decay * horizon)
        start = horizon - self.decay * horizon - warmup

        def stable(place: Any) -> Any:
            share = jnp.clip((place - start) / falling, 0.0, 1.0)
            shapes = {
                "linear": lambda: 1 - share,
                "cosine": lambda: (1 + jnp.cos(jnp.pi * share)) / 2,
                "sqrt": lambda: 1 - jnp.sqrt(share),
            }
            return peak * (self.floor + (1 - self.floor) * shapes[self.shape]())

        return _after_warmup(peak, warmup, stable)


@schedules.register("constant")
@dataclass(frozen=True)
class Constant:
    """Up in a straight line, then always the same."""

    warmup: WarmupSteps = 0
    """Steps of the run to the full rate; at most a quarter of the run."""

    def rise(self, horizon: int) -> int:
        return min(self.warmup, horizon // 4)

    def build(self, peak: float, horizon: int) -> optax.Schedule:
        import optax

        return _after_warmup(peak, self.rise(horizon), optax.constant_schedule(peak))


def _after_warmup(peak: float, warmup: int, then: optax.Schedule) -> optax.Schedule:
    import optax

    if not warmup:
        return then
    # Starts one notch above zero: a first step at rate 0 would be a step thrown away.
    rise = optax.linear_schedule(peak / (warmup + 1), peak, warmup)
    return optax.join_schedules([rise, then], [warmup])
