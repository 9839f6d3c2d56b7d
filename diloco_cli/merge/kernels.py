"""The loops of a merge: lengths, weighted sums of many bodies, the outer step.

Bodies are those of int4 and uniform. Numbers are added up in float64 and in one order:
bodies in theirs, blocks from first to last; sums of squares of floats in 64 lanes.
"""

from __future__ import annotations

import numpy as np

from diloco_cli.wire.kernels.jit import (
    BodiesOut,
    Bytes,
    Doubles,
    DoublesOut,
    Floats,
    FloatsOut,
    inlined,
    kernel,
    real,
    single,
    whole,
)

FINE = -1
SCALE_FLOOR, MOST_INT4 = 0x0100, 0x7E12
LANES = 64


@inlined
def _scale_bits(body, at, row, rows):
    return np.int64(body[at + row]) | (np.int64(body[at + rows + row]) << 8)


@inlined
def _float(bits):
    return np.int32(bits).view(np.float32)


@inlined
def _low(byte):
    return np.int8(np.int8(byte << 4) >> 4)


@inlined
def _high(byte):
    return np.int8(byte >> 4)


@kernel(real(Bytes, whole, whole, whole, whole))
def square_int4(body, block, rows, begin, end):
    """Sums the squares of values `begin` to `end` of a body; −1 if no encoder wrote it.

    Codes are squared and summed as whole numbers, block by block.
    """
    half, total, lowest = block // 2, 0.0, np.int8(0)
    for row in range(begin // block, -(-end // block)):
        bits = _scale_bits(body, rows * half, row, rows)
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
        scale = np.float64(_float(bits << 16))
        total += np.float64(squares) * (scale * scale)
    return -1.0 if lowest == -8 else total


@inlined
def _block_int4(body, row, rows, into):
    """Decodes one block; says whether an encoder may have written it."""
    half = into.size // 2
    bits = _scale_bits(body, rows * half, row, rows)
    scale = _float(bits << 16)
    codes = body[row * half : (row + 1) * half].view(np.int8)
    first, second, lowest = into[:half], into[half:], np.int8(0)
    for i in range(half):
        lowest = min(lowest, _low(codes[i]))
        first[i] = np.float32(_low(codes[i])) * scale
    for i in range(half):
        lowest = min(lowest, _high(codes[i]))
        second[i] = np.float32(_high(codes[i])) * scale
    return lowest > -8 and SCALE_FLOOR <= bits <= MOST_INT4


@inlined
def _add_squares(part, lanes):
    even = part.size // LANES * LANES
    for start in range(0, even, LANES):
        some = part[start : start + LANES]
        for i in range(LANES):
            lanes[i] += some[i] * some[i]
    for i in range(even, part.size):
        lanes[i - even] += part[i] * part[i]


@inlined
def _total(lanes):
    total = 0.0
    for i in range(LANES):
        total += lanes[i]
    return total


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
            if not _block_int4(bodies[which], row, rows, decoded):
                return which
            weight, count = weights[which], counts[which]
            for i in range(part.size):
                value = np.float64(part[i])
                straight[i] += value * weight
                along[i] += value * count
        _add_squares(straight, lanes[:LANES])
        _add_squares(along, lanes[LANES:])
        into = merged[first - begin : last - begin]
        for i in range(part.size):
            into[i] = np.float32(along[i] * factor)
    squares[0], squares[1] = _total(lanes[:LANES]), _total(lanes[LANES:])
    return FINE


@inlined
def _larger(most, value):
    return max(most, np.int32(np.float32(value).view(np.int32) & np.int32(0x7FFFFFFF)))


@kernel(
    whole(
        *(Floats, real, Floats, Floats, Floats, single, single),
        *(FloatsOut, FloatsOut, FloatsOut),
    )
)
def nesterov(merged, factor, theta, momentum, published, lr, mu, new_theta, kept, change):
    """Takes a step with Nesterov momentum; gives the bits of the largest number it made.

    `merged` may be the memory of `new_theta`.
    """
    most = np.int32(0)
    for i in range(merged.size):
        delta = np.float32(np.float64(merged[i]) * factor)
        held = np.float32(mu * momentum[i] + delta)
        weight = np.float32(theta[i] - np.float32(lr * np.float32(delta + np.float32(mu * held))))
        kept[i] = held
        new_theta[i] = weight
        change[i] = np.float32(weight - published[i])
        most = max(_larger(most, held), _larger(most, change[i]))
    return np.int64(most)


@kernel(whole(Floats, real, Floats, Floats, single, FloatsOut, FloatsOut))
def descend(merged, factor, theta, published, lr, new_theta, change):
    """Takes a plain step; gives the bits of the largest number it made."""
    most = np.int32(0)
    for i in range(merged.size):
        delta = np.float32(np.float64(merged[i]) * factor)
        new_theta[i] = np.float32(theta[i] - np.float32(lr * delta))
        change[i] = np.float32(new_theta[i] - published[i])
        most = _larger(most, change[i])
    return np.int64(most)


@kernel(whole(Floats, Floats, FloatsOut))
def add_values(values, more, into):
    """Adds two vectors; gives the bits of the largest sum."""
    most = np.int32(0)
    for i in range(into.size):
        into[i] = values[i] + more[i]
        most = _larger(most, into[i])
    return np.int64(most)
