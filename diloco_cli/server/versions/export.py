"""The whole model as one safetensors file that is never written: made while it is sent."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence

import numpy as np

from diloco_cli.core.fragments import Layout, Piece
from diloco_cli.server.settings import ServerSettings
from diloco_cli.server.store import BlobReader
from diloco_cli.server.store.state_format import safetensors_header
from diloco_cli.server.versions.send import PIECE_BYTES

Part = tuple[BlobReader, int, int]
"""Bytes of a vector: the first one and how many."""


class InMemory:
    """Bytes that are in memory, read like those of a file."""

    def __init__(self, data: bytes | np.ndarray) -> None:
        self._data = memoryview(data if isinstance(data, bytes) else data.data).cast("B")

    def read(self, offset: int, length: int) -> bytes:
        return bytes(self._data[offset : offset + length])

    read_now = read

    def close(self) -> None:
        pass


class ModelDownload:
    """The published weights of all fragments.

    The same versions of the same run are the same bytes, which is what the etag says.
    """

    def __init__(
        self,
        layout: Layout,
        run: str,
        published: Sequence[tuple[int, BlobReader]],
        digests: Sequence[str],
        about: Mapping[str, str] | None = None,
    ) -> None:
        """`published` is each fragment's version and its vector, open; `digests` are theirs.

        `about` says in the file what is trained.
        """
        self.versions = [number for number, _ in published]
        vectors = [vector for _, vector in published]
        tensors: dict[str, list[tuple[int, Piece]]] = {}
        for fragment in layout.fragments:
            for piece in fragment.pieces:
                tensors.setdefault(piece.tensor, []).append((fragment.number, piece))
        ordered = {
            name: sorted(pieces, key=lambda place: place[1].start)
            for name, pieces in sorted(tensors.items())
        }
        head = safetensors_header(
            {name: _shape(places) for name, places in ordered.items()},
            {
                **{"run": run, "versions": json.dumps(self.versions), "layout": layout.digest},
                **(about or {}),
            },
        )
        self.parts: list[Part] = [(InMemory(head), 0, len(head))]
        self.parts += [
            (vectors[fragment], 4 * piece.offset, 4 * piece.size)
            for places in ordered.values()
            for fragment, piece in places
        ]
        self.size = len(head) + 4 * layout.size
        digest = hashlib.sha256(head + "".join(digests).encode())
        self.etag = f'"{digest.hexdigest()[:32]}"'

    def read(self, start: int, stop: int) -> ModelPieces:
        """Gives the file from `start` to `stop`, a piece at a time."""
        return ModelPieces(self, start, stop)


def about_model(settings: ServerSettings, *, average: bool = False) -> dict[str, str]:
    """Which model the weights are of and what its tokens mean, for the file's metadata.

    Of the `average` of the last versions it also says that.
    """
    found = {"model": settings.settings.get("model")}
    found["tokenizer"] = settings.spec.data.get("tokenizer")
    found["average"] = True if average else None
    return {key: json.dumps(value) for key, value in found.items() if value is not None}


class ModelPieces:
    """A range of a model, whose vectors stay open until it is forgotten."""

    def __init__(self, model: ModelDownload, start: int, stop: int) -> None:
        self._model, self._number = model, 0
        self._offset, self._left = start, stop - start

    def next_now(self) -> bytes | None:
        reader, place, length = self._place()
        piece = reader.read_now(place, length) if length else b""
        return None if piece is None else self._count(piece)

    def next(self) -> bytes:
        reader, place, length = self._place()
        return self._count(reader.read(place, length)) if length else b""

    def _place(self) -> Part:
        """What comes next, no longer than a piece; of no length after the end."""
        parts = self._model.parts
        while self._offset >= parts[self._number][2] and self._left:
            self._offset -= parts[self._number][2]
            self._number += 1
        reader, first, length = parts[self._number]
        return reader, first + self._offset, min(PIECE_BYTES, self._left, length - self._offset)

    def _count(self, piece: bytes) -> bytes:
        self._offset += len(piece)
        self._left -= len(piece)
        return piece


def _shape(places: Sequence[tuple[int, Piece]]) -> list[int]:
    """The shape of the tensor that the pieces, in order, make up."""
    first = places[0][1].shape
    return [sum(piece.shape[0] for _, piece in places), *first[1:]] if first else []
