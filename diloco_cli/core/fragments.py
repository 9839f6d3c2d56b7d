"""Which parameters travel together?

The parameters of a model are cut into fragments of nearly equal size. A fragment is
exchanged as a unit: as one flat float32 vector, its pieces one after another.

    tensors   embed ███████████   w1 ████   w2 ████   norm █
    cut       fragment 0: embed[0:40] norm     fragment 1: embed[40:80] w1 …

A piece is a whole tensor or some rows of one (a row is one index of the first axis).
The cut depends on the tensors' names and shapes alone, so every process of a run finds
the same one; `Layout.digest` is how they compare.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise

import numpy as np

CHUNK = 1 << 20
"""Values worked on at a time: what an elementwise step needs beside its operands."""


@dataclass(frozen=True, slots=True)
class Tensor:
    name: str
    shape: tuple[int, ...]
    embedding: bool = False
    """Rows are used one by one, so merging goes by the plain mean."""
    parted: bool = False
    """Every row is a matrix of its own, such as an expert: it is a piece by itself, and rules
    that go by length and direction take it by itself."""

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def rows(self) -> int:
        return self.shape[0] if self.shape else 1


@dataclass(frozen=True, slots=True)
class Piece:
    """Rows `start` to `stop` of a tensor, at `offset` of the fragment's vector."""

    tensor: str
    start: int
    stop: int
    shape: tuple[int, ...]
    offset: int
    embedding: bool = False

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def span(self) -> slice:
        return slice(self.offset, self.offset + self.size)


@dataclass(frozen=True, slots=True)
class Fragment:
    number: int
    pieces: tuple[Piece, ...]

    @property
    def size(self) -> int:
        return self.pieces[-1].span.stop if self.pieces else 0  # They lie one after another.


@dataclass(frozen=True, slots=True)
class Layout:
    fragments: tuple[Fragment, ...]
    digest: str

    @property
    def size(self) -> int:
        return sum(fragment.size for fragment in self.fragments)


def cut(tensors: Sequence[Tensor], count: int) -> Layout:
    """Spreads the tensors over `count` fragments, largest first, each into the smallest.

    A tensor above 4/3 of the ideal size is split along its first axis. Should a fragment
    still exceed 4/3 of the ideal, smaller tensors are split as well, so the largest one
    stays within 4/3 of the ideal plus one row.
    """
    _check(tensors, count)
    attempts = []
    for fineness in (1, 2, 4):
        attempts.append(_pack(tensors, count, fineness))
        if _within_bound(attempts[-1]):
            break
    best = min(attempts, key=lambda fragments: max(each.size for each in fragments))
    return Layout(best, _digest(best))


def _check(tensors: Sequence[Tensor], count: int) -> None:
    names = Counter(tensor.name for tensor in tensors)
    if twice := [name for name, times in names.items() if times > 1]:
        raise ValueError(f"two tensors are called {twice[0]!r}")
    if empty := [tensor for tensor in tensors if tensor.size < 1]:
        raise ValueError(f"tensor {empty[0].name!r} of shape {empty[0].shape} has no values")
    rows = sum(tensor.rows for tensor in tensors)
    if not 1 <= count <= rows:
        raise ValueError(
            f"{count} fragments cannot each get a row: "
            f"{len(tensors)} tensors have {rows} rows together"
        )


def _pack(tensors: Sequence[Tensor], count: int, fineness: int) -> tuple[Fragment, ...]:
    pieces = [
        piece
        for tensor, parts in _split(tensors, count, fineness)
        for piece in _even_rows(tensor, parts)
    ]
    pieces.sort(key=lambda piece: (-piece.size, piece.tensor, piece.start))
    bins: list[list[Piece]] = [[] for _ in range(count)]
    sizes = [0] * count
    for piece in pieces:
        smallest = sizes.index(min(sizes))
        bins[smallest].append(piece)
        sizes[smallest] += piece.size
    return tuple(Fragment(number, _in_order(chosen)) for number, chosen in enumerate(bins))


def _split(tensors: Sequence[Tensor], count: int, fineness: int) -> list[tuple[Tensor, int]]:
    """Says into how many pieces each tensor goes; at least `count` pieces in all."""
    total = sum(tensor.size for tensor in tensors)
    parts = []
    for tensor in tensors:  # In whole numbers, so that no platform rounds differently.
        share = tensor.size * count * fineness
        wanted = -(-share // total) if 3 * share > 4 * total else 1
        parts.append(tensor.rows if tensor.parted else min(wanted, tensor.rows))
    while sum(parts) < count:
        able = [i for i, tensor in enumerate(tensors) if parts[i] < tensor.rows]
        largest = max(able, key=lambda i: (tensors[i].size / parts[i], tensors[i].name))
        parts[largest] += 1
    return list(zip(tensors, parts, strict=True))


def _even_rows(tensor: Tensor, parts: int) -> Iterator[Piece]:
    edges = [tensor.rows * part // parts for part in range(parts + 1)]
    for start, stop in pairwise(edges):
        shape = (stop - start, *tensor.shape[1:]) if tensor.shape else ()
        yield Piece(tensor.name, start, stop, shape, 0, tensor.embedding)


def _in_order(chosen: list[Piece]) -> tuple[Piece, ...]:
    placed, offset = [], 0
    for piece in sorted(chosen, key=lambda piece: (piece.tensor, piece.start)):
        placed.append(replace(piece, offset=offset))
        offset += piece.size
    return tuple(placed)


def _within_bound(fragments: tuple[Fragment, ...]) -> bool:
    sizes = [fragment.size for fragment in fragments]
    return 3 * max(sizes) * len(sizes) <= 4 * sum(sizes)


def _digest(fragments: tuple[Fragment, ...]) -> str:
    plain = [[asdict(piece) for piece in fragment.pieces] for fragment in fragments]
    text = json.dumps({"fragments": plain}, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def gather(params: Mapping[str, np.ndarray], fragment: Fragment) -> np.ndarray:
    """Copies the fragment's rows into one flat float32 vector."""
    vector = np.empty(fragment.size, np.float32)
    for piece in fragment.pieces:
        vector[piece.span].reshape(piece.shape)[...] = _rows(params, piece)
    return vector


def scatter(vector: np.ndarray, fragment: Fragment, into: dict[str, np.ndarray]) -> None:
    """Writes the vector's values over the fragment's rows, in place."""
    if vector.shape != (fragment.size,):
        raise ValueError(
            f"fragment {fragment.number} has {fragment.size} values, the vector {vector.shape}"
        )
    for piece in fragment.pieces:
        _rows(into, piece)[...] = vector[piece.span].reshape(piece.shape)


def _rows(params: Mapping[str, np.ndarray], piece: Piece) -> np.ndarray:
    """A view of the piece's rows, of exactly its shape."""
    whole = params[piece.tensor]
    rows = whole[piece.start : piece.stop] if piece.shape else whole
    if rows.shape != piece.shape:
        raise ValueError(
            f"rows {piece.start}:{piece.stop} of {piece.tensor!r} should have the shape "
            f"{piece.shape}, but the tensor is {whole.shape}"
        )
    return rows


def piece_of(fragment: Fragment, index: int) -> Piece:
    """Finds the piece that a value of the fragment's vector belongs to."""
    if not 0 <= index < fragment.size:
        raise IndexError(
            f"fragment {fragment.number} has {fragment.size} values, there is no value {index}"
        )
    return next(piece for piece in fragment.pieces if index < piece.span.stop)


def spans(size: int) -> Iterator[slice]:
    """Cuts `size` values into chunks, always at the same places."""
    for start in range(0, size, CHUNK):
        yield slice(start, min(start + CHUNK, size))


def norm(vector: np.ndarray) -> float:
    """The Euclidean length, summed in float64; not finite exactly if some float32 value is not."""
    total = 0.0
    for span in spans(vector.size):
        # Not `dot`: a threaded BLAS may add in another order on another machine.
        total += float(np.sum(np.square(vector[span], dtype=np.float64)))
    return math.sqrt(total) if total >= 0 else total
