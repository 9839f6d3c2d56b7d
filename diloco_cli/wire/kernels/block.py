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

from diloco_cli.wire.kernels.bits import (
    FINE,
    INFINITY,
    MOST_INT4,
    MOST_INT8,
    MOST_SCALE,
    ONE,
    PER_7,
    PER_127,
    PER_32767,
    SCALE_FLOOR,
    as_float,
    largest,
    nearest,
    pair,
    put_pair,
    rounded_up,
)
from diloco_cli.wire.kernels.jit import (
    BodiesOut,
    Bytes,
    BytesOut,
    Doubles,
    DoublesOut,
    Floats,
    FloatsOut,
    inlined,
    kernel,
    real,
    single,
    template,
    whole,
)
from diloco_cli.wire.kernels.sums import LANES, add_squares, total

WRONG_CODE = -2


# What a decoded value becomes: `old` is where it goes, `base` lies beside it.


@inlined
def _value(old, base, value, weight):
    return value


@inlined
def _plus(old, base, value, weight):
    return base + value


@inlined
def _sum(old, base, value, weight):
    return old + np.float64(value) * weight


@inlined
def _sum_single(old, base, value, weight):
    return old + value * weight


# int8: a byte for each code


@kernel(whole(Floats, BytesOut, whole))
def encode_int8(values, body, block):
    size = values.size
    rows = -(-size // block)
    for row in range(rows):
        begin, end = row * block, min((row + 1) * block, size)
        part, into = values[begin:end], body[begin:end]
        most = largest(part.view(np.int32))
        if most >= INFINITY:
            return row
        bits = rounded_up(as_float(most) * PER_127, MOST_INT8)
        put_pair(body, size, row, rows, bits)
        inverse = ONE / as_float(bits << 16)
        for i in range(into.size):
            into[i] = np.uint8(np.int32(np.rint(part[i] * inverse)))
    return FINE


@template
def _int8(body, block, put, values, weight):
    size = values.size
    rows = -(-size // block)
    lowest = np.int8(0)
    for row in range(rows):
        bits = pair(body, size, row, rows)
        if bits < SCALE_FLOOR or bits > MOST_INT8:
            return row
        scale = as_float(bits << 16)
        begin, end = row * block, min((row + 1) * block, size)
        codes, into = body[begin:end].view(np.int8), values[begin:end]
        for i in range(into.size):
            lowest = min(lowest, codes[i])
            into[i] = put(into[i], ONE, np.float32(codes[i]) * scale, weight)
    return WRONG_CODE if lowest == -128 else FINE


@kernel(whole(Bytes, FloatsOut, whole))
def decode_int8(body, values, block):
    return _int8(body, block, _value, values, 0.0)


@kernel(whole(Bytes, DoublesOut, whole, real))
def add_int8(body, sums, block, weight):
    return _int8(body, block, _sum, sums, weight)


# int4 and uniform: two codes in a byte, those of the block's first half in the low bits


@template
def _encode_nibbles(values, body, block, start, rows, count, step, scale_of, code_of):
    half = block // 2
    for row in range(start, start + values.size // block):
        part = values[(row - start) * block : (row - start + 1) * block]
        most = largest(part.view(np.int32))
        if most >= INFINITY:
            return row
        bits = scale_of(part, most, count, step)
        put_pair(body, rows * half, row, rows, bits)
        inverse = ONE / as_float(bits << 16)
        first, second, into = part[:half], part[half:], body[row * half : (row + 1) * half]
        for i in range(half):
            low = code_of(np.rint(first[i] * inverse))
            high = code_of(np.rint(second[i] * inverse))
            into[i] = np.uint8(low & np.uint8(15)) | np.uint8(high << np.uint8(4))
    return FINE


@inlined
def _largest_scale(part, most, count, step):
    return rounded_up(as_float(most) * PER_7, MOST_INT4)


@inlined
def _rms_scale(part, most, count, step):
    """Bits of the scale for steps of `step` times the root mean square.

    The squares are summed as whole numbers: a sum of floats would depend on its order.
    """
    unit = as_float(rounded_up(as_float(most) * PER_127, MOST_INT8) << 16)
    inverse = ONE / unit
    squares = np.int32(0)
    for i in range(part.size):
        code = np.int32(np.rint(part[i] * inverse))
        squares = np.int32(squares + np.int32(code * code))
    mean = np.float32(squares) / np.float32(count)
    return nearest(np.float32(np.sqrt(mean) * step) * unit, MOST_INT4)


@inlined
def _any_code(code):
    return np.uint8(np.int32(code))


@inlined
def _within_7(code):
    return np.uint8(max(min(np.int32(code), np.int32(7)), np.int32(-7)))


@kernel(whole(Floats, BytesOut, whole, whole, whole))
def encode_int4(values, body, block, start, rows):
    return _encode_nibbles(values, body, block, start, rows, block, ONE, _largest_scale, _any_code)


@kernel(whole(Floats, BytesOut, whole, whole, whole, whole, single))
def encode_uniform(values, body, block, start, rows, count, step):
    return _encode_nibbles(values, body, block, start, rows, count, step, _rms_scale, _within_7)


@inlined
def _low(byte):
    return np.int8(np.int8(byte << 4) >> 4)


@inlined
def _high(byte):
    return np.int8(byte >> 4)


@template
def _int4(body, block, start, rows, put, values, bases, weight):
    """Decodes whole blocks from block `start` on; `put` says what becomes of each value."""
    half = block // 2
    lowest = np.int8(0)
    for row in range(start, start + values.size // block):
        bits = pair(body, rows * half, row, rows)
        if bits < SCALE_FLOOR or bits > MOST_INT4:
            return row
        scale = as_float(bits << 16)
        codes, at = body[row * half : (row + 1) * half].view(np.int8), (row - start) * block
        into, base = values[at : at + half], bases[at : at + half]
        for i in range(half):
            lowest = min(lowest, _low(codes[i]))
            into[i] = put(into[i], base[i], np.float32(_low(codes[i])) * scale, weight)
        into, base = values[at + half : at + block], bases[at + half : at + block]
        for i in range(half):
            lowest = min(lowest, _high(codes[i]))
            into[i] = put(into[i], base[i], np.float32(_high(codes[i])) * scale, weight)
    return WRONG_CODE if lowest == -8 else FINE


@kernel(whole(Bytes, FloatsOut, whole, whole, whole))
def decode_int4(body, values, block, start, rows):
    return _int4(body, block, start, rows, _value, values, values, 0.0)


@kernel(whole(Bytes, DoublesOut, whole, whole, whole, real))
def add_int4(body, sums, block, start, rows, weight):
    return _int4(body, block, start, rows, _sum, sums, sums, weight)


@kernel(whole(Bytes, FloatsOut, whole, whole, whole, single))
def add_int4_single(body, sums, block, start, rows, weight):
    return _int4(body, block, start, rows, _sum_single, sums, sums, weight)


@kernel(whole(Bytes, Floats, FloatsOut, whole, whole, whole))
def plus_int4(body, base, sums, block, start, rows):
    return _int4(body, block, start, rows, _plus, sums, base, 0.0)


@kernel(real(Bytes, whole, whole, whole, whole))
def square_int4(body, block, rows, begin, end):
    """Sums the squares of values `begin` to `end` of a body; −1 if no encoder wrote it.

    Codes are squared and summed as whole numbers, block by block.
    """
    half, amount, lowest = block // 2, 0.0, np.int8(0)
    for row in range(begin // block, -(-end // block)):
        bits = pair(body, rows * half, row, rows)
        if bits < SCALE_FLOOR or bits > MOST_INT4:
            return -1.0
        codes = body[row * half : (row + 1) * half].view(np.int8)
        first, last = max(begin - row * block, 0), min(end - row * block, block)
        squares = np.int32(0)
        front = codes[min(first, half) : min(last, half)]
        for i in range(front.size):
            lowest = min(lowest, _low(front[i]))
            squares = np.int32(squares + np.int32(_low(front[i])) * np.int32(_low(front[i])))
        back = codes[max(first - half, 0) : max(last - half, 0)]
        for i in range(back.size):
            lowest = min(lowest, _high(back[i]))
            squares = np.int32(squares + np.int32(_high(back[i])) * np.int32(_high(back[i])))
        scale = np.float64(as_float(bits << 16))
        amount += np.float64(squares) * (scale * scale)
    return -1.0 if lowest == -8 else amount


@kernel(
    whole(
        *(BodiesOut, whole, whole, whole, Doubles, Doubles, real),
        *(FloatsOut, DoublesOut, FloatsOut, DoublesOut, DoublesOut, DoublesOut),
    )
)
def fold_int4(
    bodies, block, rows, begin, weights, counts, factor, merged, squares, decoded, near, far, lanes
):
    """Adds up many bodies from value `begin` on, with two weights each.

    Block by block, so that both sums stay in the nearest cache. Writes `factor` times
    Σ count · value, and the squares of Σ weight · value and of Σ count · value. Answers
    FINE, or which body no encoder wrote. `decoded`, `near` and `far` (a block each) and
    `lanes` (two times 64) are scratch.
    """
    end = begin + merged.size
    lanes[:] = 0.0
    for row in range(begin // block, -(-end // block)):
        first, last = max(row * block, begin), min((row + 1) * block, end)
        part = decoded[first - row * block : last - row * block]
        straight, along = near[: part.size], far[: part.size]
        straight[:] = 0.0
        along[:] = 0.0
        for which in range(bodies.shape[0]):
            if _int4(bodies[which], block, row, rows, _value, decoded, decoded, 0.0) != FINE:
                return which
            weight, count = weights[which], counts[which]
            for i in range(part.size):
                value = np.float64(part[i])
                straight[i] += value * weight
                along[i] += value * count
        add_squares(straight, lanes[:LANES])
        add_squares(along, lanes[LANES:])
        into = merged[first - begin : last - begin]
        for i in range(part.size):
            into[i] = np.float32(along[i] * factor)
    squares[0], squares[1] = total(lanes[:LANES]), total(lanes[LANES:])
    return FINE


# sign: one bit for each value, set if it is negative; eighths of the block in turn


@inlined
def _mean_scale(part, most, count):
    """Bits of the mean magnitude, or zero for a block of which nothing is left."""
    unit = as_float(rounded_up(as_float(most) * PER_32767, MOST_SCALE) << 16)
    inverse = ONE / unit
    amount = np.int32(0)
    for i in range(part.size):
        amount = np.int32(amount + np.int32(np.rint(abs(part[i]) * inverse)))
    if amount == 0:
        return np.int64(0)
    return nearest(np.float32(amount) / np.float32(count) * unit, MOST_SCALE)


@kernel(whole(Floats, BytesOut, whole, whole, whole, whole))
def encode_sign(values, body, block, start, rows, count):
    eighth = block // 8
    for row in range(start, start + values.size // block):
        part = values[(row - start) * block : (row - start + 1) * block]
        most = largest(part.view(np.int32))
        if most >= INFINITY:
            return row
        bits = _mean_scale(part, most, count)
        put_pair(body, rows * eighth, row, rows, bits)
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
        bits = pair(body, rows * eighth, row, rows)
        if bits > MOST_SCALE or 0 < bits < SCALE_FLOOR:
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
