"""How fast and how well does it train? Moving averages, fed by the trainer."""

from __future__ import annotations

import math

MEMORY = 0.1
"""Weight of the newest observation."""
SUSTAINED = 10.0
"""Seconds of steps after which their average is a pace and not a lucky moment."""


class TrainingAverages:
    def __init__(self, *, now: float) -> None:
        self.loss: float | None = None
        self.step_seconds = 0.0
        self.tokens_per_second = 0.0
        self.bad = 0
        """Steps in a row whose loss was not finite."""
        self.worked = 0.0
        """Seconds in steps; pauses and the first step, which compiles, are left out."""
        self.blocked = 0.0
        """Seconds between steps that went into the exchange: mail, new versions, waiting."""
        self._best = self._span = self._span_tokens = 0.0
        self._last_step: float | None = None
        self._since = now
        self._tokens = 0.0

    def lost(self, loss: float) -> None:
        """Notes the loss of a step."""
        if not math.isfinite(loss):
            self.bad += 1
            return
        self.bad = 0
        self.loss = loss if self.loss is None else self.loss + MEMORY * (loss - self.loss)

    def stepped(self, tokens: float, *, now: float) -> None:
        """Notes that a step was made, this long after the one before."""
        self._tokens += tokens
        if self._last_step is not None:
            seconds = now - self._last_step
            known = self.step_seconds
            self.step_seconds = known + MEMORY * (seconds - known) if known else seconds
            self._sustain(seconds, tokens)
        self._last_step = now

    def _sustain(self, seconds: float, tokens: float) -> None:
        self.worked += seconds
        self._span += seconds
        self._span_tokens += tokens
        if self._span >= SUSTAINED:
            self._best = max(self._best, self._span_tokens / self._span)
            self._span = self._span_tokens = 0.0

    @property
    def pace(self) -> float:
        """Tokens a second, the best that was kept up for `SUSTAINED` seconds of steps."""
        return self._best or (self._span_tokens / self._span if self._span else 0.0)

    def paused(self) -> None:
        """The time until the next step is not the time of a step."""
        self._last_step = None

    def read(self, *, now: float) -> None:
        """Brings the speed up to date; time spent waiting counts."""
        seconds = now - self._since
        if seconds <= 0:
            return
        speed, known = self._tokens / seconds, self.tokens_per_second
        # Long spans say all there is to say; short ones only a little.
        share = min(1.0, seconds / 3.0) if known else 1.0
        self.tokens_per_second = known + share * (speed - known)
        self._since, self._tokens = now, 0.0
