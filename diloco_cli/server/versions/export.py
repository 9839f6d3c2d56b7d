"""The whole model as one safetensors file that is never written: made while it is sent."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence

import numpy as np

from diloco_cli.core.fragments import Layout, Piece
from diloco_cli.server.store.state_format import safetensors_header
from diloco_cli.server.versions.send import PIECE_BYTES, InMemory


class ModelDownload:
    """The published weights of all fragments.

    The same versions of the same run are the same bytes, which is what the etag says.
    """

    def __init__(
        self,
        layout: Layout,
        run: str,
        published: Sequence[tuple[int, np.ndarray]],
        digests: Sequence[str],
    ) -> None:
        """`published` is each fragment's version and vector; `digests` are those of the vectors."""
        self.versions = [number for number, _ in published]
        self._vectors = [vector for _, vector in published]
        tensors: dict[str, list[tuple[int, Piece]]] = {}
        for fragment in layout.fragments:
            for piece in fragment.pieces:
                tensors.setdefault(piece.tensor, []).append((fragment.number, piece))
        self._tensors = {
            name: sorted(pieces, key=lambda place: place[1].start)
            for name, pieces in sorted(tensors.items())
        }
        self._head = safetensors_header(
            {name: _shape(places) for name, places in self._tensors.items()},
            {"run": run, "versions": json.dumps(self.versions), "layout": layout.digest},
        )
        self.size = len(self._head) + 4 * layout.size
        digest = hashlib.sha256(self._head + "".join(digests).encode())
        self.etag = f'"{digest.hexdigest()[:32]}"'

    def read(self, start: int, stop: int) -> InMemory:
        """Gives the file from `start` to `stop`, a piece at a time."""
        return InMemory(self._pieces(start, stop))

    def _pieces(self, start: int, stop: int) -> Iterator[bytes]:
        offset = 0
        for data in self._parts():
            first, last = max(start - offset, 0), min(stop - offset, data.nbytes)
            for place in range(first, last, PIECE_BYTES):
                yield bytes(data[place : min(place + PIECE_BYTES, last)])
            offset += data.nbytes

    def _parts(self) -> Iterator[memoryview]:
        yield memoryview(self._head)
        for places in self._tensors.values():
            for fragment, piece in places:
                values = np.ascontiguousarray(self._vectors[fragment][piece.span], "<f4")
                yield values.data.cast("B")


def _shape(places: Sequence[tuple[int, Piece]]) -> list[int]:
    """The shape of the tensor that the pieces, in order, make up."""
    first = places[0][1].shape
    return [sum(piece.shape[0] for _, piece in places), *first[1:]] if first else []
