"""What a model is, and the registry of all kinds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, runtime_checkable

import numpy as np

from diloco_cli.core.fragments import Tensor
from diloco_cli.registry import Registry

LossFn = Callable[[dict[str, Any], Any], tuple[Any, Any]]
"""(params, tokens[batch, sequence + 1]) → mean loss in nats per token, number of tokens.

Arguments and results are arrays of the engine's framework.
"""


class Model(Protocol):
    """Anything that has named tensors, first weights and a loss."""

    def tensors(self) -> tuple[Tensor, ...]: ...
    def init(self, seed: int) -> dict[str, np.ndarray]: ...
    def loss_fn(self, *, penalties: bool = True) -> LossFn:
        """Gives the loss; without penalties it is what held-out text is measured by."""
        ...


@runtime_checkable
class Described(Protocol):
    """What a model may say of itself, for checks before a run and for plans; optional."""

    @property
    def vocabulary(self) -> int:
        """Different tokens it can tell apart."""
        ...

    @property
    def depth(self) -> int:
        """Layers; asked before `tensors`, whose list may be too long to make."""
        ...

    def activation_bytes(self, tokens: float) -> float:
        """Roughly what a backward pass over so many tokens keeps, without recomputation."""
        ...


models: Registry[Model] = Registry("model")


def parameters(model: Model) -> int:
    """Counts the numbers a model is made of."""
    return sum(tensor.size for tensor in model.tensors())
