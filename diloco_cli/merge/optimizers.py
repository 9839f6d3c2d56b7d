"""A merged pseudo-gradient becomes the next weights: Nesterov momentum, plain descent.

`step` works element by element on float32 vectors, chunk by chunk, so it needs no memory
beyond its result; tests/merge/test_outer_optimizers.py shows that it does what optax does.
`fused_step` is the same in one pass, for outer_step.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import numpy as np
from pydantic import Field

from diloco_cli.core.fragments import spans
from diloco_cli.merge.protocols import OuterOptimizer, Vectors, outer_optimizers

SHORTEST = 2.5
"""Rounds that momentum remembers at least: that of 0.6."""

LearningRate = Annotated[float, Field(gt=0, allow_inf_nan=False)]
AverageShare = Annotated[float, Field(ge=0, le=0.5)]


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
    """

    lr: LearningRate = 0.4
    """Outer learning rate after the warm-up; more where momentum is less."""

    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Share of the last steps' direction that is kept, after the warm-up."""

    warmup: Annotated[int, Field(ge=0)] = 100
    """Rounds until momentum is whole; 0: from the first on."""

    ema: AverageShare | None = None
    """Keep an average of the published weights over this share of the rounds so far, for
    `pull --ema`; 0.05 is a good one. Costs 4 bytes a parameter on the server's disk."""

    def at(self, version: int) -> Nesterov:
        """The step that leads to a version, by its number alone: a replay needs no more."""
        if not self.warmup:
            return self
        remembered = max(SHORTEST, version / (self.warmup * (1 - self.momentum)))
        momentum = min(self.momentum, 1 - 1 / remembered)
        return Nesterov(self.lr + self.momentum - momentum, momentum, 0, self.ema)

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


@outer_optimizers.register("sgd")
@dataclass(frozen=True)
class Sgd:
    """Plain descent: θ ← θ − lr·Δ. With lr 1 and `merge: mean` this is model averaging."""

    lr: LearningRate = 1.0
    """Outer learning rate."""

    ema: AverageShare | None = None
    """Keep an average of the published weights over this share of the rounds so far."""

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
