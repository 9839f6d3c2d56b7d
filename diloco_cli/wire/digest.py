"""What a vector is called: a digest of every bit of it.

Everybody who holds a version hashes it, at 32 bits a value, so this must cost little beside
adding it up. The digest is there against accidents, such as a lost delta, a rounding of one's
own or a damaged disk: it travels beside the vector, so whoever could put another in its place
could name that, too. So XXH3 with 128 bits will do, which is many times faster than a
cryptographic hash.
"""

from __future__ import annotations

import numpy as np
import xxhash

from diloco_cli.wire.codecs.protocol import vector


class VectorHash:
    """Takes a vector piece by piece."""

    def __init__(self) -> None:
        self._hash = xxhash.xxh3_128()

    def update(self, values: np.ndarray) -> None:
        self._hash.update(vector(values).view(np.uint8).data)

    def hexdigest(self) -> str:
        return self._hash.hexdigest()


def vector_digest(values: np.ndarray) -> str:
    """Names a vector by every bit of its little-endian float32 values, in 32 hexadecimal digits."""
    digest = VectorHash()
    digest.update(values)
    return digest.hexdigest()


def state_digest(names: dict[str, str]) -> str:
    """Names several vectors at once by what each of them is called."""
    text = "".join(f"{what} {name}\n" for what, name in names.items())
    return xxhash.xxh3_128(text.encode()).hexdigest()
