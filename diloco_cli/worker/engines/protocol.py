"""What a trainer asks of an engine, the framework under it.

An engine holds one region's weights and inner optimiser, wherever they live: on a CPU, on
a device, on several. At the border everything is float32 numpy, copied, so that nothing a
trainer holds changes with the next step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import NamedTuple, Protocol, SupportsFloat

import numpy as np

from diloco_cli.core.fragments import Fragment

Arrays = Mapping[str, np.ndarray]


class EngineSnapshot(NamedTuple):
    """Copies of everything an engine holds, all of one step."""

    params: dict[str, np.ndarray]
    optimizer: dict[str, np.ndarray]
    """The optimiser's state, each array under its place in it."""


class Engine(Protocol):
    """One region's weights and inner optimiser."""

    def load(self, params: Arrays, optimizer: Arrays | None) -> None:
        """Goes on from these; None means a fresh optimiser."""
        ...

    def step(self, tokens: np.ndarray) -> SupportsFloat:
        """Makes one inner step; `float` waits for its loss, which may not be computed yet.

        The loss is NaN when it, or the gradient, was not finite: then nothing has moved.
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

    def snapshot(self) -> EngineSnapshot: ...

    def reset_optimizer(self) -> None:
        """Forgets the optimiser's averages; where the learning-rate schedule stands is kept."""
        ...

    def evaluate(self, params: Arrays, batches: Iterable[np.ndarray]) -> float:
        """Measures the mean loss of other weights, in nats per token; its own stay as they are."""
        ...


class CompiledStep(Protocol):
    """An inner step, compiled on first use; several engines may share it."""

    def engine(self) -> Engine:
        """Makes an engine that holds nothing yet."""
        ...
