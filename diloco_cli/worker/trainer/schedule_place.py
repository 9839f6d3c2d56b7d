"""Where in the learning-rate schedule is the run? Its tokens ÷ its budget, as the server says.

The server's word comes with the news, a heartbeat late. Until the next word every own step moves
the place on by as much as steps did lately: a slow region's by more than one, for the others train
meanwhile. The place never goes back, so no rate is paid for twice; only an amended budget moves
it, and then with a plan of its own (`engines/learning_rate.py`).
"""

from __future__ import annotations

MEASURED = 0.01
"""Share of the run over which the pace is measured: less says more about when news arrived."""


class SchedulePlace:
    """The place of the next step, from 0 to the horizon."""

    def __init__(self, horizon: int, place: float = 0.0) -> None:
        self.horizon = horizon
        self._place = self._told = float(place)
        self._steps = 0
        """Own steps since it was told."""
        self._pace = 1.0
        """Places that one own step is worth: one, while all regions are as the spec has them."""
        self._anchor: float | None = None
        """What it was told when the measurement of the pace began."""
        self._walked = 0
        """Own steps since then."""

    def hear(self, progress: float) -> None:
        """Takes the server's word: which share of the budget is trained."""
        told = progress * self.horizon
        if self._anchor is None:
            self._anchor, self._walked = told, 0
        elif told - self._anchor >= MEASURED * self.horizon and self._walked:
            self._pace = (told - self._anchor) / self._walked
            self._anchor, self._walked = told, 0
        # Without a word the place that was reached stays: what is told may be behind it.
        self._place, self._told, self._steps = self._reached(), told, 0

    def stepped(self) -> None:
        """A step was made."""
        self._steps += 1
        self._walked += 1

    @property
    def next(self) -> int:
        """The place of the next step."""
        self._place = self._reached()
        return int(self._place)

    def _reached(self) -> float:
        expected = self._told + self._pace * self._steps
        return min(max(self._place, expected), float(self.horizon))
