"""Every registered codec keeps the size, keeps zeros, and lets nothing but numbers through."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from diloco_cli.errors import WireError
from diloco_cli.wire.codecs import NotFinite, codecs

LARGEST = float(np.finfo(np.float32).max)
every_codec = pytest.mark.parametrize("kind", codecs.kinds())
finite = st.floats(-LARGEST, LARGEST, width=32, allow_subnormal=True)
arrays = hnp.arrays(np.float32, st.integers(1, 1300), elements=finite)


def through(kind: str, values: np.ndarray) -> np.ndarray:
    codec = codecs.build({"kind": kind})
    return codec.decode(codec.encode(values), values.size)


@every_codec
@settings(deadline=None, max_examples=40)
@given(values=arrays)
def test_decoding_restores_the_size_and_stays_finite(kind, values):
    restored = through(kind, values)
    assert restored.shape == values.shape and restored.dtype == np.float32
    assert np.isfinite(restored).all()


@every_codec
@pytest.mark.parametrize("size", [1, 2, 31, 511, 512, 513, 65535, 65536, 65537, 200_001])
def test_silence_stays_silent_at_every_size(kind, size):
    np.testing.assert_array_equal(through(kind, np.zeros(size, np.float32)), 0.0)


@every_codec
@pytest.mark.parametrize("size", [1, 511, 512, 513, 65537])
def test_the_body_is_as_long_as_promised(kind, size):
    codec = codecs.build({"kind": kind})
    body = codec.encode(np.linspace(-1, 1, size, dtype=np.float32))
    assert len(body) == codec.body_size(size)
    for wrong in (body[:-1], body + b"\0"):
        with pytest.raises(WireError, match="bytes where its codec writes"):
            codec.decode(wrong, size)


@every_codec
@pytest.mark.parametrize("place", [0, 700, 65536, 99_999])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_what_is_no_number_is_refused_by_its_place(kind, place, value):
    values = np.ones(100_000, np.float32)
    values[place] = value
    with pytest.raises(NotFinite) as refusal:
        codecs.build({"kind": kind}).encode(values)
    assert refusal.value.index == place
    assert str(float(value)) in refusal.value.message


@every_codec
@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_no_body_whatsoever_decodes_to_something_that_is_no_number(kind, data):
    codec = codecs.build({"kind": kind})
    size = data.draw(st.integers(1, 70))
    length = codec.body_size(size)
    body = data.draw(st.binary(min_size=length, max_size=length))
    try:
        restored = codec.decode(body, size)
    except WireError:
        return
    assert restored.size == size and np.isfinite(restored).all()


@every_codec
@settings(deadline=None, max_examples=40)
@given(values=arrays)
def test_sending_what_is_left_brings_the_rest_nearer(kind, values):
    """What one frame leaves out goes with the next; no codec may make it grow for ever."""
    moderate = np.clip(values, -1e30, 1e30)
    left, length = moderate.copy(), np.linalg.norm(moderate.astype(np.float64))
    for _ in range(4):
        left = left - through(kind, left)
    assert np.linalg.norm(left.astype(np.float64)) <= length * (1 + 1e-6) + 1e-30


@every_codec
@pytest.mark.parametrize("extremes", [[LARGEST, -LARGEST], [1e-45, -1e-45], [LARGEST, 1e-45, 0.0]])
def test_the_largest_and_the_smallest_numbers_stay_numbers(kind, extremes):
    values = np.tile(np.array(extremes, np.float32), 700)
    restored = through(kind, values)
    assert np.isfinite(restored).all()
    assert (restored.astype(np.float64) * values >= 0).all(), "a sign flipped"
    assert np.abs(restored).max() <= np.float32(LARGEST)


@every_codec
def test_where_the_values_lie_in_memory_changes_nothing(kind):
    codec = codecs.build({"kind": kind})
    wide = np.arange(3000, dtype=np.float32).reshape(1000, 3)
    assert codec.encode(wide[:, 1]) == codec.encode(wide[:, 1].copy())
    with pytest.raises(ValueError, match="1-D float32, not 2-D float32"):
        codec.encode(wide)
    with pytest.raises(ValueError, match="1-D float32, not 1-D float64"):
        codec.encode(np.ones(3))


@every_codec
def test_the_input_is_left_alone(kind):
    values = np.linspace(-3, 3, 1000, dtype=np.float32)
    before = values.copy()
    values.flags.writeable = False
    through(kind, values)
    np.testing.assert_array_equal(values, before)
