"""How fast is one host of a region, by itself?

Devices of several hosts wait for each other in every step, so a step takes all of them equally
long, whoever is slow. Therefore every host times the same small piece of work on each of its own
devices, now and then, between two steps, and without the others.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

WIDTH = 256
"""Of the matrices that are multiplied."""
LOOK_SECONDS = 0.02
"""What the work takes host 0, on all of its devices together."""
EVERY_SECONDS = 20.0
SAMPLES = 3
"""The shortest of so many times counts: a host is slow if it is slow every time."""


@jax.jit
def _work(matrix: jax.Array, rounds: jax.Array) -> jax.Array:
    def again(_: Any, values: jax.Array) -> jax.Array:
        return jnp.tanh(values @ matrix)

    return jax.lax.fori_loop(0, rounds, again, matrix)


class HostTimer:
    """Times the devices of this host."""

    def __init__(self, devices: Sequence[Any]) -> None:
        own = [each for each in devices if each.process_index == jax.process_index()]
        values = np.random.default_rng(0).standard_normal((WIDTH, WIDTH), np.float32) / 16
        self._matrices = [jax.device_put(values, device) for device in own]
        self._times: deque[float] = deque(maxlen=SAMPLES)

    def choose_rounds(self) -> int:
        """How often the work is to be repeated, so that it can be timed here."""
        self._time(1)  # Compiles.
        rounds = 1
        while self._time(rounds) * len(self._matrices) < LOOK_SECONDS and rounds < 1 << 20:
            rounds *= 2
        return rounds

    def measure(self, rounds: int) -> float | None:
        """Seconds that the work takes the slowest device of this host; None until that is sure."""
        if not self._times:
            self._time(1)
        self._times.append(self._time(rounds))
        return min(self._times) if len(self._times) == SAMPLES else None

    def _time(self, rounds: int) -> float:
        return max(map(partial(_seconds, rounds=rounds), self._matrices))


def _seconds(matrix: jax.Array, *, rounds: int) -> float:
    began = time.perf_counter()
    _work(matrix, np.int32(rounds)).block_until_ready()
    return time.perf_counter() - began
