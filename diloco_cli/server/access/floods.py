"""How much of something one peer may do before it is too much: so many at once, then a trickle."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

MOST_PEERS = 4096
"""That are remembered; whoever was longest quiet is forgotten."""


@dataclass(slots=True)
class _Peer:
    left: float
    at: float
    held_back: int = 0


class Flood:
    """Counts by peer."""

    def __init__(
        self, burst: int, per_second: float, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.burst, self.per_second, self._clock = burst, per_second, clock
        self._peers: OrderedDict[str, _Peer] = OrderedDict()

    def take(self, peer: str) -> int | None:
        """Says how many were held back since the last one that passed; None if this one is too."""
        now = self._clock()
        known = self._peers.pop(peer, None) or _Peer(float(self.burst), now)
        self._peers[peer] = known
        if len(self._peers) > MOST_PEERS:
            self._peers.popitem(last=False)
        known.left = min(float(self.burst), known.left + (now - known.at) * self.per_second)
        known.at = now
        if known.left < 1:
            known.held_back += 1
            return None
        known.left -= 1
        held_back, known.held_back = known.held_back, 0
        return held_back
