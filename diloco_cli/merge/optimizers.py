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
from diloco_cli.merge.protocols import Vectors, outer_optimizers

LearningRate = Annotated[float, Field(gt=0, allow_inf_nan=False)]


@outer_optimizers.register("nesterov")
@dataclass(frozen=True)
class Nesterov:
    """SGD with Nesterov momentum: b ← μb + Δ, θ ← θ − lr(Δ + μb).

    Momentum is paid per round, not per token: the small rounds that drain a run would
    each move the weights almost as far as a full one. So a drain round is a plain step,
    θ ← θ − lr·Δ, and leaves b as it is.
    """

    lr: LearningRate = 0.4
    """Outer learning rate; more where momentum is less, 0.7 beside 0.6."""

    momentum: Annotated[float, Field(ge=0, lt=1)] = 0.9
    """Share of the last steps' direction that is kept; 0.6 in a run of some tens of rounds."""

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
