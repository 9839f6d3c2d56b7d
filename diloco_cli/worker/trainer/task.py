"""What one region has to do: its model, its text, its step.

`RegionTask` is what every trainer works by, also one that is not ours; `Task` adds what the
built-in one trains with. `prepare` turns the spec into these without looking at any folder,
and `set_up` makes a process fit to do it. A trainer and a bare loop to measure it against use
both, so that they do exactly the same work under the same conditions.

JAX is loaded by what builds a step, and by nothing else here.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace

from diloco_cli.core.fragments import Layout, Tensor, cut
from diloco_cli.data import Stream, datasets
from diloco_cli.models import Model, models
from diloco_cli.spec.schema import InnerSpec, RegionSpec, RunSpec
from diloco_cli.system.malloc import keep_memory
from diloco_cli.worker.engines import CompiledStep, Orders, StepCost
from diloco_cli.worker.engines.learning_rate import RatePlan


@dataclass(frozen=True, kw_only=True)
class RegionTask:
    """What any trainer of a region works by, whoever makes its steps."""

    spec: RunSpec
    region: str
    tensors: tuple[Tensor, ...]
    layout: Layout
    rate: RatePlan | None
    """The learning rate of every step; None where that is not ours to say."""
    terms: int = 0
    """Number of the terms that the spec is of."""
    orders: Orders | None = None
    """The way to the region's other hosts, if there are any."""

    @property
    def alpha(self) -> float:
        return self.spec.sync.alpha

    @property
    def optimizer(self) -> str:
        """The kind of the inner optimiser: whose saved state can be gone on from."""
        return "own"

    @property
    def tokens(self) -> int | None:
        """Tokens in one inner step; None where every step says how many it had."""
        return None

    @property
    def cost(self) -> StepCost | None:
        return None


@dataclass(frozen=True, kw_only=True)
class Task(RegionTask):
    """What the built-in trainer works by."""

    model: Model
    inner: InnerSpec
    rate: RatePlan
    step: CompiledStep
    stream: Stream

    @property
    def optimizer(self) -> str:
        return self.inner.optimizer["kind"]

    @property
    def tokens(self) -> int:
        return self.inner.batch * self.inner.sequence

    @property
    def cost(self) -> StepCost:
        return self.step.cost

    def after(self, before: RatePlan, place: int) -> tuple[Task, int]:
        """The same task for a region that was at a place of another plan, and its place now."""
        rate, place = before.followed_by(self.rate, place)
        return self._under(rate), place

    def warmed_again(self, place: int) -> Task:
        """The same task for a region whose optimiser lost its averages at a place."""
        return self._under(self.rate.warmed_again(place))

    def _under(self, rate: RatePlan) -> Task:
        if rate == self.rate:
            return self
        region, separator = self.spec.region(self.region), self.stream.separator
        step = _step(self.model, region, self.inner, rate, separator, self.orders)
        return replace(self, rate=rate, step=step)


def set_up(cores: Sequence[int] | None) -> None:
    """Prepares this process for training; call it before the engine starts its threads."""
    from diloco_cli.worker.engines.jax_engine import use_compile_cache

    if cores:
        limit_cores(cores)
    keep_memory()
    use_compile_cache()


def limit_cores(cores: Sequence[int]) -> None:
    if not hasattr(os, "sched_setaffinity"):
        return
    if allowed := set(cores) & os.sched_getaffinity(0):
        os.sched_setaffinity(0, allowed)


def prepare(spec: RunSpec, region: str, *, terms: int = 0, orders: Orders | None = None) -> Task:
    """Builds everything a region needs to train; compiles nothing yet.

    `orders` is the way to the region's other hosts, if there are any.
    """
    inner = spec.inner_of(region)
    rate = RatePlan.of(inner, horizon(spec), spec.budget.tokens)
    model = models.build(spec.model)
    dataset = datasets.build(spec.data_of(region))
    stream = dataset.open(spec.seed, inner.batch, inner.sequence)
    return Task(
        spec=spec,
        region=region,
        model=model,
        tensors=model.tensors(),
        layout=cut(model.tensors(), spec.sync.fragments),
        inner=inner,
        rate=rate,
        step=_step(model, spec.region(region), inner, rate, stream.separator, orders),
        orders=orders,
        terms=terms,
        stream=stream,
    )


def _step(
    model: Model,
    region: RegionSpec,
    inner: InnerSpec,
    rate: RatePlan,
    separator: int | None,
    orders: Orders | None,
) -> CompiledStep:
    from diloco_cli.worker.engines.devices import open_mesh
    from diloco_cli.worker.engines.jax_engine import make_step
    from diloco_cli.worker.engines.many_hosts import LeadStep, SentValues

    mesh = open_mesh(region)
    if orders is None:
        return make_step(model, inner, rate, mesh=mesh, separator=separator)
    values = SentValues(orders)
    step = make_step(model, inner, rate, mesh=mesh, separator=separator, transfer=values)
    return LeadStep(step, orders, {"rate": asdict(rate), "separator": separator})


def horizon(spec: RunSpec) -> int:
    """Places in the run's schedule: steps in which all regions of the spec spend the budget.

    The same for every region, however fast it is and whoever else joins: what moves on by one
    place is the run.
    """
    inners = [spec.inner_of(region.name) for region in spec.regions] or [spec.inner]
    together = sum(inner.batch * inner.sequence for inner in inners)
    return max(1, round(spec.budget.tokens / together))
