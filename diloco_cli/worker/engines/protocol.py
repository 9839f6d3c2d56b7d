"""What a trainer asks of an engine, the framework under it.

An engine holds one region's weights and inner optimiser, wherever they live: on a CPU, on
a device, on several. At the border everything is float32 numpy, copied, so that nothing a
trainer holds changes with the next step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple, Protocol, SupportsFloat

import numpy as np
from numpy.typing import ArrayLike

from diloco_cli.core.fragments import Fragment
from diloco_cli.core.unmerged_work import Mix
from diloco_cli.wire.frame import Header

Arrays = Mapping[str, np.ndarray]
Vector = ArrayLike
"""One fragment's values, wherever an engine keeps them; there may be more after the last."""


class EngineSnapshot(NamedTuple):
    """Copies of everything an engine holds, all of one step."""

    params: dict[str, np.ndarray]
    optimizer: dict[str, np.ndarray]
    """The optimiser's state, each array under its place in it."""
    place: int = 0
    """Of the next step, in the learning-rate schedule."""


class StepCost(NamedTuple):
    """What one inner step asks of a region's devices."""

    flops: float
    """Floating-point operations, from the shapes; what is computed twice counts once."""
    devices: int = 1
    peak: float | None = None
    """Operations a second that one of them can do at best; None if that is not known."""

    def tflops(self, steps: float) -> float:
        """Tera-operations per second of one device, at so many steps per second."""
        return self.flops * steps / self.devices / 1e12

    def mfu(self, steps: float) -> float | None:
        """Share of what the devices can do at best."""
        return self.tflops(steps) * 1e12 / self.peak if self.peak else None


class StepFacts(NamedTuple):
    """What is known of one inner step beside its loss."""

    learning_rate: float | None = None
    gradient_norm: float | None = None
    """Before it was clipped."""


class HeldWork(Protocol):
    """What was held of a fragment at one step; it may not be computed yet."""

    def pack(self, header: Header, *, level: int) -> bytes:
        """Writes the frame; any thread may wait for it. NotFinite where a value is no number."""
        ...


class ShardedFolder(Protocol):
    """Where an engine's arrays are saved as they lie, each device its part."""

    def save(
        self,
        notes: Mapping[str, Any],
        held: Sequence[Any],
        optimizer: Mapping[str, Any],
        parts: Mapping[str, Sequence[str]],
        number: int | None = None,
    ) -> None: ...


class Engine(Protocol):
    """One region's weights and inner optimiser, whoever makes the steps."""

    def load(self, params: Arrays, optimizer: Arrays | None) -> bool:
        """Goes on from these; says whether the optimiser's state could be taken over.

        None, or the state of another optimiser, means a fresh one, at the beginning of the
        learning-rate schedule.
        """
        ...

    def wait(self) -> None:
        """Waits until the step in progress is done."""
        ...

    def read(self, fragment: Fragment) -> np.ndarray:
        """Copies one fragment's weights as a vector."""
        ...

    def write(self, fragment: Fragment, values: np.ndarray) -> None:
        """Replaces one fragment's weights."""
        ...

    def keep(self, fragment: Fragment, values: np.ndarray) -> Vector:
        """Keeps values of a fragment, which nobody changes any more; any thread may ask for it."""
        ...

    def held(self, fragment: Fragment, anchor: Vector, codec: Mapping[str, Any]) -> HeldWork:
        """Begins to compute `anchor − weights` as of now, and to encode it; waits for nothing."""
        ...

    def adopt(
        self, fragment: Fragment, anchor: Vector, new: Vector, mix: Mix, frame: Vector | None
    ) -> None:
        """Makes one fragment's weights `new − mixed(anchor − weights, mix, frame)`."""
        ...

    def snapshot(self) -> EngineSnapshot: ...

    def reset_optimizer(self) -> None:
        """Forgets the optimiser's averages; where the learning-rate schedule stands is kept."""
        ...

    def start_trace(self, folder: Path) -> None:
        """Begins to record what the devices do; OSError where it cannot be written."""
        ...

    def stop_trace(self) -> None:
        """Writes what was recorded; waits until the steps made so far are done."""
        ...

    def memory(self) -> int | None:
        """Bytes in use on the fullest of its devices; None where they do not say."""
        ...

    def facts(self) -> StepFacts | None:
        """Of the step before the last, which is done: waits for nothing. None if not known."""
        ...


class TrainingEngine(Engine, Protocol):
    """An engine that makes the steps itself, from tokens."""

    def place(self, place: int) -> None:
        """Says where in the learning-rate schedule the next step is; else it is one further on."""
        ...

    def step(self, tokens: np.ndarray) -> SupportsFloat:
        """Makes one inner step; `float` waits for its loss, which may not be computed yet.

        The loss is NaN when it, or the gradient, was not finite: then nothing has moved.
        """
        ...

    def place_now(self) -> int:
        """Where in the learning-rate schedule it is; waits for the step in progress."""
        ...

    def save(
        self,
        folder: ShardedFolder,
        notes: Mapping[str, Any],
        anchors: Iterable[tuple[Fragment, Vector]],
    ) -> None:
        """Has what is held of every fragment and the optimiser saved where they lie; waits only
        until they are copied to the host."""
        ...

    def evaluate(self, params: Arrays, batches: Iterable[np.ndarray]) -> float:
        """Measures the mean loss of other weights, in nats per token; its own stay as they are."""
        ...


class Orders(Protocol):
    """The way from the lead to all followers: every one of them hears the same, in one order."""

    def order(self, name: str, **arguments: Any) -> AbstractContextManager[None]:
        """Announces what the lead is about to do; what it sends inside belongs to it."""
        ...

    def give(self, host: int, values: np.ndarray, /, name: str = ..., **arguments: Any) -> None:
        """Sends values to one host, as part of an order or as one of its own."""
        ...

    def forget(self, number: int) -> None:
        """Followers need not keep this vector any longer; may be called at any time."""
        ...

    def note_speed(self, host: int, seconds: float) -> None:
        """Remembers what a host took, last, for the work that all hosts are timed by."""
        ...

    def speeds(self) -> Mapping[int, float]:
        """These seconds, by host; empty until all hosts have been timed."""
        ...

    def unsaved(self) -> str:
        """Why a follower could not write its part of a sharded checkpoint; empty if all could."""
        ...


class ToLead(Protocol):
    """What a follower tells the lead, beside obeying; any thread may."""

    def tell_speed(self, seconds: float) -> None:
        """What this host takes for the work that all hosts are timed by."""
        ...

    def tell_unsaved(self, why: str) -> None:
        """It could not write its part of a sharded checkpoint."""
        ...


class CompiledStep(Protocol):
    """An inner step, compiled on first use; several engines may share it."""

    @property
    def cost(self) -> StepCost: ...

    def engine(self) -> TrainingEngine:
        """Makes an engine that holds nothing yet."""
        ...


def mixed(
    held: Callable[[], np.ndarray], mix: Mix, frame: Callable[[], np.ndarray] | None
) -> np.ndarray | None:
    """Does to the held array what the books did to the held work; None means nothing is held."""
    # Not 0 · held: what is dropped may be dropped because it is not finite.
    result = np.float32(mix.held) * held() if mix.held else None
    if not mix.flight:
        return result
    if frame is None:
        raise ValueError("a merged frame leaves `held`, but its values were not given")
    gone = np.float32(mix.flight) * frame()
    return -gone if result is None else result - gone
