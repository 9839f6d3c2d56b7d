"""The digest of a vector: XXH3 with 128 bits over its little-endian float32 values.

Server and regions hash every version they hold, at 32 bits per value, so this must cost
little beside adding it up. The digest is there against accidents, such as a lost delta, a
different rounding or a damaged disk. It stops no attacker, and need not: it travels beside
the vector, and one who replaces the vector can replace the digest. So a hash that is many
times faster than a cryptographic one will do.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import xxhash

from diloco_cli.wire.codecs.protocol import vector


class VectorHash:
    """The digest of a vector that is given piece by piece."""

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_128()

    def update(self, values: np.ndarray) -> None:
        self._hash.update(vector(values).view(np.uint8).data)

    def hexdigest(self) -> str:
        return self._hash.hexdigest()


def vector_digest(values: np.ndarray) -> str:
    """32 hexadecimal digits that depend on every bit of the vector."""
    digest = VectorHash()
    digest.update(values)
    return digest.hexdigest()


def tensors_digest(tensors: Mapping[str, np.ndarray]) -> str:
    """One digest for a model: equal exactly if names, shapes and every bit are."""
    return state_digest(
        {
            f"{name} {list(each.shape)}": vector_digest(each.ravel())
            for name in sorted(tensors)
            for each in [tensors[name]]  # One at a time: they may be read when asked for.
        }
    )


def state_digest(digests: dict[str, str]) -> str:
    """One digest for several vectors, by name."""
    text = "".join(f"{name} {digest}\n" for name, digest in digests.items())
    return xxhash.xxh3_128(text.encode()).hexdigest()
