"""A merged pseudo-gradient becomes the next weights: Nesterov momentum, Adam, plain descent.

`step` works element by element on float32 vectors, chunk by chunk, so it needs no memory
beyond its result; tests/merge/test_optimizers.py shows that it does what optax does.
`fused_step` is the same in one pass, for outer_step.py.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated

import numpy as np
from pydantic import Field

from diloco_cli.core.fragments import spans
from diloco_cli.merge.protocols import OuterOptimizer, OuterRound, Vectors, outer_optimizers

SHORTEST = 2.5
"""Rounds that momentum remembers at least: that of 0.6."""

LearningRate = Annotated[float, Field(gt=0, le=10)]
Epsilon = Annotated[float, Field(gt=0, le=1)]
AverageShare = Annotated[float, Field(ge=0, le=0.5)]
Decay = Annotated[float, Field(ge=0, lt=1)]


@outer_optimizers.register("nesterov")
@dataclass(frozen=True)
class Nesterov:
    """SGD with Nesterov momentum: b ← μb + Δ, θ ← θ − lr(Δ + μb).

    Momentum is paid per round, not per token: the small rounds that drain a run would
    each move the weights almost as far as a full one. So a drain round is a plain step,
    θ ← θ − lr·Δ, and leaves b as it is.

    Momentum 0.9 remembers ten rounds, which is too much for the first ones: what they point
    away from is soon far behind. So it remembers a tenth of the rounds so far until `warmup`,
    though never less than 2.5 (momentum 0.6), and the rate is higher by what momentum lacks.

    A round in which only some of the live regions take part moves the weights in proportion.
    """

    lr: LearningRate = 0.4
    """Outer learning rate after the warm-up; more where momentum is less."""

    momentum: Decay = 0.9
    """Share of the last steps' direction that is kept, after the warm-up."""

    warmup: Annotated[int, Field(ge=0, le=1_000_000)] = 100
    """Rounds until momentum is whole; 0: from the first on."""

    ema: AverageShare | None = None
    """Keep an average of the published weights over this share of the rounds so far, for
    `pull --ema`; 0.05 is a good one, 0 keeps none, as when left out. Costs 4 bytes per parameter
    on the server's disk."""

    proportional: bool = True
    """Step in proportion where only some of the live regions take part; false: a whole step."""

    def at(self, round: OuterRound) -> Nesterov:
        """The step of a round, by what is on record of it: a replay needs no more."""
        lr, momentum = self.lr, self.momentum
        if self.warmup:
            remembered = max(SHORTEST, round.version / (self.warmup * (1 - self.momentum)))
            momentum = min(self.momentum, 1 - 1 / remembered)
            lr += self.momentum - momentum
        share = round.share if self.proportional else 1.0
        return replace(self, lr=lr * share, momentum=momentum, warmup=0)

    def start(self, size: int) -> np.ndarray:
        return np.zeros(size, np.float32)

    def step(
        self, theta: np.ndarray, momentum: np.ndarray, merged: np.ndarray, *, drain: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        if drain:
            return _descend(theta, merged, self.lr), momentum
        weights, kept = np.empty_like(theta), np.empty_like(momentum)
        for span in spans(theta.size):
            delta = merged[span]
            kept[span] = self.momentum * momentum[span] + delta
            weights[span] = theta[span] - self.lr * (delta + self.momentum * kept[span])
        return weights, kept

    def fused_step(
        self, merged: np.ndarray, factor: float, old: Vectors, new: Vectors, *, drain: bool
    ) -> int:
        from diloco_cli.merge.kernels import nesterov

        if drain:
            return _fused_descent(merged, factor, old, new, self.lr)
        return nesterov(merged, factor, *old, self.lr, self.momentum, *new)


@outer_optimizers.register("aged-nesterov")
@dataclass(frozen=True)
class AgedNesterov(Nesterov):
    """Nesterov momentum that steps less far along old work: lr ÷ (1 + age)^damping.

    The age of a round is how many versions lie between what its members trained on and what
    the step begins with, on average. For runs whose regions often come late.
    """

    damping: Annotated[float, Field(ge=0, le=4)] = 1.0
    """How fast the step gets shorter with age; 0: not at all."""

    def at(self, round: OuterRound) -> Nesterov:
        step = super().at(round)
        return replace(step, lr=step.lr / (1 + max(0.0, round.age)) ** self.damping)


@outer_optimizers.register("adam")
@dataclass(frozen=True)
class Adam:
    """Adam: m ← β₁m + (1−β₁)Δ, v ← β₂v + (1−β₂)Δ², θ ← θ − lr·m̂ ÷ (√v̂ + ε).

    Every weight moves by about `lr` in a round, however long the pseudo-gradients are. Costs 4
    bytes per parameter more than `nesterov` on the server. A drain round is a step along Δ ÷ (√v̂ +
    ε), its own squares counted, and leaves m and v as they are. Few members move the weights in
    proportion.
    """

    lr: LearningRate = 0.02
    """How far a weight moves in a round: about as far as in a round of inner steps."""

    beta1: Decay = 0.9
    """Share of the last rounds' direction that is kept."""

    beta2: Decay = 0.95
    """Share of the last rounds' squares that is kept."""

    epsilon: Epsilon = 1e-5
    """Added to the root of the squares."""

    ema: AverageShare | None = None
    """Keep an average of the published weights over this share of the rounds so far; 0, as when
    left out: keep none."""

    proportional: bool = True
    """Step in proportion where only some of the live regions take part; false: a whole step."""

    def at(self, round: OuterRound) -> AdamStep:
        m_factor = 1 / (1 - self.beta1**round.version)
        v_factor = 1 / (1 - self.beta2**round.version)
        lr = self.lr * (round.share if self.proportional else 1.0)
        return AdamStep(lr, self.beta1, self.beta2, self.epsilon, m_factor, v_factor)

    def start(self, size: int) -> np.ndarray:
        return np.zeros(2 * size, np.float32)

    def step(
        self, theta: np.ndarray, momentum: np.ndarray, merged: np.ndarray, *, drain: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        """The step of a round of a long run."""
        plain = AdamStep(self.lr, self.beta1, self.beta2, self.epsilon, 1.0, 1.0)
        return plain.step(theta, momentum, merged, drain=drain)


@dataclass(frozen=True)
class AdamStep:
    """One step of Adam; m and v of a weight lie side by side."""

    lr: float
    beta1: float
    beta2: float
    epsilon: float
    m_factor: float
    """1 ÷ the sum of the weights in m."""
    v_factor: float

    def start(self, size: int) -> np.ndarray:
        return np.zeros(2 * size, np.float32)

    def step(
        self, theta: np.ndarray, momentum: np.ndarray, merged: np.ndarray, *, drain: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        weights, kept = np.empty_like(theta), np.empty_like(momentum)
        for span in spans(theta.size):
            delta, both = merged[span], momentum[2 * span.start : 2 * span.stop].reshape(-1, 2)
            m = self.beta1 * both[:, 0] + (1 - self.beta1) * delta
            v = self.beta2 * both[:, 1] + (1 - self.beta2) * (delta * delta)
            along = delta if drain else self.m_factor * m
            change = along / (np.sqrt(self.v_factor * v) + np.float32(self.epsilon))
            weights[span] = theta[span] - self.lr * change
            if drain:
                m, v = both[:, 0], both[:, 1]
            kept[2 * span.start : 2 * span.stop : 2] = m
            kept[2 * span.start + 1 : 2 * span.stop : 2] = v
        return weights, kept

    def fused_step(
        self, merged: np.ndarray, factor: float, old: Vectors, new: Vectors, *, drain: bool
    ) -> int:
        from diloco_cli.merge.kernels import adam

        rates = self.lr, self.beta1, 1 - self.beta1, self.beta2, 1 - self.beta2
        factors = self.epsilon, self.m_factor, self.v_factor
        return adam(merged, factor, *old, *rates, *factors, drain, *new)


@outer_optimizers.register("sgd")
@dataclass(frozen=True)
class Sgd:
    """Plain descent: θ ← θ − lr·Δ. With lr 1 and `merge: mean` this is model averaging."""

    lr: LearningRate = 1.0
    """Outer learning rate."""

    ema: AverageShare | None = None
    """Keep an average of the published weights over this share of the rounds so far; 0, as when
    left out: keep none."""

    proportional: bool = True
    """Step in proportion where only some of the live regions take part; false: a whole step."""

    def at(self, round: OuterRound) -> Sgd:
        return replace(self, lr=self.lr * round.share) if self.proportional else self

    def start(self, size: int) -> np.ndarray:
        return np.zeros(0, np.float32)

    def step(
        self, theta: np.ndarray, momentum: np.ndarray, merged: np.ndarray, *, drain: bool
    ) -> tuple[np.ndarray, np.ndarray]:
        return _descend(theta, merged, self.lr), momentum

    def fused_step(
        self, merged: np.ndarray, factor: float, old: Vectors, new: Vectors, *, drain: bool
    ) -> int:
        return _fused_descent(merged, factor, old, new, self.lr)


def average_share(optimizer: OuterOptimizer) -> float:
    """Over which share of the rounds published weights are averaged; 0 where they are not."""
    return getattr(optimizer, "ema", None) or 0.0


def averaged(
    average: np.ndarray | None, published: np.ndarray, version: int, *, share: float
) -> np.ndarray:
    """Moves an average on to a newer version; the first one is the version itself.

    It remembers as many rounds as are `share` of those so far, so it is as long as it should be
    whenever somebody looks, and needs no word about how long the run will be.
    """
    if average is None:
        return published.copy()
    part = np.float32(1 / max(1.0, share * version))
    new = np.empty_like(average)
    for span in spans(average.size):
        new[span] = average[span] + part * (published[span] - average[span])
    return new


def _descend(theta: np.ndarray, merged: np.ndarray, lr: float) -> np.ndarray:
    weights = np.empty_like(theta)
    for span in spans(theta.size):
        weights[span] = theta[span] - lr * merged[span]
    return weights


def _fused_descent(merged: np.ndarray, factor: float, old: Vectors, new: Vectors, lr: float) -> int:
    from diloco_cli.merge.kernels import descend

    theta, momentum, published = old
    new_theta, new_momentum, change = new
    new_momentum[:] = momentum
    return descend(merged, factor, theta, published, lr, new_theta, change)
