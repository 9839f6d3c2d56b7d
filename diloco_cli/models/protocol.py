"""What a model is, and the registry of all kinds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

from diloco_cli.core.fragments import Tensor
from diloco_cli.registry import Registry

LossFn = Callable[[dict[str, Any], Any], tuple[Any, Any]]
"""(params, tokens[batch, sequence + 1]) → mean loss in nats per token, number of tokens.

Arguments and results are arrays of the engine's framework.
"""


@dataclass(frozen=True)
class LossForm:
    """How a loss is computed; all forms of one loss give the same number, but for rounding."""

    compute: str = "float32"
    """What activations and products are rounded to: `float32` or `bfloat16`. Weights, norms,
    softmax, positions and all sums are float32 in either case."""

    remat: str = "none"
    """`block`: a block is computed again on the way back, instead of being remembered. The
    blocks are then walked through by one loop, which takes their weights as stacks."""

    chunks: int = 1
    """Parts in which the loss is computed, so that the logits of one part exist at a time."""

    attention: str = "auto"
    """Which program computes attention: `auto`, `xla`, `cudnn` or `splash`."""

    mesh: Any = None
    """The engine's devices by axis (data, fsdp, tensor), where there are several."""

    separator: int | None = None
    """The token that ends a document, where documents are kept apart: no token sees another
    document, positions begin anew in each, and its first token is not predicted."""


PLAIN = LossForm()
"""One device, float32, everything remembered: the fastest form of a small model."""


class Model(Protocol):
    """Anything that has named tensors, first weights and a loss."""

    def tensors(self) -> tuple[Tensor, ...]: ...
    def init(self, seed: int) -> dict[str, np.ndarray]: ...
    def loss_fn(self, *, penalties: bool = True, form: LossForm = PLAIN) -> LossFn:
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

    def activation_bytes(
        self,
        batch: float,
        sequence: int,
        form: LossForm = PLAIN,
        *,
        tensor: int = 1,
        flash: bool = False,
    ) -> float:
        """Roughly what a backward pass over so many sequences keeps, on one of `tensor` devices.

        With `flash` attention keeps no pairs of tokens.
        """
        ...

    def step_flops(self, batch: int, sequence: int) -> float:
        """Floating-point operations of one inner step; what is computed again does not count."""
        ...


@runtime_checkable
class Partitioned(Protocol):
    """What a model may say of how its weights are spread over devices; optional.

    Without it a model trains in the plain form, on any mesh whose `tensor` is 1.
    """

    def stacks(self) -> Mapping[str, tuple[str, ...]]:
        """Tensors that `remat: block` walks through in order: the stack's name, then theirs."""
        ...

    def tensor_axes(self) -> Mapping[str, int]:
        """The axis of a tensor that the mesh's `tensor` cuts; tensors not named stay whole."""
        ...

    def tensor_counts(self) -> Mapping[str, int]:
        """Options whose value the mesh's `tensor` must divide, such as heads."""
        ...


@runtime_checkable
class DrawnByTensor(Protocol):
    """A model whose first weights can be had one tensor at a time; optional, for large models."""

    def draw(self, tensor: Tensor, seed: int) -> np.ndarray:
        """What `init` gives for this tensor, to the bit."""
        ...


class FirstTensors(Mapping[str, np.ndarray]):
    """A model's first weights, each tensor drawn when it is asked for and then forgotten."""

    def __init__(self, model: Model, source: DrawnByTensor, seed: int) -> None:
        self._tensors = {tensor.name: tensor for tensor in model.tensors()}
        self._source, self._seed = source, seed

    def __getitem__(self, name: str) -> np.ndarray:
        return self._source.draw(self._tensors[name], self._seed)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def first_tensors(model: Model, seed: int) -> Mapping[str, np.ndarray]:
    """A model's first weights by name, without having all of them in memory if it can be."""
    if isinstance(model, DrawnByTensor):
        return FirstTensors(model, model, seed)
    return model.init(seed)


models: Registry[Model] = Registry("model")


def parameters(model: Model) -> int:
    """Counts the numbers a model is made of."""
    return sum(tensor.size for tensor in model.tensors())
