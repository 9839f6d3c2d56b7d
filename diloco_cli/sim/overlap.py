"""How fast must a link be so that training hardly waits for it? Layer by layer, as published.

Two models of the literature, both of one job whose replicas reduce over one line, first in,
first out, with nothing lost:

    layers    forward, then backward from the last layer on; a layer's reduction starts when
              its backward is done and must be over before its forward some steps later
    buckets   gradients leave in equal buckets during the backward pass and must all be there
              at the end of a step some steps later

Utilisation is compute time ÷ total time. Rates are worked on all at once, as arrays.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

Seconds = float
GRID = np.logspace(-1, 3, 50) * 1e9
"""Rates the published tables choose from, in bits per second."""
TARGETS = (0.50, 0.80, 0.90, 0.95, 0.99)


@dataclass(frozen=True, slots=True)
class ReductionJob:
    """What is trained, and when which layers travel."""

    bits: float
    """Of one reduction of the whole model."""
    layers: int
    step: Seconds
    every: int = 1
    """Steps between two reductions of one layer."""
    fragments: int = 1
    apart: int = 1
    """Steps between two fragments."""
    overlap: int = 0
    """Steps a reduction may take beyond the next one."""


def utilisation(job: ReductionJob, rates: np.ndarray, *, periods: int = 3) -> np.ndarray:
    """Compute time ÷ total time at each of the rates, by the model of layers."""
    third = job.step / (3 * job.layers)
    each = job.bits / job.layers / rates
    now = np.zeros_like(rates)
    line = np.zeros_like(rates)
    owed: dict[int, dict[int, np.ndarray]] = {}
    """By step: when each layer's reduction is over that its forward waits for."""
    steps = max(40, periods * job.every)
    for step in range(steps):
        last = 0
        for layer, over in sorted(owed.pop(step, {}).items()):
            now = np.maximum(now + (layer - last) * third, over)
            last = layer
        now = now + (job.layers - last) * third
        due = owed.setdefault(step + 1 + job.overlap, {})
        for layer in reversed(_leaving(job, step)):
            released = now + (job.layers - layer) * 2 * third
            line = np.maximum(line, released) + each
            due[layer] = line
        now = now + 2 * job.layers * third
    for waiting in owed.values():
        for over in waiting.values():
            now = np.maximum(now, over)
    return steps * job.step / now


def _leaving(job: ReductionJob, step: int) -> list[int]:
    """The layers whose reduction starts in this step, from the first on."""
    place = (step + 1) % job.every
    if job.fragments == 1:
        return list(range(job.layers)) if place == 0 else []
    number, off = divmod(place, job.apart)
    if off or number >= job.fragments:
        return []
    return list(range(number, job.layers, job.fragments))


def needed(job: ReductionJob, target: float, *, grid: np.ndarray = GRID) -> float:
    """The first rate of the grid with which the target is reached; infinite if none is."""
    enough = np.nonzero(utilisation(job, grid) >= target)[0]
    return float(grid[enough[0]]) if enough.size else float("inf")


@dataclass(frozen=True, slots=True)
class Buckets:
    """Data parallel training by the model of buckets."""

    parameters: float
    step: Seconds
    replicas: int
    buckets: int = 64
    bits: float = 16.0
    every: int = 1
    fragments: int = 1
    overlap: int = 0

    @property
    def volume(self) -> float:
        """Bits that a ring of replicas moves over each line for one reduction."""
        return 2 * (1 - 1 / self.replicas) * self.parameters * self.bits / self.fragments


def bucket_utilisation(job: Buckets, rate: float, *, steps: int = 400) -> float:
    """Simulates steps in order: buckets queue on the line, a step's end waits for them."""
    now = line = stalled = 0.0
    each = job.volume / job.buckets / rate
    waiting: list[tuple[int, Seconds]] = []
    apart = max(1, job.every // job.fragments)
    for step in range(steps):
        if (step + 1) % apart == 0:
            for bucket in range(job.buckets):
                free = now + job.step / 3 + (bucket + 1) / job.buckets * job.step * 2 / 3
                line = max(line, free) + each
            waiting.append((step + job.overlap, line))
        now += job.step
        while waiting and waiting[0][0] <= step:
            stall = max(0.0, waiting.pop(0)[1] - now)
            stalled += stall
            now += stall
    return steps * job.step / (steps * job.step + stalled)


def bucket_rate(job: Buckets, target: float) -> float:
    """The lowest rate that reaches the target, found by halving."""
    low, high = 1e3, 1e15
    while high / low > 1.0001:
        middle = (low * high) ** 0.5
        low, high = (low, middle) if bucket_utilisation(job, middle) >= target else (middle, high)
    return high
