"""The loops of the block codecs: one scale for each block, a few bits for each value.

Bodies end with the scales, low bytes of all blocks and then high bytes. An encoder
answers with the first block that holds a NaN or an infinity, a decoder with the first
whose scale no encoder writes; FINE or a smaller number is an answer as well.

`start` is the block that the given values begin with and `rows` the number of blocks in
the body: a short last block is padded by the caller and handled alone.

Two things make these loops as fast as they are. The largest magnitude is found on the
bits of the floats, which sort like their values: that vectorises, and every NaN and
infinity lies above all numbers. And memory is written in one direction: both halves of
an int4 block in one loop took 2.5 times as long as one after the other. (Loops run over
indices: `for value in part` does not vectorise.)
"""

from __future__ import annotations

import numpy as np

from diloco_cli.wire.kernels.jit import (
    Bytes,
    BytesOut,
    DoublesOut,
    Floats,
    FloatsOut,
    inlined,
    kernel,
    real,
    single,
    whole,
)

FINE, WRONG_CODE = -1, -2

INFINITY = 0x7F800000
SCALE_FLOOR = 0x0100
MOST_INT8, MOST_INT4, MOST_SIGN = 0x7C01, 0x7E12, 0x7F7F
"""The largest scales, as bf16, whose product with 127, 7 and 1 is finite."""

ONE = np.float32(1)
PER_127 = ONE / np.float32(127)
PER_7 = ONE / np.float32(7)
PER_32767 = ONE / np.float32(32767)


@inlined
def _largest(part):
    """Bits of the largest magnitude."""
    most, bits = np.int32(0), part.view(np.int32)
    for i in range(bits.size):
        most = max(most, np.int32(bits[i] & np.int32(0x7FFFFFFF)))
    return most


@inlined
def _float(bits):
    return np.int32(bits).view(np.float32)


@inlined
def _rounded_up(wanted, most):
    """The bf16 scale that is not below `wanted`, kept where no product overflows."""
    bits = (np.int64(np.float32(wanted).view(np.int32)) + 0xFFFF) >> 16
    return min(max(bits, SCALE_FLOOR), most)


@inlined
def _nearest(wanted, most):
    """The bf16 scale nearest to `wanted`, for codes that are clipped or have no size."""
    bits = (np.int64(np.float32(wanted).view(np.int32)) + 0x8000) >> 16
    return min(max(bits, SCALE_FLOOR), most)


@inlined
def _put_scale(body, at, row, rows, bits):
    body[at + row] = np.uint8(bits & 255)
    body[at + rows + row] = np.uint8(bits >> 8)


@inlined
def _scale_bits(body, at, row, rows):
    return np.int64(body[at + row]) | (np.int64(body[at + rows + row]) << 8)


# int8: a byte for each code


@kernel(whole(Floats, BytesOut, whole))
def encode_int8(values, body, block):
    size = values.size
    rows = -(-size // block)
    for row in range(rows):
        begin, end = row * block, min((row + 1) * block, size)
        part, into = values[begin:end], body[begin:end]
        largest = _largest(part)
        if largest >= INFINITY:
            return row
        bits = _rounded_up(_float(largest) * PER_127, MOST_INT8)
        _put_scale(body, size, row, rows, bits)
        inverse = ONE / _float(bits << 16)
        for i in range(into.size):
            into[i] = np.uint8(np.int32(np.rint(part[i] * inverse)))
    return FINE


@kernel(whole(Bytes, FloatsOut, whole))
def decode_int8(body, values, block):
    size = values.size
    rows = -(-size // block)
    lowest = np.int8(0)
    for row in range(rows):
        bits = _scale_bits(body, size, row, rows)
        if bits < SCALE_FLOOR or bits > MOST_INT8:
            return row
        scale = _float(bits << 16)
        begin, end = row * block, min((row + 1) * block, size)
        codes, into = body[begin:end].view(np.int8), values[begin:end]
        for i in range(into.size):
            lowest = min(lowest, codes[i])
            into[i] = np.float32(codes[i]) * scale
    return WRONG_CODE if lowest == -128 else FINE


@kernel(whole(Bytes, DoublesOut, whole, real))
def add_int8(body, sums, block, weight):
    size = sums.size
    rows = -(-size // block)
    lowest = np.int8(0)
    for row in range(rows):
        bits = _scale_bits(body, size, row, rows)
        if bits < SCALE_FLOOR or bits > MOST_INT8:
            return row
        scale = _float(bits << 16)
        begin, end = row * block, min((row + 1) * block, size)
        codes, into = body[begin:end].view(np.int8), sums[begin:end]
        for i in range(into.size):
            lowest = min(lowest, codes[i])
            into[i] += np.float64(np.float32(codes[i]) * scale) * weight
    return WRONG_CODE if lowest == -128 else FINE


# int4 and uniform: two codes in a byte, those of the block's first half in the low bits


@kernel(whole(Floats, BytesOut, whole, whole, whole))
def encode_int4(values, body, block, start, rows):
    half = block // 2
    for row in range(start, start + values.size // block):
        part = values[(row - start) * block : (row - start + 1) * block]
        largest = _largest(part)
        if largest >= INFINITY:
            return row
        bits = _rounded_up(_float(largest) * PER_7, MOST_INT4)
        _put_scale(body, rows * half, row, rows, bits)
        inverse = ONE / _float(bits << 16)
        first, second, into = part[:half], part[half:], body[row * half : (row + 1) * half]
        for i in range(half):
            low = np.uint8(np.int32(np.rint(first[i] * inverse)))
            high = np.uint8(np.int32(np.rint(second[i] * inverse)))
            into[i] = np.uint8(low & np.uint8(15)) | np.uint8(high << np.uint8(4))
    return FINE


@inlined
def _rms_scale(part, largest, count, step):
    """Bits of the scale for steps of `step` times the root mean square.

    The squares are summed as whole numbers: a sum of floats would depend on its order.
    """
    unit = _float(_rounded_up(_float(largest) * PER_127, MOST_INT8) << 16)
    inverse = ONE / unit
    total = np.int32(0)
    for i in range(part.size):
        code = np.int32(np.rint(part[i] * inverse))
        total = np.int32(total + np.int32(code * code))
    mean = np.float32(total) / np.float32(count)
    return _nearest(np.float32(np.sqrt(mean) * step) * unit, MOST_INT4)


@inlined
def _within_7(code):
    return np.uint8(max(min(np.int32(code), np.int32(7)), np.int32(-7)))


@kernel(whole(Floats, BytesOut, whole, whole, whole, whole, single))
def encode_uniform(values, body, block, start, rows, count, step):
    half = block // 2
    for row in range(start, start + values.size // block):
        part = values[(row - start) * block : (row - start + 1) * block]
        largest = _largest(part)
        if largest >= INFINITY:
            return row
        bits = _rms_scale(part, largest, count, step)
        _put_scale(body, rows * half, row, rows, bits)
        inverse = ONE / _float(bits << 16)
        first, second, into = part[:half], part[half:], body[row * half : (row + 1) * half]
        for i in range(half):
            low = _within_7(np.rint(first[i] * inverse))
            high = _within_7(np.rint(second[i] * inverse))
            into[i] = np.uint8(low & np.uint8(15)) | np.uint8(high << np.uint8(4))
    return FINE


@inlined
def _low(byte):
    return np.int8(np.int8(byte << 4) >> 4)


@inlined
def _high(byte):
    return np.int8(byte >> 4)


@kernel(whole(Bytes, FloatsOut, whole, whole, whole))
def decode_int4(body, values, block, start, rows):
    half = block // 2
    lowest = np.int8(0)
    for row in range(start, start + values.size // block):
        bits = _scale_bits(body, rows * half, row, rows)
        if bits < SCALE_FLOOR or bits > MOST_INT4:
            return row
        scale = _float(bits << 16)
        codes, at = body[row * half : (row + 1) * half].view(np.int8), (row - start) * block
        first, second = values[at : at + half], values[at + half : at + block]
        for i in range(half):
            lowest = min(lowest, _low(codes[i]))
            first[i] = np.float32(_low(codes[i])) * scale
        for i in range(half):
            lowest = min(lowest, _high(codes[i]))
            second[i] = np.float32(_high(codes[i])) * scale
    return WRONG_CODE if lowest == -8 else FINE


@kernel(whole(Bytes, DoublesOut, whole, whole, whole, real))
def add_int4(body, sums, block, start, rows, weight):
    half = block // 2
    lowest = np.int8(0)
    for row in range(start, start + sums.size // block):
        bits = _scale_bits(body, rows * half, row, rows)
        if bits < SCALE_FLOOR or bits > MOST_INT4:
            return row
        scale = _float(bits << 16)
        codes, at = body[row * half : (row + 1) * half].view(np.int8), (row - start) * block
        first, second = sums[at : at + half], sums[at + half : at + block]
        for i in range(half):
            lowest = min(lowest, _low(codes[i]))
            first[i] += np.float64(np.float32(_low(codes[i])) * scale) * weight
        for i in range(half):
            lowest = min(lowest, _high(codes[i]))
            second[i] += np.float64(np.float32(_high(codes[i])) * scale) * weight
    return WRONG_CODE if lowest == -8 else FINE


@kernel(whole(Bytes, FloatsOut, whole, whole, whole, single))
def add_int4_single(body, sums, block, start, rows, weight):
    half = block // 2
    lowest = np.int8(0)
    for row in range(start, start + sums.size // block):
        bits = _scale_bits(body, rows * half, row, rows)
        if bits < SCALE_FLOOR or bits > MOST_INT4:
            return row
        scale = _float(bits << 16)
        codes, at = body[row * half : (row + 1) * half].view(np.int8), (row - start) * block
        first, second = sums[at : at + half], sums[at + half : at + block]
        for i in range(half):
            lowest = min(lowest, _low(codes[i]))
            first[i] += np.float32(_low(codes[i])) * scale * weight
        for i in range(half):
            lowest = min(lowest, _high(codes[i]))
            second[i] += np.float32(_high(codes[i])) * scale * weight
    return WRONG_CODE if lowest == -8 else FINE


@kernel(whole(Bytes, Floats, FloatsOut, whole, whole, whole))
def plus_int4(body, base, sums, block, start, rows):
    half = block // 2
    lowest = np.int8(0)
    for row in range(start, start + sums.size // block):
        bits = _scale_bits(body, rows * half, row, rows)
        if bits < SCALE_FLOOR or bits > MOST_INT4:
            return row
        scale = _float(bits << 16)
        codes, at = body[row * half : (row + 1) * half].view(np.int8), (row - start) * block
        known, first = base[at : at + half], sums[at : at + half]
        for i in range(half):
            lowest = min(lowest, _low(codes[i]))
            first[i] = known[i] + np.float32(_low(codes[i])) * scale
        known, second = base[at + half : at + block], sums[at + half : at + block]
        for i in range(half):
            lowest = min(lowest, _high(codes[i]))
            second[i] = known[i] + np.float32(_high(codes[i])) * scale
    return WRONG_CODE if lowest == -8 else FINE


# sign: one bit for each value, set if it is negative; eighths of the block in turn


@inlined
def _mean_scale(part, largest, count):
    """Bits of the mean magnitude, or zero for a block of which nothing is left."""
    unit = _float(_rounded_up(_float(largest) * PER_32767, MOST_SIGN) << 16)
    inverse = ONE / unit
    total = np.int32(0)
    for i in range(part.size):
        total = np.int32(total + np.int32(np.rint(abs(part[i]) * inverse)))
    if total == 0:
        return np.int64(0)
    return _nearest(np.float32(total) / np.float32(count) * unit, MOST_SIGN)


@kernel(whole(Floats, BytesOut, whole, whole, whole, whole))
def encode_sign(values, body, block, start, rows, count):
    eighth = block // 8
    for row in range(start, start + values.size // block):
        part = values[(row - start) * block : (row - start + 1) * block]
        largest = _largest(part)
        if largest >= INFINITY:
            return row
        bits = _mean_scale(part, largest, count)
        _put_scale(body, rows * eighth, row, rows, bits)
        into = body[row * eighth : (row + 1) * eighth]
        into[:] = 0
        for plane in range(8 if bits else 0):
            eight = part[plane * eighth : (plane + 1) * eighth]
            mark = np.uint8(1 << plane)
            for i in range(eighth):
                into[i] |= mark if eight[i] < 0 else np.uint8(0)
    return FINE


@kernel(whole(Bytes, FloatsOut, whole, whole, whole))
def decode_sign(body, values, block, start, rows):
    eighth = block // 8
    for row in range(start, start + values.size // block):
        bits = _scale_bits(body, rows * eighth, row, rows)
        if bits > MOST_SIGN or 0 < bits < SCALE_FLOOR:
            return row
        marks, at = body[row * eighth : (row + 1) * eighth], (row - start) * block
        if bits == 0 and marks.any():
            return WRONG_CODE
        for plane in range(8):
            into = values[at + plane * eighth : at + (plane + 1) * eighth].view(np.int32)
            for i in range(eighth):
                negative = np.int32(np.int32(marks[i]) >> plane) & np.int32(1)
                into[i] = np.int32(bits << 16) | np.int32(negative << 31)
    return FINE
