"""Is an adapter fit for a run? `check(weights)` for the tests of whoever writes or uses one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from diloco_cli.core.fragments import Piece, Tensor
from diloco_cli.errors import SpecError
from diloco_cli.worker.engines.rows_engine import OptimizerState, Weights

FINE = np.float32(1.0) + np.float32(2.0**-20)
"""A number that narrower types than float32 cannot hold."""


def check(
    weights: Weights,
    *,
    step: Callable[[], object] | None = None,
    optimizer: OptimizerState | None = None,
) -> None:
    """Raises with the first thing that is wrong; afterwards the weights are as they were.

    Rows that are written must be read back to the bit, in float32, and no others may change.
    With `step`, which makes one step of the training loop, a step after a write must start from
    what was written: an optimiser that moves copies of its own must have them written too. With
    `optimizer`, what it has saved must be what it goes on from.
    """
    tensors = weights.tensors()
    if not tensors:
        raise SpecError("The weights have no tensors.", hint="Is every parameter frozen?")
    before = {tensor.name: _read(weights, _whole(tensor)) for tensor in tensors}
    try:
        for tensor in tensors:
            _check_rows(weights, tensor, before)
        if step is not None:
            _check_step(weights, tensors, before, step)
        if optimizer is not None:
            _check_optimizer(optimizer)
    finally:
        for tensor in tensors:
            weights.write(_whole(tensor), before[tensor.name])


def _check_rows(weights: Weights, tensor: Tensor, before: dict[str, np.ndarray]) -> None:
    for piece in _pieces(tensor):
        new = np.random.default_rng(0).normal(size=piece.shape).astype(np.float32)
        new.reshape(-1)[:1] = FINE
        weights.write(piece, new.copy())
        found = _read(weights, piece)
        if not np.array_equal(found, new):
            place = tuple(np.argwhere(np.atleast_1d(found != new))[0].tolist())
            value, wanted = np.atleast_1d(found)[place], np.atleast_1d(new)[place]
            raise SpecError(
                f"{_rows(piece)}: {wanted!r} was written and {value!r} is read.",
                hint="The weights must be float32, and what is read must be what is written: "
                "the float32 master copy where there is one.",
            )
        whole = _read(weights, _whole(tensor))
        expected = before[tensor.name].copy()
        (expected[piece.start : piece.stop] if piece.shape else expected)[...] = new
        if not np.array_equal(whole, expected):
            raise SpecError(
                f"{_rows(piece)}: writing them has changed other rows.",
                hint="`write` replaces rows start to stop of the first axis, and no others.",
            )
        held = found.copy()
        weights.write(piece, new + 1)
        if not np.array_equal(found, held):
            raise SpecError(
                f"{_rows(piece)}: what was read has changed with a later write.",
                hint="`read` gives a copy.",
            )
        weights.write(_whole(tensor), before[tensor.name])


def _check_step(
    weights: Weights,
    tensors: Sequence[Tensor],
    before: dict[str, np.ndarray],
    step: Callable[[], object],
) -> None:
    step()  # So that an optimiser that makes its copies late has made them.
    noise, written = np.random.default_rng(1), {}
    for tensor in tensors:
        old = before[tensor.name]
        scale = float(np.abs(old).mean()) or 0.1
        shift = noise.normal(size=old.shape).astype(np.float32) * np.float32(scale)
        written[tensor.name] = old + shift
        weights.write(_whole(tensor), written[tensor.name].copy())
    step()
    for tensor in tensors:
        after = _read(weights, _whole(tensor))
        moved = float(np.linalg.norm(after - written[tensor.name]))
        shifted = float(np.linalg.norm(written[tensor.name] - before[tensor.name]))
        back = float(np.linalg.norm(after - before[tensor.name]))
        if not np.isfinite(after).all():
            continue  # A step from random weights may diverge; then it did start from them.
        if back < moved and back < 0.5 * shifted:
            raise SpecError(
                f"{tensor.name}: a step after a write went on from what was there before it.",
                hint="`write` must also reach the copy that the optimiser moves (`master=`).",
            )


def _check_optimizer(optimizer: OptimizerState) -> None:
    saved = {name: np.array(values, copy=True) for name, values in optimizer.save().items()}
    optimizer.reset()
    optimizer.load(saved)
    again = optimizer.save()
    if saved.keys() != again.keys():
        name = sorted(saved.keys() ^ again.keys())[0]
        raise SpecError(f"The optimiser's {name} is lost when its state is loaded.")
    for name, values in saved.items():
        if not np.array_equal(values, again[name], equal_nan=values.dtype.kind == "f"):
            raise SpecError(f"The optimiser's {name} is another after its state was loaded.")


def _read(weights: Weights, piece: Piece) -> np.ndarray:
    found = weights.read(piece)
    if not isinstance(found, np.ndarray):
        raise SpecError(f"{_rows(piece)}: `read` gives {type(found).__name__}, no numpy array.")
    if found.dtype != np.float32 or found.shape != tuple(piece.shape):
        raise SpecError(
            f"{_rows(piece)}: `read` gives {found.dtype}{list(found.shape)}, "
            f"float32{list(piece.shape)} belongs there."
        )
    return found


def _pieces(tensor: Tensor) -> Iterator[Piece]:
    """All of a tensor, and some rows in its middle."""
    yield _whole(tensor)
    if tensor.rows > 2:
        start, stop = 1, tensor.rows - 1
        yield Piece(tensor.name, start, stop, (stop - start, *tensor.shape[1:]), 0)


def _whole(tensor: Tensor) -> Piece:
    return Piece(tensor.name, 0, tensor.rows, tuple(tensor.shape), 0)


def _rows(piece: Piece) -> str:
    return f"Rows {piece.start}:{piece.stop} of {piece.tensor}" if piece.shape else piece.tensor
