"""One version of a fragment as bytes: a safetensors file with three vectors, or four.

    8 bytes: length of the header │ header, JSON │ momentum │ published │ theta │ average

The metadata in the header names fragment, version and the digest of the whole state, so a
file under a wrong name, or with one bit changed, is refused. Written and read here rather than
by the safetensors library, which needs a file of its own: these are pieces of bytes, for
any store.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from diloco_cli.server.store import BlobReader
from diloco_cli.wire.digest import state_digest, vector_digest

VECTORS = ("momentum", "published", "theta", "average")
"""In the order of the file; the last is there if the run keeps one."""


@dataclass(frozen=True, eq=False, slots=True)
class StoredState:
    """One version of a fragment: flat float32 vectors."""

    theta: np.ndarray
    momentum: np.ndarray
    published: np.ndarray
    average: np.ndarray | None = None
    """Of the published weights over the last rounds, if the run keeps one."""
    digests: tuple[str, ...] = field(default=(), kw_only=True)
    """Of the vectors, if they are known already."""

    def load(self) -> StoredState:
        return self

    @property
    def vectors(self) -> dict[str, np.ndarray]:
        three = {"theta": self.theta, "momentum": self.momentum, "published": self.published}
        return three if self.average is None else {**three, "average": self.average}

    @property
    def nbytes(self) -> int:
        return sum(vector.nbytes for vector in self.vectors.values())

    @property
    def digest(self) -> str:
        """Digest of every bit: two states are equal exactly if their digests are."""
        digests = self.digests or map(vector_digest, self.vectors.values())
        return state_digest(dict(zip(self.vectors, digests, strict=True)))


def safetensors_header(shapes: Mapping[str, Sequence[int]], metadata: Mapping[str, str]) -> bytes:
    """The first bytes of a safetensors file of float32 tensors, which follow in this order."""
    header: dict[str, object] = {"__metadata__": metadata}
    offset = 0
    for name, shape in shapes.items():
        stop = offset + 4 * int(np.prod(shape))
        header[name] = {"dtype": "F32", "shape": list(shape), "data_offsets": [offset, stop]}
        offset = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # Readers may map the numbers, so they start aligned.
    return len(text).to_bytes(8, "little") + text


def encode(state: StoredState, metadata: Mapping[str, str]) -> list[bytes | memoryview]:
    """The file of a state, in pieces: the vectors are not copied."""
    given = state.vectors
    vectors = {name: np.ascontiguousarray(given[name], "<f4") for name in VECTORS if name in given}
    head = safetensors_header({name: vector.shape for name, vector in vectors.items()}, metadata)
    return [head, *(vector.view(np.uint8).data for vector in vectors.values())]


def decode(data: memoryview) -> tuple[StoredState, dict[str, str]]:
    """The state in a file and its metadata; ValueError if it is not such a file.

    The vectors are the file's own memory, and cannot be changed.
    """
    length = int.from_bytes(data[:8], "little")
    header = json.loads(bytes(data[8 : 8 + length]))
    try:
        metadata, vectors, offset = header.pop("__metadata__"), {}, 8 + length
        for name in VECTORS:
            if name == "average" and name not in header:
                continue
            entry = header.pop(name)
            (size,), (start, stop) = entry["shape"], entry["data_offsets"]
            if entry["dtype"] != "F32" or (offset, 4 * size) != (8 + length + start, stop - start):
                raise ValueError(f"the header does not describe its {name}")
            vectors[name] = np.frombuffer(data, "<f4", size, offset) if size else _EMPTY
            offset += 4 * size
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"the header is not that of a state: {error!r}") from error
    if header or offset != len(data):
        raise ValueError("the file does not end with its last vector")
    return StoredState(**vectors), metadata


def place_of(vector: str, reader: BlobReader) -> tuple[int, int]:
    """Where a vector lies in the file of a state: first byte and length; KeyError if nowhere."""
    length = int.from_bytes(reader.read(0, 8), "little")
    start, stop = json.loads(reader.read(8, length))[vector]["data_offsets"]
    return 8 + length + start, stop - start


_EMPTY = np.zeros(0, np.float32)
