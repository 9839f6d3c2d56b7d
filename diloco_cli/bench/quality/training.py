"""A rehearsal with real weights: what loss does a run reach?

    simulator   when steps end, calls come, frames arrive, rounds close: virtual time
    learner     real steps, real frames with all that the codec loses
    here        a closed round becomes the next version by the server's own function

One process, no socket, no disk. The same spec and seed give the same weights to the bit.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np

from diloco_cli.assemble import RunObjects, resolve, settings_of
from diloco_cli.bench.quality.learner import RUN, TrainingOptions, TrainingRegion
from diloco_cli.core.fragments import gather, scatter
from diloco_cli.core.rounds import Receipt
from diloco_cli.errors import RunFailed
from diloco_cli.server.store.state_format import StoredState
from diloco_cli.server.versions.next_version import Spoiled, Version, next_version
from diloco_cli.sim.region import SimulatedRegion
from diloco_cli.sim.scenario import RegionSite, Scenario
from diloco_cli.sim.simulator import Simulation
from diloco_cli.spec.schema import RunSpec
from diloco_cli.wire.digest import vector_digest
from diloco_cli.wire.frame import Frame, open_frame
from diloco_cli.worker.engines.jax_engine import JaxEngine, JaxStep
from diloco_cli.worker.mailbox import Image
from diloco_cli.worker.trainer.task import Task, horizon
from diloco_cli.worker.trainer.weights_and_books import TrainedWeights

Seconds = float


class CurvePoint(NamedTuple):
    """The held-out loss of the global weights at a moment."""

    seconds: Seconds
    tokens: float
    """Trained by then, also what is in no version yet."""
    loss: float


@dataclass(frozen=True)
class Watch:
    """How often the loss of the global weights is measured while they are trained."""

    every: Seconds
    measure: Callable[[dict[str, np.ndarray]], float]


class MemoryPayloads:
    """The part of a server's store that merging reads."""

    run = RUN

    def __init__(self) -> None:
        self.frames: dict[str, Frame] = {}

    def payload(self, digest: str) -> memoryview:
        return self.frames[digest].data


@dataclass(frozen=True)
class Trained:
    """What a run came to."""

    weights: dict[str, np.ndarray]
    """The global weights, as regions hold them after the end."""
    average: dict[str, np.ndarray]
    """Of the published weights over the last rounds, if the run keeps one; else the weights."""
    seconds: Seconds
    """Virtual, until the budget was spent."""
    goodput: float
    """Tokens trained ÷ tokens of all regions at their own full speed in that time."""
    versions: int
    """Rounds of one fragment, on average."""
    members: float
    """Contributors of a round ÷ regions."""
    staleness: float
    bits_up: float
    """A parameter, of an average frame."""
    bits_down: float
    lost: float
    """Tokens that deaths undid."""
    discarded: float
    """Tokens that adopting dropped."""
    kills: int


class Training(Simulation):
    """A play whose regions train."""

    def __init__(
        self,
        spec: RunSpec,
        scenario: Scenario,
        tasks: Mapping[str, Task],
        *,
        habits: TrainingOptions | None = None,
        refund: bool = False,
        watch: Watch | None = None,
    ) -> None:
        """With `refund`, tokens that a death undid are trained again within the budget."""
        self._watch = watch
        self.spec, self.parts = spec, resolve(spec)
        self.settings, self.payloads = settings_of(spec, self.parts), MemoryPayloads()
        self.left, self.refund = float(spec.budget.tokens), refund
        self._horizon = horizon(spec)
        self.undone = 0.0
        self.up_bytes = self.up_values = self.down_bytes = self.down_values = 0
        self._tasks, self._habits = tasks, habits or TrainingOptions()
        self.learners: list[TrainingRegion] = []
        self.curve: list[CurvePoint] = []
        self._newest_bytes: dict[int, int] = {}
        self._alike: dict[JaxStep, int] = {}
        """How many learners share a compiled step."""
        self.tips = first_versions(spec, self.parts)
        """The newest version of each fragment."""
        self.images = [{tip.number: _image(tip)} for tip in self.tips]
        """Of each fragment, those that a region may still ask for, by number."""
        super().__init__(scenario)

    # What learners ask

    def newest(self, fragment: int) -> Image:
        return self.image(fragment, self.tips[fragment].number)

    def image(self, fragment: int, number: int) -> Image:
        return self.images[fragment][number]

    def posted(self, frame: Frame) -> None:
        self.payloads.frames[frame.digest] = frame
        self.up_bytes += len(frame.data)
        self.up_values += frame.header.size

    def train_until(self, now: Seconds) -> None:
        """Whatever happened before now has happened, so nothing can change these steps any more."""
        due = [(learner, learner.due(now)) for learner in self.learners]
        for number in range(max((steps for _, steps in due), default=0)):
            ready = [learner for learner, steps in due if steps > number]
            place = int((1 - self.left / self.spec.budget.tokens) * self._horizon)
            may = [learner for learner in ready if self._may(learner)]
            for learner in may:  # A live region hears of it a heartbeat later.
                learner.own.stepper.place(place)
            train_together(may, self._alike)

    def _may(self, learner: TrainingRegion) -> bool:
        if self.left < learner.task.tokens:
            self.left = 0.0
            return False
        self.left -= learner.task.tokens
        return True

    def lost(self, tokens: float) -> None:
        self.undone += tokens
        if self.refund:
            self.left += tokens

    # What the simulator asks

    def region_of(self, site: RegionSite) -> SimulatedRegion:
        learner = TrainingRegion(site, self.scenario, self._tasks[site.name], self, self._habits)
        self.learners.append(learner)
        step = cast(JaxStep, learner.task.step)
        self._alike[step] = self._alike.get(step, 0) + 1
        return learner

    def _published(self, fragment: int, members: dict[str, Receipt]) -> None:
        self._make(fragment, list(members.values()), drain=False)
        super()._published(fragment, members)

    def _make(self, fragment: int, receipts: list[Receipt], *, drain: bool) -> None:
        old, place = self.tips[fragment], self.parts.layout.fragments[fragment]
        live = self.server.ledger.slots[fragment].live
        how: dict[str, Any] = {"drain": drain, "live": live}
        made = next_version(self.settings, self.payloads, old, place, receipts, **how)
        if isinstance(made, Spoiled):
            raise RunFailed(f"Round {old.number} of fragment {fragment} failed: {made.why}.")
        version, data = made
        self._newest_bytes[fragment] = len(data)
        frame = open_frame(data, size=place.size)
        decoded, digest = frame.added_to(old.state.published)
        if digest != version.digest or not np.array_equal(decoded, version.state.published):
            raise RunFailed(f"Version {version.number} of fragment {fragment} does not decode.")
        self.down_bytes += len(data)
        self.down_values += place.size
        self.tips[fragment] = version
        self.images[fragment][version.number] = _image(version)
        self._forget(fragment)
        for receipt in receipts:
            del self.payloads.frames[receipt.digest]

    def _forget(self, fragment: int) -> None:
        """Drops what lies behind every region: nobody goes back behind its own version."""
        images = self.images[fragment]
        oldest = min(learner.own.books[fragment].version for learner in self.learners)
        for number in [number for number in images if number < oldest]:
            del images[number]

    def frame_bytes(self, region: SimulatedRegion, fragment: int) -> int:
        return len(cast(TrainingRegion, region).sent[fragment].data)

    def version_bytes(self, fragment: int) -> int:
        return self._newest_bytes[fragment]

    def _look(self) -> None:
        """Measures what regions were given by now; steps that are in no version do not count."""
        assert self._watch is not None
        self.train_until(self.agenda.now)
        trained = self.spec.budget.tokens - self.left
        loss = self._watch.measure(self.weights())
        self.curve.append(CurvePoint(self.agenda.now, trained, loss))
        self.agenda.at(self.agenda.now + self._watch.every, self._look)

    # From the first step to the last weights

    def train(self) -> Trained:
        """Trains until the budget is spent, then merges what is still held."""
        if self._watch is not None:
            self.agenda.at(0.0, self._look)
        self.agenda.run(math.inf, lambda: self.left <= 0)
        seconds, learners = self.agenda.now, self.learners
        full = sum(site.tokens / site.step for site in self.scenario.sites) * seconds
        trained = self.spec.budget.tokens + (self.undone if self.refund else 0.0)
        outcome = self.tally.outcome(learners, now=seconds, events=0)
        while any(self._drain(number, learners) for number in range(len(self.tips))):
            pass
        return Trained(
            weights=self.weights(),
            average=self.weights(average=True),
            seconds=seconds,
            goodput=(trained - self.undone) / full,
            versions=round(outcome.versions / len(self.tips)),
            members=outcome.participation,
            staleness=outcome.staleness,
            bits_up=8 * self.up_bytes / max(1, self.up_values),
            bits_down=8 * self.down_bytes / max(1, self.down_values),
            lost=self.undone,
            discarded=self._discarded(learners),
            kills=outcome.faults,
        )

    def _drain(self, fragment: int, learners: list[TrainingRegion]) -> bool:
        """Merges what waits or is still held; says whether there was anything."""
        receipts = []
        newest = self.tips[fragment]
        for learner in learners:
            learner.adopt(fragment, newest.number, newest.merged.get(learner.name, ""))
            book = learner.own.books[fragment]
            if book.flight is None and book.held.steps >= 1:
                learner.send(fragment)
            if learner.own.books[fragment].flight is not None:
                receipts.append(_receipt(learner.sent[fragment]))
        if receipts:
            self._make(fragment, receipts, drain=True)
        return bool(receipts)

    def weights(self, *, average: bool = False) -> dict[str, np.ndarray]:
        """The global weights; with `average`, that of the last rounds where one is kept."""
        weights = {
            tensor.name: np.empty(tensor.shape, "f4") for tensor in self.parts.model.tensors()
        }
        for fragment, tip in zip(self.parts.layout.fragments, self.tips, strict=True):
            state = tip.state.load()
            kept = state.average if average and state.average is not None else state.published
            scatter(kept, fragment, weights)
        return weights

    def _discarded(self, learners: list[TrainingRegion]) -> float:
        sizes = self.settings.sizes
        return sum(
            size * learner.own.books[number].totals.discarded / sum(sizes)
            for learner in learners
            for number, size in enumerate(sizes)
        )


def train_together(learners: Sequence[TrainingRegion], alike: Mapping[JaxStep, int]) -> None:
    """Makes one step of each; all that share a compiled step in one call, if none is missing.

    A small model's step is mostly overhead, which is then paid once. Fewer than all step one
    by one: every other number of them would have to be compiled.
    """
    groups: dict[JaxStep, list[TrainingRegion]] = {}
    for learner in learners:
        groups.setdefault(cast(JaxStep, learner.task.step), []).append(learner)
    for step, group in groups.items():
        if 1 < len(group) == alike[step]:
            _train_abreast(step, [learner.own for learner in group])
        else:
            for learner in group:
                learner.own.train()
        for learner in group:
            learner.stepped()


def _train_abreast(step: JaxStep, own: Sequence[TrainedWeights]) -> None:
    batches = [books.stream.batch(books.cursor) for books in own]
    tokens = np.stack([tokens for tokens, _ in batches])
    engines = [cast(JaxEngine, books.engine) for books in own]
    moved = _abreast(step)(
        [engine.params for engine in engines], [engine.state for engine in engines], tokens
    )
    for books, engine, params, state, (_, cursor) in zip(
        own, engines, *moved, batches, strict=True
    ):
        engine.moved(params, state)
        books.stepped(cursor, books.tokens_a_step)


@functools.lru_cache(maxsize=24)
def _abreast(step: JaxStep) -> Any:
    """The step of several regions in one call; compiled for each number of them."""

    def go(params: list[Any], states: list[Any], tokens: jax.Array) -> tuple[list[Any], list[Any]]:
        weights, memories = (jax.tree.map(_stack, *trees) for trees in (params, states))
        abreast: Any = jax.vmap(step.step)
        new, moved, *_ = abreast(weights, memories, tokens)
        return _split(new, len(params)), _split(moved, len(params))

    return jax.jit(go, donate_argnums=(0, 1))


def _stack(*leaves: jax.Array) -> jax.Array:
    return jnp.stack(leaves)


def _split(tree: Any, count: int) -> list[Any]:
    leaves, shape = jax.tree.flatten(tree)
    return [shape.unflatten([leaf[number] for leaf in leaves]) for number in range(count)]


def first_versions(spec: RunSpec, parts: RunObjects) -> list[Version]:
    """Version 0 of every fragment, as a server begins."""
    weights, versions = parts.model.init(spec.seed), []
    for fragment in parts.layout.fragments:
        theta = gather(weights, fragment)
        state = StoredState(theta, parts.outer.start(fragment.size), theta)
        versions.append(Version(0, state, vector_digest(theta), {}, ()))
    return versions


def _image(version: Version) -> Image:
    return Image(version.number, version.merged, version.digest, version.state.load().published)


def _receipt(frame: Frame) -> Receipt:
    header = frame.header
    work = (header.base, header.clock, frame.digest, header.prev, header.tokens, header.steps)
    return Receipt(header.region, header.fragment, *work, bytes=len(frame.data))
