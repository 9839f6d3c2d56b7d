"""The held-out loss of the published weights, measured by the region that is asked to."""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from diloco_cli.data import NamesHeldout, datasets
from diloco_cli.data.heldout import LIST
from diloco_cli.models.transformer import Transformer
from diloco_cli.spec.schema import RunSpec
from diloco_cli.system.wakeup import Wakeup
from diloco_cli.wire.messages import HeldOut, TrainerProgress
from diloco_cli.worker.engines.text_sampler import TextSampler
from diloco_cli.worker.mailbox import Mailbox
from diloco_cli.worker.text_codec import codec_of
from diloco_cli.worker.trainer.mail import LOOK_SECONDS
from diloco_cli.worker.trainer.task import RegionTask, Task
from diloco_cli.worker.trainer.weights_and_books import WeightsAndBooks


def list_heldout(spec: RunSpec, region: str, folder: Path) -> None:
    """Writes into the region's folder which files its held-out text is made of."""
    dataset = datasets.build(spec.data_of(region))
    if isinstance(dataset, NamesHeldout):
        with contextlib.suppress(OSError):  # A full disk keeps nobody from training.
            dataset.held_out().write(folder / LIST)


AVERAGE_SECONDS = 20.0
"""For the last average of a run to arrive; then it goes unmeasured."""

log = logging.getLogger(__name__)


def sampler_of(task: Task) -> TextSampler | None:
    """Who writes samples of the task's model; None where nobody wants or could read them."""
    tokens, model = task.spec.evaluate.sample, task.model
    alone = task.orders is None and task.cost.devices == 1
    if not tokens or not alone or not isinstance(model, Transformer):
        return None
    if (codec := codec_of(task.spec.data_of(task.region))) is None:
        return None
    return TextSampler(model.shape, codec, task.stream.heldout(1)[0][0].tolist(), tokens=tokens)


MeasureWeights = Callable[[Mapping[str, np.ndarray]], float]
"""Gives the held-out loss of weights, in nats per token; those in training stay as they are."""


class HeldoutEvaluation:
    """Measures the published weights, and the run's average of them where it is sent one."""

    def __init__(
        self,
        task: RegionTask,
        mailbox: Mailbox,
        before: TrainerProgress | None,
        measure: MeasureWeights | None,
    ) -> None:
        """`before` has what a trainer before this one has measured; it is not repeated.

        Without `measure` none is ever due.
        """
        self.task, self._mailbox, self._measure = task, mailbox, measure
        self.newest = before.heldout if before else None
        self.newest_ema = before.heldout_ema if before else None
        self.newest_sample = before.sample if before else None
        self.sampler = sampler_of(task) if isinstance(task, Task) else None
        self._evaluated_at = sum(self.newest.versions) if self.newest else None

    def report(self) -> dict[str, Any]:
        """What was measured last, as the fields of the trainer's report."""
        return {
            "heldout": self.newest,
            "heldout_ema": self.newest_ema,
            "sample": self.newest_sample,
        }

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

    def is_stale(self, versions: list[int]) -> bool:
        """Says whether other weights than these were the last to be measured."""
        return self.newest is None or list(self.newest.versions) != versions

    def run(self, weights: WeightsAndBooks) -> float:
        """Measures the weights as adopted; a loss that is not finite is not reported."""
        assert self._measure is not None
        published = weights.published()
        loss = self._measure(published)
        self._evaluated_at = sum(weights.versions)
        if math.isfinite(loss):
            self.newest = HeldOut(versions=tuple(weights.versions), loss=loss)
            self._sample(weights.versions, published)
        return loss

    def _sample(self, versions: list[int], published: Mapping[str, np.ndarray]) -> None:
        """Lets the weights write, if somebody wants to read it; the training needs none of it."""
        if self.sampler is None:
            return
        try:
            self.newest_sample = self.sampler.sample(versions, published) or self.newest_sample
        except RuntimeError as error:  # What JAX raises, for example when memory runs out.
            self.sampler = None
            log.warning(f"no more samples are written: {error}")

    def run_average(self) -> bool:
        """Measures the average that has arrived, if one has; says whether there is news."""
        if self._measure is None or (average := self._mailbox.take_average()) is None:
            return False
        versions, weights = average
        shapes = {tensor.name: tuple(tensor.shape) for tensor in self.task.tensors}
        if {name: values.shape for name, values in weights.items()} != shapes:
            return False  # Of another run, if that ever happens.
        if self.newest_ema and sum(versions) <= sum(self.newest_ema.versions):
            return False
        loss = self._measure(weights)
        if math.isfinite(loss):
            self.newest_ema = HeldOut(versions=versions, loss=loss)
        return True

    def wait_for_average(self, versions: list[int], wakeup: Wakeup) -> None:
        """Measures the average of a finished run, if it comes soon."""
        deadline = time.monotonic() + AVERAGE_SECONDS
        while self.newest_ema is None or sum(self.newest_ema.versions) < sum(versions):
            left = deadline - time.monotonic()
            if self.run_average() or left <= 0 or wakeup.stop_reason:
                return
            wakeup.clear()
            wakeup.wait(min(left, LOOK_SECONDS))
