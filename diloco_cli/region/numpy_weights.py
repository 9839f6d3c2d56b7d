"""Weights in numpy arrays, which the loop changes in place."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np

from diloco_cli.core.fragments import Piece, Tensor
from diloco_cli.errors import SpecError
from diloco_cli.region.names import Names, sources


class NumpyWeights:
    """Arrays by name; rows are read from and written into these very arrays."""

    def __init__(
        self,
        arrays: Mapping[str, np.ndarray],
        *,
        names: Names | None = None,
        embeddings: Collection[str] = (),
    ) -> None:
        """`embeddings` are tensors, by their names on the wire, whose rows are used one by one."""
        self._arrays = arrays
        self._sources = sources(arrays, names, embeddings)
        for name, array in arrays.items():
            refuse_narrow(name, str(array.dtype))

    def tensors(self) -> tuple[Tensor, ...]:
        return tuple(
            Tensor(wire, self._view(wire).shape, source.embedding)
            for wire, source in self._sources.items()
        )

    def read(self, piece: Piece) -> np.ndarray:
        return np.array(rows_of(self._view(piece.tensor), piece), np.float32, copy=True)

    def write(self, piece: Piece, rows: np.ndarray) -> None:
        rows_of(self._view(piece.tensor), piece)[...] = rows

    def _view(self, wire: str) -> np.ndarray:
        source = self._sources[wire]
        array = self._arrays[source.name]
        return array.T if source.transposed else array


def rows_of(values: np.ndarray, piece: Piece) -> np.ndarray:
    """A view of a piece's rows; a tensor of no dimension has none."""
    return values[piece.start : piece.stop] if piece.shape else values[...]


def refuse_narrow(name: str, dtype: str) -> None:
    """Raises for weights too narrow to train in: what they round away is never sent."""
    if dtype.rpartition(".")[2] not in ("float32", "float64"):
        raise SpecError(
            f"{name} is {dtype}. A step changes weights by less than that can hold, and what is "
            "rounded away is lost to the run.",
            hint="Keep the weights in float32 and compute in less; or give the adapter the "
            "float32 copies that your optimiser keeps (`master=`).",
        )
