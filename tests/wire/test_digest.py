"""A vector is named by every bit of it."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash

from diloco_cli.wire.digest import VectorHash, state_digest, vector_digest
from diloco_cli.wire.frame import open_frame, pack
from tests.wire.forged_frames import delta

ONE = b"\0\0\x80?"


def test_the_digest_is_that_of_the_little_endian_bytes():
    found = vector_digest(np.array([1.0], np.float32))
    assert found == xxhash.xxh3_128(ONE).hexdigest() and len(found) == 32


def test_pieces_make_the_digest_of_the_whole():
    values = np.arange(1000, dtype=np.float32)
    found = VectorHash()
    for start in range(0, 1000, 300):
        found.update(values[start : start + 300])
    assert found.hexdigest() == vector_digest(values)


@pytest.mark.parametrize("bit", [0, 31 * 8, 399 * 8 + 7])
def test_every_bit_counts(bit):
    values = np.zeros(100, np.float32)
    changed = values.copy()
    changed.view(np.uint8)[bit // 8] ^= 1 << bit % 8
    assert vector_digest(changed) != vector_digest(values)


def test_minus_zero_is_not_zero():
    assert vector_digest(np.array([-0.0], np.float32)) != vector_digest(np.zeros(1, np.float32))


def test_a_state_is_named_by_all_its_vectors_in_their_places():
    names = {"theta": "a" * 32, "momentum": "b" * 32}
    swapped = {"theta": "b" * 32, "momentum": "a" * 32}
    assert state_digest(names) != state_digest(swapped)
    assert (
        state_digest(names)
        == xxhash.xxh3_128(f"theta {'a' * 32}\nmomentum {'b' * 32}\n".encode()).hexdigest()
    )


def test_a_delta_says_what_the_weights_it_leads_to_are_called():
    values, weights = np.ones(50, np.float32), np.full(50, 2.0, np.float32)
    name = vector_digest(values + weights)
    said = delta(50, 4, codec={"kind": "fp32"}, published=name)
    assert open_frame(pack(said, values)).added_to(weights)[1] == name
