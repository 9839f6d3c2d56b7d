"""What kernels share: the bits of floats, and bf16 scales as two bytes in a body.

Scales are kept as bf16, the upper half of a float32. A body has the low bytes of all its
scales and then the high bytes.
"""

from __future__ import annotations

import numpy as np

from diloco_cli.wire.kernels.jit import inlined

FINE = -1
"""The answer of a kernel that found nothing wrong."""

INFINITY = 0x7F800000
SCALE_FLOOR = 0x0100
"""2**-125 as bf16. Under it every subnormal rounds to zero, on hardware that flushes them too."""
MOST_INT8, MOST_INT4, MOST_SCALE = 0x7C01, 0x7E12, 0x7F7F
"""The largest scales, as bf16, whose product with 127, 7 and 1 is finite."""

ONE = np.float32(1)
PER_127 = ONE / np.float32(127)
PER_7 = ONE / np.float32(7)
PER_32767 = ONE / np.float32(32767)


@inlined
def as_float(bits):
    return np.int32(bits).view(np.float32)


@inlined
def largest(bits):
    """Bits of the largest magnitude; those of NaN and infinity are above all numbers'."""
    most = np.int32(0)
    for i in range(bits.size):
        most = max(most, np.int32(bits[i] & np.int32(0x7FFFFFFF)))
    return most


@inlined
def rounded_up(wanted, most):
    """The bf16 scale that is not below `wanted`, kept where no product overflows."""
    bits = (np.int64(np.float32(wanted).view(np.int32)) + 0xFFFF) >> 16
    return min(max(bits, SCALE_FLOOR), most)


@inlined
def nearest(wanted, most):
    """The bf16 scale nearest to `wanted`, for codes that are clipped or have no size."""
    bits = (np.int64(np.float32(wanted).view(np.int32)) + 0x8000) >> 16
    return min(max(bits, SCALE_FLOOR), most)


@inlined
def put_pair(body, at, row, rows, number):
    """Writes a number of two bytes, for block `row` of `rows`."""
    body[at + row] = np.uint8(number & 255)
    body[at + rows + row] = np.uint8(number >> 8)


@inlined
def pair(body, at, row, rows):
    return np.int64(body[at + row]) | (np.int64(body[at + rows + row]) << 8)
