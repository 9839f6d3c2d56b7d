"""The held-out loss of the published weights, measured by the region that is asked to."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from diloco_cli.data import NamesHeldout, datasets
from diloco_cli.data.heldout import LIST
from diloco_cli.spec.schema import RunSpec
from diloco_cli.wire.messages import HeldOut
from diloco_cli.worker.trainer.task import RegionTask
from diloco_cli.worker.trainer.weights_and_books import WeightsAndBooks


def list_heldout(spec: RunSpec, region: str, folder: Path) -> None:
    """Writes into the region's folder which files its held-out text is made of."""
    dataset = datasets.build(spec.data_of(region))
    if isinstance(dataset, NamesHeldout):
        with contextlib.suppress(OSError):  # A full disk keeps nobody from training.
            dataset.held_out().write(folder / LIST)


MeasureWeights = Callable[[Mapping[str, np.ndarray]], float]
"""Gives the held-out loss of weights, in nats per token; those in training stay as they are."""


class HeldoutEvaluation:
    def __init__(
        self, task: RegionTask, newest: HeldOut | None, measure: MeasureWeights | None
    ) -> None:
        """`newest` is what a trainer before this one has measured; it is not repeated.

        Without `measure` none is ever due.
        """
        self.task, self.newest, self._measure = task, newest, measure
        self._evaluated_at = sum(newest.versions) if newest else None

    @property
    def possible(self) -> bool:
        return self._measure is not None

    def is_due(self, versions: list[int]) -> bool:
        """Says whether the global weights have moved far enough since the last evaluation."""
        if self._measure is None:
            return False
        if self._evaluated_at is None:
            return True
        unit = self.task.spec.evaluate.every * self.task.spec.sync.fragments
        return sum(versions) // unit > self._evaluated_at // unit

    def run(self, weights: WeightsAndBooks) -> float:
        """Measures the weights as adopted; a loss that is not finite is not reported."""
        assert self._measure is not None
        loss = self._measure(weights.published())
        self._evaluated_at = sum(weights.versions)
        if math.isfinite(loss):
            self.newest = HeldOut(versions=tuple(weights.versions), loss=loss)
        return loss
