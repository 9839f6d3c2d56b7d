"""Quantised values are off by half a scale at most, and never by a sign."""

import struct

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from diloco_cli.errors import RegistryError, WireError
from diloco_cli.wire.codecs import codecs
from diloco_cli.wire.codecs.block import largest_scale

LARGEST = np.finfo(np.float32).max
SMALLEST_NORMAL = np.finfo(np.float32).smallest_normal
TOP = {"int8": 127, "int4": 7}
INT4 = codecs.build({"kind": "int4", "block": 32})
quantised = pytest.mark.parametrize("kind", TOP)
finite = st.floats(-float(LARGEST), float(LARGEST), width=32, allow_subnormal=True)


def reference(values: np.ndarray, top: int, block: int) -> tuple[list[int], list[int]]:
    """The page's steps, one value at a time: (codes, scale bits)."""
    codes, scales = [], []
    for start in range(0, values.size, block):
        part = values[start : start + block]
        wanted = np.float32(np.abs(part).max()) * (np.float32(1) / np.float32(top))
        bits = (struct.unpack("<I", struct.pack("<f", wanted))[0] + 0xFFFF) >> 16
        bits = min(max(bits, 0x0100), largest_scale(top))
        scale = np.float32(struct.unpack("<f", struct.pack("<I", bits << 16))[0])
        inverse = np.float32(1) / scale
        codes += [round(float(np.float32(value) * inverse)) for value in part]
        scales.append(bits)
    return codes, scales


@quantised
@settings(deadline=None, max_examples=80)
@given(
    values=hnp.arrays(np.float32, st.integers(1, 200), elements=finite),
    block=st.sampled_from([32, 64, 512]),
)
@example(np.array([LARGEST, -LARGEST], np.float32), 32)
@example(np.array([1e-45, -1e-45, 0, -0.0], np.float32), 32)
@example(np.array([SMALLEST_NORMAL, 3 * SMALLEST_NORMAL], np.float32), 32)
def test_codes_and_scales_are_those_of_the_written_rule(kind, values, block):
    codec = codecs.build({"kind": kind, "block": block})
    codes, scales = reference(values, TOP[kind], block)
    assert max(map(abs, codes)) <= TOP[kind]
    body = codec.encode(values)
    rows = len(scales)
    assert body[-2 * rows :] == bytes(s & 255 for s in scales) + bytes(s >> 8 for s in scales)
    widened = np.array(scales, np.uint32) << 16
    expected = (
        np.array(codes, np.float32) * np.repeat(widened.view(np.float32), block)[: len(codes)]
    )
    np.testing.assert_array_equal(codec.decode(body, values.size), expected)


@quantised
@settings(deadline=None, max_examples=80)
@given(values=hnp.arrays(np.float32, st.integers(1, 1100), elements=finite))
@example(np.array([LARGEST, 1.0], np.float32))
def test_the_error_is_at_most_half_a_scale(kind, values):
    codec = codecs.build({"kind": kind, "block": 512})
    restored = codec.decode(codec.encode(values), values.size).astype(np.float64)
    exact = values.astype(np.float64)
    for start in range(0, values.size, 512):
        part = slice(start, start + 512)
        scale = max(np.abs(exact[part]).max() / TOP[kind] * (1 + 2**-7), 2.0**-125)
        assert np.abs(restored[part] - exact[part]).max() <= 0.5001 * scale
        assert (restored[part] * exact[part] >= 0).all(), "a sign flipped"


@quantised
def test_subnormal_numbers_become_zero_wherever_they_are_encoded(kind):
    """So that hardware which flushes them to zero first writes the same bytes."""
    values = np.array([1e-45, -1e-40, float(SMALLEST_NORMAL) * 0.99], np.float32)
    codec = codecs.build({"kind": kind})
    assert codec.encode(values) == codec.encode(np.zeros(3, np.float32))


@quantised
def test_the_largest_scale_is_the_last_that_cannot_overflow(kind):
    bits = largest_scale(TOP[kind])
    scales = np.array([bits, bits + 1], np.uint32) << 16
    with np.errstate(over="ignore"):
        products = scales.view(np.float32) * np.float32(TOP[kind])
    assert np.isfinite(products[0]) and np.isinf(products[1])


@quantised
@pytest.mark.parametrize("bits", [0x0000, 0x00FF, 0x7F80, 0x7FC0, 0x8000, 0xBF80, 0xFF80], ids=hex)
def test_scales_that_no_encoder_writes_are_refused(kind, bits):
    codec = codecs.build({"kind": kind, "block": 32})
    body = bytearray(codec.encode(np.ones(64, np.float32)))
    body[-3], body[-1] = bits & 255, bits >> 8
    with pytest.raises(WireError, match="scale of block 1 is"):
        codec.decode(bytes(body), 64)


@pytest.mark.parametrize("kind, byte, said", [("int8", 0x80, "-128"), ("int4", 0x08, "-8")])
def test_the_code_that_has_no_opposite_is_refused(kind, byte, said):
    codec = codecs.build({"kind": kind, "block": 32})
    body = bytearray(codec.encode(np.ones(64, np.float32)))
    body[5] = byte
    with pytest.raises(WireError, match=f"A code is {said}"):
        codec.decode(bytes(body), 64)


def test_int4_nibbles_are_planar_inside_each_block():
    values = np.zeros(64, np.float32)
    values[[0, 16, 32 + 1, 48 + 1]] = [7, -7, 3, -1]
    values[40] = 7
    body = INT4.encode(values)
    assert body[0] == 0x97  # code 7 low, code −7 (two's complement 9) high
    assert body[16 + 1] == 0xF3


def test_int4_padding_must_be_silent():
    body = bytearray(INT4.encode(np.ones(5, np.float32)))
    body[15] = 0x10
    with pytest.raises(WireError, match="padding"):
        INT4.decode(bytes(body), 5)


@pytest.mark.parametrize("kind", TOP)
@pytest.mark.parametrize("block", [0, 16, 33, 100, 131072, 512.5, "512", True, None])
def test_blocks_are_powers_of_two_within_reason(kind, block):
    with pytest.raises(RegistryError) as refusal:
        codecs.build({"kind": kind, "block": block})
    assert refusal.value.key == "block"


def test_bf16_rounds_to_nearest_even_and_never_to_infinity():
    ties = np.array([1 + 2**-8, 1 + 3 * 2**-8, 1 + 2**-8 + 2**-20, -(1 + 2**-8)], np.float32)
    codec = codecs.build({"kind": "bf16"})
    restored = codec.decode(codec.encode(ties), 4)
    np.testing.assert_array_equal(restored, [1, 1 + 2**-6, 1 + 2**-7, -1])
    extremes = np.array([LARGEST, -LARGEST], np.float32)
    most = (2 - 2**-7) * 2.0**127
    np.testing.assert_array_equal(codec.decode(codec.encode(extremes), 2), [most, -most])


@settings(deadline=None, max_examples=60)
@given(values=hnp.arrays(np.float32, st.integers(1, 300), elements=finite))
def test_bf16_keeps_eight_bits_and_fp32_every_one(values):
    bf16, fp32 = codecs.build({"kind": "bf16"}), codecs.build({"kind": "fp32"})
    restored = bf16.decode(bf16.encode(values), values.size).astype(np.float64)
    bound = np.maximum(np.abs(values.astype(np.float64)) * 2.0**-8, 2.0**-134)
    assert (np.abs(restored - values) <= bound).all()
    exact = fp32.decode(fp32.encode(values), values.size)
    np.testing.assert_array_equal(exact.view(np.uint32), values.view(np.uint32))
