"""What happens next? A heap of moments, and a clock that jumps from one to the next."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from typing import Any

Seconds = float


class EventQueue:
    """Acts in the order of their time; those of one moment in the order they were put down."""

    __slots__ = ("_count", "_heap", "now")

    def __init__(self) -> None:
        self.now: Seconds = 0.0
        self._heap: list[tuple[Seconds, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0

    def at(self, time: Seconds, act: Callable[..., None], *arguments: Any) -> None:
        self._count += 1
        heapq.heappush(self._heap, (time, self._count, act, arguments))

    def run(self, until: Seconds, enough: Callable[[], bool]) -> int:
        """Lets time pass until a moment, or until there was enough; counts what happened."""
        heap, pop, happened = self._heap, heapq.heappop, 0
        while heap and heap[0][0] <= until and not enough():
            self.now, _, act, arguments = pop(heap)
            act(*arguments)
            happened += 1
        if not enough() and until < math.inf:
            self.now = until
        return happened
