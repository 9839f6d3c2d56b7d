"""Sums over decoded values, in an order that no number of threads or lanes changes."""

from __future__ import annotations

import numpy as np

from diloco_cli.wire.kernels.bits import largest
from diloco_cli.wire.kernels.jit import (
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

LANES = 64
"""Running sums of a sum: as many as keep the adders busy (16 took three times as long)."""


@kernel(whole(Floats, DoublesOut, real))
def add_scaled(values, sums, weight):
    """Adds `weight` times each value; every product and every sum is rounded to float64."""
    for i in range(sums.size):
        sums[i] += np.float64(values[i]) * weight
    return 0


@kernel(whole(Floats, FloatsOut, single))
def add_scaled_single(values, sums, weight):
    """The same in float32, weight and all."""
    for i in range(sums.size):
        sums[i] += values[i] * weight
    return 0


@kernel(whole(Floats, DoublesOut, DoublesOut, real, real))
def add_twice(values, total, directions, straight, along):
    """Adds each value to two sums, with two weights."""
    for i in range(values.size):
        value = np.float64(values[i])
        total[i] += value * straight
        directions[i] += value * along
    return 0


@kernel(whole(Doubles, FloatsOut, real))
def put_scaled(sums, values, factor):
    """Turns sums into float32 values."""
    for i in range(values.size):
        values[i] = np.float32(sums[i] * factor)
    return 0


@kernel(whole(Floats))
def largest_bits(values):
    """Bits of the largest magnitude; those of NaN and infinity are above all numbers'."""
    return np.int64(largest(values.view(np.int32)))


@inlined
def add_squares(values, lanes):
    """Adds the square of value i to lane i mod 64."""
    even = values.size // LANES * LANES
    for start in range(0, even, LANES):
        part = values[start : start + LANES]
        for i in range(LANES):
            lanes[i] += np.float64(part[i]) * np.float64(part[i])
    for i in range(values.size - even):
        lanes[i] += np.float64(values[even + i]) * np.float64(values[even + i])


@inlined
def total(lanes):
    amount = 0.0
    for i in range(LANES):
        amount += lanes[i]
    return amount


@kernel(real(Doubles, DoublesOut))
def square_sum_double(values, lanes):
    """Sums squares of float64 values in the same order as `square_sum`."""
    lanes[:] = 0.0
    add_squares(values, lanes)
    return total(lanes)


@kernel(real(Floats, DoublesOut))
def square_sum(values, lanes):
    """Sums the squares in float64: value i goes into lane i mod 64, then the lanes are added."""
    lanes[:] = 0.0
    add_squares(values, lanes)
    return total(lanes)
