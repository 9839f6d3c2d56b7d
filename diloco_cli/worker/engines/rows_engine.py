"""The engine over weights that somebody else trains: rows are read and written on demand.

Whoever owns the training loop says how to read and how to write some rows of a tensor, and that
is all; nothing is copied on steps without mail. Vectors are computed with numpy on the host.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, SupportsFloat

import numpy as np

from diloco_cli.core.fragments import Fragment, Layout, Piece, Tensor, gather
from diloco_cli.core.unmerged_work import Mix
from diloco_cli.errors import SpecError
from diloco_cli.wire.frame import Header, pack
from diloco_cli.worker.engines.protocol import (
    Arrays,
    EngineSnapshot,
    HeldWork,
    StepFacts,
    Vector,
    mixed,
)

MOST_NAMED = 8


class Weights(Protocol):
    """The weights of a model in training, in whatever framework: what a region needs of them.

    A tensor is called by its name on the wire and has its shape there. Rows are indices of the
    first axis; a tensor of no dimension is one piece of the shape ().
    """

    def tensors(self) -> Sequence[Tensor]:
        """Every tensor that is trained, with its shape."""
        ...

    def read(self, piece: Piece) -> np.ndarray:
        """Copies rows `piece.start` to `piece.stop` of `piece.tensor` as float32."""
        ...

    def write(self, piece: Piece, rows: np.ndarray) -> None:
        """Replaces these rows; the next step starts from them, the optimiser's copies too."""
        ...


class OptimizerState(Protocol):
    """What the inner optimiser remembers; saved and loaded with the weights it belongs to."""

    def save(self) -> dict[str, np.ndarray]:
        """Copies its state, each array under a name."""
        ...

    def load(self, saved: Mapping[str, np.ndarray]) -> None:
        """Goes on from what `save` gave."""
        ...

    def reset(self) -> None:
        """Forgets its averages: the weights are others than before."""
        ...


ToldFacts = tuple[SupportsFloat | None, SupportsFloat | None]
"""Learning rate and gradient norm; they may still be on a device."""


class RowsEngine:
    """One region's weights, which are somebody else's."""

    def __init__(
        self, weights: Weights, layout: Layout, optimizer: OptimizerState | None = None
    ) -> None:
        self.weights, self.layout, self.optimizer = weights, layout, optimizer
        self._shapes = {tensor.name: tensor.shape for tensor in weights.tensors()}
        self._told: tuple[ToldFacts, ToldFacts] = ((None, None), (None, None))
        """Of the step before the last, and of the last."""

    def load(self, params: Arrays, optimizer: Arrays | None, *, steps: int = 0) -> bool:
        for fragment in self.layout.fragments:
            self.write(fragment, gather(params, fragment))
        if not optimizer or self.optimizer is None:
            return False
        self.optimizer.load(optimizer)
        return True

    def wait(self) -> None:
        """A step is done when its owner says so."""

    def read(self, fragment: Fragment) -> np.ndarray:
        vector = np.empty(fragment.size, np.float32)
        for piece in fragment.pieces:
            rows = self.weights.read(piece)
            if (found := _form(rows)) != (piece.shape, "float32"):
                raise SpecError(
                    f"The weights give {_words(*found)} for rows {piece.start}:{piece.stop} of "
                    f"{piece.tensor}, where {_words(piece.shape, 'float32')} belongs.",
                    hint="Have `Weights.read` give the rows of its piece; "
                    "`diloco_cli.testing.check(weights)` shows what is wrong with it.",
                )
            vector[piece.span] = rows.reshape(-1)
        return vector

    def write(self, fragment: Fragment, values: np.ndarray) -> None:
        for piece in fragment.pieces:
            self.weights.write(piece, values[piece.span].reshape(piece.shape))

    def keep(self, fragment: Fragment, values: np.ndarray) -> Vector:
        return values

    def held(self, fragment: Fragment, anchor: Vector, codec: Mapping[str, Any]) -> HeldWork:
        # The rows are copied now: what comes next may be a step.
        local = self.read(fragment)
        return HeldRows(np.asarray(anchor), lambda: local)

    def adopt(
        self, fragment: Fragment, anchor: Vector, new: Vector, mix: Mix, frame: Vector | None
    ) -> None:
        self.write(fragment, adopted(anchor, new, mix, frame, lambda: self.read(fragment)))

    def snapshot(self) -> EngineSnapshot:
        params = {name: np.empty(shape, np.float32) for name, shape in self._shapes.items()}
        for fragment in self.layout.fragments:
            vector = self.read(fragment)
            for piece in fragment.pieces:
                rows = params[piece.tensor]
                rows = rows[piece.start : piece.stop] if piece.shape else rows
                rows[...] = vector[piece.span].reshape(piece.shape)
        return EngineSnapshot(params, self.optimizer.save() if self.optimizer else {})

    def reset_optimizer(self) -> None:
        if self.optimizer:
            self.optimizer.reset()

    def start_trace(self, folder: Path) -> None:
        raise OSError(errno.ENOTSUP, "a trainer of your own records its own traces")

    def stop_trace(self) -> None:
        """None is ever recorded."""

    def memory(self) -> int | None:
        return None

    def tell(self, facts: ToldFacts) -> None:
        """Takes what the owner of the loop says of a step."""
        self._told = self._told[1], facts

    def facts(self) -> StepFacts:
        return StepFacts(*(None if fact is None else float(fact) for fact in self._told[0]))


@dataclass(frozen=True)
class HeldRows:
    """An anchor, and rows that were copied, or are being copied, out of the weights."""

    anchor: np.ndarray
    local: Callable[[], np.ndarray]

    def pack(self, header: Header, *, level: int) -> bytes:
        return pack(header, self.anchor - self.local(), level=level)


def adopted(
    anchor: Vector, new: Vector, mix: Mix, frame: Vector | None, local: Callable[[], np.ndarray]
) -> np.ndarray:
    """The weights of a fragment after a new version, computed on the host."""
    held = mixed(
        lambda: np.asarray(anchor) - local(),
        mix,
        None if frame is None else lambda: np.asarray(frame),
    )
    return np.asarray(new) if held is None else np.asarray(new) - held


def check_tensors(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> None:
    """Raises unless these are the tensors of the run's model, with all that differs."""
    if not (wrong := list(_differences(found, wanted))):
        return
    more = [f"and {len(wrong) - MOST_NAMED} more"] if len(wrong) > MOST_NAMED else []
    lines = "".join(f"\n  {line}" for line in [*wrong[:MOST_NAMED], *more])
    raise SpecError(
        f"The weights of this trainer are not those of the run's model:{lines}",
        hint="Map names and axes (`names=`) to those of `model`, or describe these weights anew "
        "with `Region.describe` and begin a new run.",
    )


def _differences(found: Sequence[Tensor], wanted: Sequence[Tensor]) -> Iterator[str]:
    shapes = {tensor.name: tuple(tensor.shape) for tensor in found}
    for tensor in wanted:
        if tensor.name not in shapes:
            yield f"{tensor.name} {list(tensor.shape)} is missing"
        elif (shape := shapes[tensor.name]) != tensor.shape:
            turned = ", which is the other way round" if shape == tensor.shape[::-1] else ""
            yield f"{tensor.name} has the shape {list(shape)}, the model's {list(tensor.shape)}" + (
                turned
            )
    for name in sorted(shapes.keys() - {tensor.name for tensor in wanted}):
        yield f"{name} {list(shapes[name])} is no tensor of the model"


def _form(rows: object) -> tuple[tuple[int, ...] | None, str]:
    return (
        (rows.shape, str(rows.dtype))
        if isinstance(rows, np.ndarray)
        else (None, type(rows).__name__)
    )


def _words(shape: tuple[int, ...] | None, kind: str) -> str:
    return f"no array but {kind}" if shape is None else f"{kind}{list(shape)}"
