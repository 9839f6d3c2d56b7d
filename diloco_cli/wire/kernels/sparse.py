"""The loops of the sparse codec: which values are the largest, where are they, how large.

A block's values are picked by magnitude, ties by their place, so there is one answer.
The smallest magnitude that still goes is found by counting: how many values share the
upper 11 bits, then the next 11, then the last 9. Numbers below 2**-126 are never picked.

Places travel as gaps: one byte 1 … 255 is the distance from the last picked value to this
one; a zero byte is a distance of 255 with nothing picked at its end.
"""

from __future__ import annotations

import numpy as np
from numba import types

from diloco_cli.wire.kernels.bits import (
    FINE,
    INFINITY,
    MOST_SCALE,
    ONE,
    PER_32767,
    SCALE_FLOOR,
    as_float,
    nearest,
    pair,
    put_pair,
    rounded_up,
)
from diloco_cli.wire.kernels.jit import Bytes, BytesOut, Floats, FloatsOut, inlined, kernel, whole

NOT_FINITE = -2
WRONG_COUNT, WRONG_GAP, WRONG_SCALE, WRONG_PADDING = -3, -4, -5, -6

IntsOut = types.Array(types.int32, 1, "C")

SMALLEST_NORMAL = 0x00800000
BINS = 1 << 11
FAR = 255


@inlined
def _bin_of(part, prefix, shift, low, bins, wanted):
    """Finds the bin of the `wanted`-th largest among magnitudes that begin with `prefix`.

    `shift` and `low` say which bits are counted. Answers with the bin and how many of its
    own are wanted.
    """
    bins[:] = 0
    for i in range(part.size):
        magnitude = np.int64(part[i] & 0x7FFFFFFF)
        if magnitude >> shift == prefix:
            bins[(magnitude >> low) & (BINS - 1)] += 1
    place = BINS
    while True:
        place -= 1
        if bins[place] >= wanted or place == 0:
            return place, wanted
        wanted -= bins[place]


@inlined
def _least(part, keep, bins):
    """The smallest magnitude that goes, as bits, and how many of exactly that size go."""
    normal, largest = 0, np.int32(0)
    for i in range(part.size):
        magnitude = np.int32(part[i] & np.int32(0x7FFFFFFF))
        largest = max(largest, magnitude)
        normal += magnitude >= SMALLEST_NORMAL
    if largest >= INFINITY:
        return NOT_FINITE, 0
    if normal <= keep:
        return SMALLEST_NORMAL, keep
    first, wanted = _bin_of(part, 0, 31, 20, bins, keep)
    second, wanted = _bin_of(part, first, 20, 9, bins, wanted)
    prefix = (first << 11) | second
    third, wanted = _bin_of(part, prefix, 9, 0, bins, wanted)
    return (prefix << 9) | (third & 511), wanted


@inlined
def _pick(part, least, ties, places):
    """Writes down the places of the values that go; says how many."""
    count = 0
    for i in range(part.size):
        magnitude = np.int64(part[i] & 0x7FFFFFFF)
        if magnitude >= least:
            if magnitude > least:
                places[count] = i
                count += 1
            elif ties > 0:
                places[count] = i
                count += 1
                ties -= 1
    return count


@inlined
def _put_gaps(places, count, body, at):
    """Writes the gaps of one block; says where the next block's begin."""
    last = -1
    for i in range(count):
        gap = places[i] - last
        last = places[i]
        while gap > FAR:
            body[at] = 0
            at += 1
            gap -= FAR
        body[at] = np.uint8(gap)
        at += 1
    return at


@inlined
def _levels(values, places, count, sizes):
    """Splits the picked values at their mean; gives the split and both groups' mean size.

    Sizes are whole numbers up to 32767, so that no sum depends on its order.
    """
    largest = np.float32(0)
    for i in range(count):
        largest = max(largest, abs(values[places[i]]))
    unit = as_float(rounded_up(largest * PER_32767, MOST_SCALE) << 16)
    inverse = ONE / unit
    total = np.int64(0)
    for i in range(count):
        sizes[i] = np.int32(np.rint(abs(values[places[i]]) * inverse))
        total += sizes[i]
    sums, counts = (np.int64(0), np.int64(0)), (np.int64(0), np.int64(0))
    for i in range(count):
        if sizes[i] * count > total:
            sums, counts = (sums[0], sums[1] + sizes[i]), (counts[0], counts[1] + 1)
        else:
            sums, counts = (sums[0] + sizes[i], sums[1]), (counts[0] + 1, counts[1])
    low, high = np.int64(0), np.int64(0)
    if counts[0]:
        low = nearest(np.float32(sums[0]) / np.float32(counts[0]) * unit, MOST_SCALE)
    if counts[1]:
        high = nearest(np.float32(sums[1]) / np.float32(counts[1]) * unit, MOST_SCALE)
    return total, low, high


@kernel(whole(Floats, BytesOut, whole, whole, whole, whole, IntsOut, IntsOut, IntsOut))
def encode_sparse(values, body, block, keep, keep_last, codes_at, bins, places, sizes):
    """Fills a zeroed body; answers FINE or the first block that holds no number."""
    rows = -(-values.size // block)
    whole_codes = (rows - 1) * keep + keep_last
    counts_at = codes_at + (whole_codes + 3) // 4
    gap_at, picked = 0, 0
    for row in range(rows):
        part = values[row * block : min((row + 1) * block, values.size)]
        bits = part.view(np.int32)
        least, ties = _least(bits, keep if row < rows - 1 else keep_last, bins)
        if least == NOT_FINITE:
            return row
        count = _pick(bits, least, ties, places)
        gap_at = _put_gaps(places, count, body, gap_at)
        total, low, high = _levels(part, places, count, sizes)
        for i in range(count):
            code = (part[places[i]] < 0) | ((sizes[i] * count > total) << 1)
            body[codes_at + picked // 4] |= np.uint8(code << (2 * (picked % 4)))
            picked += 1
        put_pair(body, counts_at, row, rows, count)
        put_pair(body, counts_at + 2 * rows, row, rows, low)
        put_pair(body, counts_at + 4 * rows, row, rows, high)
    return FINE


@inlined
def _wrong_scale(bits):
    return bits > MOST_SCALE or 0 < bits < SCALE_FLOOR


@kernel(whole(Bytes, whole, whole, whole, whole, whole, IntsOut, FloatsOut))
def decode_sparse(body, size, block, keep, keep_last, codes_at, places, amounts):
    """Lists the places and amounts of a body; answers how many, or what is wrong."""
    rows = -(-size // block)
    whole_codes = (rows - 1) * keep + keep_last
    counts_at = codes_at + (whole_codes + 3) // 4
    gap_at, picked = 0, 0
    for row in range(rows):
        count = pair(body, counts_at, row, rows)
        low = pair(body, counts_at + 2 * rows, row, rows)
        high = pair(body, counts_at + 4 * rows, row, rows)
        if count > (keep if row < rows - 1 else keep_last):
            return WRONG_COUNT
        if _wrong_scale(low) or _wrong_scale(high):
            return WRONG_SCALE
        place, end = row * block - 1, min((row + 1) * block, size)
        for _ in range(count):
            while gap_at < codes_at and body[gap_at] == 0:
                place += FAR
                gap_at += 1
            if gap_at == codes_at or place + np.int64(body[gap_at]) >= end:
                return WRONG_GAP
            place += np.int64(body[gap_at])
            gap_at += 1
            code = (np.int64(body[codes_at + picked // 4]) >> (2 * (picked % 4))) & 3
            amount = as_float((high if code & 2 else low) << 16)
            if amount == 0:
                return WRONG_SCALE
            places[picked] = place
            amounts[picked] = -amount if code & 1 else amount
            picked += 1
    if picked % 4 and body[codes_at + picked // 4] >> (2 * (picked % 4)):
        return WRONG_PADDING
    if body[gap_at:codes_at].any() or body[codes_at + (picked + 3) // 4 : counts_at].any():
        return WRONG_PADDING
    return picked
