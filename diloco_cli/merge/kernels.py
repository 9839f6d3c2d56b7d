"""The loops of the outer step."""

from __future__ import annotations

import numpy as np
from numba import types

from diloco_cli.wire.kernels.jit import Floats, FloatsOut, inlined, kernel, real, single, whole


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


@kernel(
    whole(
        *(Floats, real, Floats, Floats, Floats),
        *(single, single, single, single, single, single, single, single, types.boolean),
        *(FloatsOut, FloatsOut, FloatsOut),
    )
)
def adam(
    merged,
    factor,
    theta,
    moments,
    published,
    lr,
    keep_m,
    add_m,
    keep_v,
    add_v,
    epsilon,
    m_factor,
    v_factor,
    drain,
    new_theta,
    kept,
    change,
):
    """Takes a step of Adam; gives the bits of the largest number it made.

    m and v of a weight lie side by side. `merged` may be the memory of `new_theta`.
    """
    most = np.int32(0)
    for i in range(merged.size):
        delta = np.float32(np.float64(merged[i]) * factor)
        m, v = moments[2 * i], moments[2 * i + 1]
        squares = np.float32(np.float32(keep_v * v) + np.float32(add_v * np.float32(delta * delta)))
        along = delta
        if not drain:
            m = np.float32(np.float32(keep_m * m) + np.float32(add_m * delta))
            v = squares
            along = np.float32(m_factor * m)
        root = np.float32(np.sqrt(np.float32(v_factor * squares)) + epsilon)
        weight = np.float32(theta[i] - np.float32(lr * np.float32(along / root)))
        kept[2 * i], kept[2 * i + 1] = m, v
        new_theta[i] = weight
        change[i] = np.float32(weight - published[i])
        most = max(_larger(_larger(most, m), v), _larger(most, change[i]))
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
