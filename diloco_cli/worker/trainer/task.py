"""What one region has to do: its model, its text, its step.

`prepare` turns the spec into these without looking at any folder, and `set_up` makes a
process fit to do it. A trainer and a bare loop to measure it against use both, so that
they do exactly the same work under the same conditions.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

from diloco_cli.core.fragments import Layout, cut
from diloco_cli.data import Stream, datasets, place_of
from diloco_cli.models import Model, models
from diloco_cli.spec.schema import InnerSpec, RunSpec
from diloco_cli.system.malloc import keep_memory
from diloco_cli.worker.engines import CompiledStep
from diloco_cli.worker.engines.jax_engine import make_step, use_compile_cache


@dataclass(frozen=True)
class Task:
    spec: RunSpec
    region: str
    model: Model
    layout: Layout
    inner: InnerSpec
    step: CompiledStep
    stream: Stream

    @property
    def tokens(self) -> int:
        """Tokens in one inner step."""
        return self.inner.batch * self.inner.sequence

    @property
    def alpha(self) -> float:
        return self.spec.sync.alpha


def set_up(cores: Sequence[int] | None) -> None:
    """Prepares this process for training; call it before the engine starts its threads."""
    if cores:
        limit_cores(cores)
    keep_memory()
    use_compile_cache()


def limit_cores(cores: Sequence[int]) -> None:
    if not hasattr(os, "sched_setaffinity"):
        return
    if allowed := set(cores) & os.sched_getaffinity(0):
        os.sched_setaffinity(0, allowed)


def prepare(spec: RunSpec, region: str) -> Task:
    """Builds everything a region needs to train; compiles nothing yet."""
    inner = spec.inner_of(region)
    model = models.build(spec.model)
    index, count = place_of(spec, region)
    dataset = datasets.build(spec.data_of(region))
    return Task(
        spec=spec,
        region=region,
        model=model,
        layout=cut(model.tensors(), spec.sync.fragments),
        inner=inner,
        step=make_step(model, inner, horizon=horizon(spec, region)),
        stream=dataset.open(spec.seed, index, count, inner.batch, inner.sequence),
    )


def horizon(spec: RunSpec, region: str) -> int:
    """Estimates how many steps a region makes before the budget of all is spent."""

    def pace(name: str) -> float:
        inner = spec.inner_of(name)
        return inner.batch * inner.sequence * spec.region(name).speed

    # A step takes about as long everywhere, but for regions that are told to be slow.
    together = sum(pace(other.name) for other in spec.regions)
    return max(1, round(spec.budget.tokens * spec.region(region).speed / together))
