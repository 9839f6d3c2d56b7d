"""The held-out loss of the published weights, measured by the region that is asked to."""

from __future__ import annotations

import math

from diloco_cli.wire.messages import HeldOut
from diloco_cli.worker.trainer.task import Task
from diloco_cli.worker.trainer.weights_and_books import WeightsAndBooks


class HeldoutEvaluation:
    def __init__(self, task: Task, newest: HeldOut | None) -> None:
        """`newest` is what a trainer before this one has measured; it is not repeated."""
        self.task, self.newest = task, newest
        self._evaluated_at = sum(newest.versions) if newest else None

    def is_due(self, versions: list[int]) -> bool:
        """Says whether the global weights have moved far enough since the last evaluation."""
        if self._evaluated_at is None:
            return True
        unit = self.task.spec.evaluate.every * self.task.spec.sync.fragments
        return sum(versions) // unit > self._evaluated_at // unit

    def run(self, weights: WeightsAndBooks) -> float:
        """Measures the weights as adopted; a loss that is not finite is not reported."""
        batches = self.task.stream.heldout(self.task.spec.evaluate.batches)
        loss = weights.engine.evaluate(weights.published(), batches)
        self._evaluated_at = sum(weights.versions)
        if math.isfinite(loss):
            self.newest = HeldOut(versions=tuple(weights.versions), loss=loss)
        return loss
