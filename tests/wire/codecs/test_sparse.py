"""Only the largest values travel, each with its place; everything else waits for its turn."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from diloco_cli.errors import RegistryError, WireError
from diloco_cli.wire.codecs import codecs
from diloco_cli.wire.codecs.sparse import Sparse

SPARSE = Sparse(density=0.01, block=1024)
KEEP = 11
GAPS = KEEP + 4
"""Room for the gaps of one block: a byte for each value, and one for each 255 values."""


def through(values: np.ndarray, codec: Sparse = SPARSE) -> np.ndarray:
    return codec.decode(codec.encode(values), values.size)


@settings(deadline=None, max_examples=80)
@given(values=hnp.arrays(np.float32, st.integers(1, 600), elements=st.floats(-9, 9, width=16)))
def test_the_largest_of_each_block_go_and_nothing_else(values):
    codec = Sparse(density=0.1, block=128)
    restored = through(values, codec)
    for start in range(0, values.size, 128):
        part, back = values[start : start + 128], restored[start : start + 128]
        keep = -(-part.size // 10)
        ranked = sorted(range(part.size), key=lambda i: (-abs(part[i]), i))
        expected = sorted(i for i in ranked[:keep] if part[i] != 0)
        assert np.flatnonzero(back).tolist() == expected
        assert (np.sign(back[expected]) == np.sign(part[expected])).all()


def test_two_sizes_fit_the_small_and_the_large_ones():
    values = np.zeros(1024, np.float32)
    values[:5], values[5:8] = [1, -1, 1.5, 0.5, -1], [8, -8, 8]
    np.testing.assert_array_equal(through(values)[:8], [1, -1, 1, 1, -1, 8, -8, 8])


def test_sent_often_enough_everything_arrives():
    """What a frame leaves out stays in `held`, which is error feedback enough."""
    rng = np.random.default_rng(5)
    total, arrived = rng.standard_normal(1024).astype(np.float32), np.zeros(1024, np.float32)
    for _ in range(600):
        arrived += through(total - arrived)
    assert np.linalg.norm(total - arrived) < 0.02 * np.linalg.norm(total)


@pytest.mark.parametrize("place", [0, 1, 254, 255, 256, 509, 510, 511, 1023])
def test_gaps_reach_every_place(place):
    values = np.zeros(1024, np.float32)
    values[place] = -3.0
    np.testing.assert_array_equal(through(values), values)


def test_gaps_longer_than_a_byte_are_written_with_zeros():
    values = np.zeros(1024, np.float32)
    values[[0, 255, 511]] = 1.0
    body = SPARSE.encode(values)
    assert body[:5] == bytes([1, 255, 0, 1, 0])
    assert len(body) == GAPS + 3 + 6


def forged(place: int, value: int) -> bytes:
    values = np.zeros(1024, np.float32)
    values[[5, 600]] = [1.0, -1.0]
    body = bytearray(SPARSE.encode(values))
    body[place] = value
    return bytes(body)


@pytest.mark.parametrize(
    "body, said",
    [
        (forged(GAPS + 3, KEEP + 1), "more values than a block may send"),
        (forged(GAPS + 4, 1), "more values than a block may send"),
        (forged(0, 0), "a gap that leads out of its block"),
        (forged(3, 0), "a gap that leads out of its block"),
        (forged(1, 1), "padding other than zero"),
        (forged(GAPS - 1, 1), "padding other than zero"),
        (forged(GAPS, 0b10000), "padding other than zero"),
        (forged(GAPS + 2, 1), "padding other than zero"),
        (forged(GAPS, 0b10), "a size that no encoder writes"),
        (forged(GAPS + 6, 0), "a size that no encoder writes"),
        (forged(GAPS + 6, 0xFF), "a size that no encoder writes"),
        (forged(GAPS + 8, 0x80), "a size that no encoder writes"),
    ],
)
def test_bodies_that_no_encoder_writes_are_refused(body, said):
    with pytest.raises(WireError, match=said):
        SPARSE.decode(body, 1024)
    with pytest.raises(WireError, match=said):
        SPARSE.add(np.frombuffer(body, np.uint8), np.zeros(1024), 1.0)


def test_the_forger_starts_from_an_honest_body():
    assert np.flatnonzero(SPARSE.decode(forged(0, 6), 1024)).tolist() == [5, 600]


@pytest.mark.parametrize("density", [0, 0.0001, 0.3, -1, float("nan"), "many"])
def test_densities_are_within_reason(density):
    with pytest.raises(RegistryError) as refusal:
        codecs.build({"kind": "sparse", "density": density})
    assert refusal.value.key == "density"
