"""Floats as byte planes: all lowest bytes, then all of the next, up to the highest.

Each function answers FINE, or with the first stretch that holds a NaN or an infinity.
"""

from __future__ import annotations

import numpy as np

from diloco_cli.wire.kernels.bits import FINE, INFINITY, largest
from diloco_cli.wire.kernels.jit import Bytes, BytesOut, Floats, FloatsOut, kernel, whole

STRETCH = 1 << 11
"""Values that are moved plane by plane while they are in the cache."""


@kernel(whole(Floats, BytesOut))
def split_fp32(values, body):
    size = values.size
    bits = values.view(np.int32)
    for start in range(0, size, STRETCH):
        part = bits[start : min(start + STRETCH, size)]
        if largest(part) >= INFINITY:
            return start
        for plane in range(4):
            into = body[plane * size + start : plane * size + start + part.size]
            shift = np.int32(8 * plane)
            for i in range(part.size):
                into[i] = np.uint8(np.int32(part[i] >> shift))
    return FINE


@kernel(whole(Bytes, FloatsOut))
def join_fp32(body, values):
    size = values.size
    bits = values.view(np.int32)
    first, second = body[:size], body[size : 2 * size]
    third, fourth = body[2 * size : 3 * size], body[3 * size :]
    for i in range(size):
        low = np.int32(first[i]) | np.int32(np.int32(second[i]) << 8)
        high = np.int32(third[i]) | np.int32(np.int32(fourth[i]) << 8)
        bits[i] = np.int32(low) | np.int32(np.int32(high) << 16)
    return 0 if largest(bits) >= INFINITY else FINE


@kernel(whole(Floats, BytesOut))
def split_bf16(values, body):
    size = values.size
    bits = values.view(np.uint32)
    low, high = body[:size], body[size:]
    if largest(values.view(np.int32)) >= INFINITY:
        return 0
    for i in range(size):
        even = np.uint32(np.uint32(bits[i] >> np.uint32(16)) & np.uint32(1))
        half = np.uint32(np.uint32(bits[i] + np.uint32(0x7FFF + even)) >> np.uint32(16))
        # The largest floats would round to infinity; they become the largest bf16.
        over = np.uint32(half & np.uint32(0x7F80)) == np.uint32(0x7F80)
        half = np.uint32(half - np.uint32(over))
        low[i] = np.uint8(half)
        high[i] = np.uint8(np.uint32(half >> np.uint32(8)))
    return FINE


@kernel(whole(Bytes, FloatsOut))
def join_bf16(body, values):
    size = values.size
    bits = values.view(np.int32)
    low, high = body[:size], body[size:]
    for i in range(size):
        half = np.int32(low[i]) | np.int32(np.int32(high[i]) << 8)
        bits[i] = np.int32(np.int32(half) << 16)
    return 0 if largest(bits) >= INFINITY else FINE
