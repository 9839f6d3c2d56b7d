"""Around two bits and one bit a value: the scale is a block's rms, or its mean magnitude."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from diloco_cli.errors import RegistryError, WireError
from diloco_cli.wire.codecs import codecs

SIGN = codecs.build({"kind": "sign", "block": 32})
UNIFORM = codecs.build({"kind": "uniform", "block": 32})
ordinary = st.floats(-100, 100, width=32).filter(lambda value: value == 0 or abs(value) > 1e-6)


def through(codec, values: np.ndarray) -> np.ndarray:
    return codec.decode(codec.encode(values), values.size)


@settings(deadline=None, max_examples=60)
@given(
    values=hnp.arrays(np.float32, st.integers(1, 200), elements=ordinary),
    step=st.sampled_from([0.25, 1.0, 4.0]),
)
def test_a_uniform_step_is_so_many_root_mean_squares(values, step):
    codec = codecs.build({"kind": "uniform", "block": 64, "step": step})
    restored = through(codec, values).astype(np.float64)
    exact = values.astype(np.float64)
    for start in range(0, values.size, 64):
        part, back = exact[start : start + 64], restored[start : start + 64]
        # The rms is found on 127 whole steps, then rounded up to eight bits.
        width = step * np.sqrt(np.mean(part**2)) * 1.02 + step * np.abs(part).max() / 127
        within = np.abs(part) <= 7 * width / 1.1
        assert (np.abs(back - part)[within] <= 0.501 * width).all()
        assert (np.abs(back) <= 7 * width).all() and (back * part >= 0).all()


def test_what_lies_beyond_seven_steps_is_clipped_and_waits():
    values = np.full(1024, 1.0, np.float32)
    values[0] = 1e4  # 32 times the rms of its block
    codec = codecs.build({"kind": "uniform"})
    restored = through(codec, values)
    assert 2000 < restored[0] < 2300 and (restored[1:] == 0).all()


@settings(deadline=None, max_examples=60)
@given(values=hnp.arrays(np.float32, st.integers(1, 200), elements=ordinary))
def test_signs_carry_the_mean_magnitude_of_their_block(values):
    codec = codecs.build({"kind": "sign", "block": 64})
    restored = through(codec, values)
    for start in range(0, values.size, 64):
        part, back = values[start : start + 64], restored[start : start + 64]
        mean = np.abs(part.astype(np.float64)).mean()
        np.testing.assert_allclose(np.abs(back), mean, rtol=0.005, atol=1e-4 * np.abs(part).max())
        assert ((part < 0) == (back < 0)).all()


def test_a_short_last_block_takes_its_mean_over_the_values_it_has():
    values = np.array([3.0, -3.0, 3.0], np.float32)
    np.testing.assert_array_equal(through(SIGN, values), through(SIGN, np.tile(values, 11))[:3])
    assert (through(UNIFORM, values) != 0).all()


def test_bits_of_signs_are_planar_inside_each_block():
    values = np.ones(64, np.float32)
    values[[0, 4, 28, 33]] = -1
    body = SIGN.encode(values)
    assert body[:8] == bytes([0b10000011, 0, 0, 0, 0, 0b00000001, 0, 0])


def test_silent_blocks_are_zero_and_say_nothing_else():
    values = np.zeros(64, np.float32)
    values[:32] = -2
    body = bytearray(SIGN.encode(values))
    assert body[4:8] == bytes(4) and (body[9], body[11]) == (0, 0)
    np.testing.assert_array_equal(SIGN.decode(bytes(body), 64), values)
    body[5] = 4
    with pytest.raises(WireError, match="silent block holds signs"):
        SIGN.decode(bytes(body), 64)


@pytest.mark.parametrize("bits", [0x0001, 0x00FF, 0x7F80, 0x7FC0, 0x8000, 0xBF80, 0xFF80], ids=hex)
def test_magnitudes_that_no_encoder_writes_are_refused(bits):
    body = bytearray(SIGN.encode(np.ones(64, np.float32)))
    body[-3], body[-1] = bits & 255, bits >> 8
    with pytest.raises(WireError, match="scale of block 1 is"):
        SIGN.decode(bytes(body), 64)


@pytest.mark.parametrize("codec, byte, value", [(SIGN, 3, 0x80), (UNIFORM, 15, 0x10)])
def test_padding_must_be_silent(codec, byte, value):
    body = bytearray(codec.encode(np.ones(5, np.float32)))
    body[byte] = value
    with pytest.raises(WireError, match="padding"):
        codec.decode(bytes(body), 5)


def test_uniform_bodies_are_read_like_those_of_int4():
    values = np.random.default_rng(3).standard_normal(700).astype(np.float32)
    body = codecs.build({"kind": "uniform", "block": 64}).encode(values)
    int4 = codecs.build({"kind": "int4", "block": 64})
    uniform = codecs.build({"kind": "uniform", "block": 64})
    np.testing.assert_array_equal(int4.decode(body, 700), uniform.decode(body, 700))


@pytest.mark.parametrize(
    "options, key",
    [
        ({"kind": "uniform", "step": 0.1}, "step"),
        ({"kind": "uniform", "step": 5}, "step"),
        ({"kind": "uniform", "step": float("nan")}, "step"),
        ({"kind": "uniform", "block": 100}, "block"),
        ({"kind": "sign", "block": 16}, "block"),
    ],
)
def test_options_out_of_bounds_are_refused_by_name(options, key):
    with pytest.raises(RegistryError) as refusal:
        codecs.build(options)
    assert refusal.value.key == key
