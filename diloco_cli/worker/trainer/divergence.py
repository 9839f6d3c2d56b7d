"""Does this region throw its work away again and again?

Work whose loss or values are not finite is given up: the trainer goes on from the published
weights. Once is an accident. Several times in a row, without anything merged in between, it
trains for nothing, and people must hear of it: the server sees no frame that it could refuse.
"""

from __future__ import annotations

from diloco_cli.wire.messages import Divergence


class DivergenceCount:
    """How often in a row work was given up, since sound work of the region was merged."""

    def __init__(self) -> None:
        self.times = 0
        self._tokens = self._began = 0.0
        self._step = self._clock = self._sound = 0
        self._why, self._published = "", False

    def stepped(self, *, sound: bool) -> None:
        """Takes note of a step; without a loss it counts as sound."""
        self._sound += sound

    def gave_up(self, why: str, tokens: float, *, step: int, now: float) -> None:
        """So many tokens were thrown away at this step, for this reason."""
        if not self.times:
            self._tokens, self._began, self._step = 0.0, now, step
        self.times += 1
        self._tokens += tokens
        self._why, self._published = why, not self._sound
        self._clock, self._sound = step, 0

    def merged(self, clock: int) -> None:
        """A frame that was posted at this step reached the global weights.

        One that was sent before the work went bad says nothing.
        """
        if clock > self._clock and self._sound:
            self.times = 0

    def report(self, *, now: float) -> Divergence | None:
        """What the server is told; None while nothing is wrong."""
        if not self.times:
            return None
        return Divergence(
            times=self.times,
            tokens=round(self._tokens, 1),
            step=self._step,
            seconds=round(now - self._began, 1),
            published=self._published,
            why=self._why,
        )
