"""When may the next inner step begin?

Three things slow a region down on purpose: `speed` in its spec, a pace that `chaos.step_seconds`
sets for all, and a `slow` fault, which is a number in the file `slow` of the region's folder.

    paced     steps begin on a grid of step_seconds × factor ÷ speed. One that was held up is
              made up for by the next, never more than one, so the mean is the pace and no drift
              comes from clocks, while a region that stood still gets nothing back
    unpaced   after a step there is a pause that makes it factor ÷ speed times as long
"""

from __future__ import annotations

from pathlib import Path

from diloco_cli.worker.mailbox import SLOW, Mailbox
from diloco_cli.worker.trainer.task import RegionTask


class StepPacing:
    def __init__(self, *, speed: float, pace: float | None, slow: Path | None) -> None:
        self.due = 0.0
        """The next step begins no sooner."""
        self._speed, self._pace, self._slow = speed, pace, slow
        self._factor = self._read()

    @property
    def measures(self) -> bool:
        """Whether the true length of a step is needed, which has to be waited for."""
        return self._pace is None and self._factor > self._speed

    def stepped(self, began: float, ended: float) -> None:
        """Takes note of a step; one that was mostly compiling begins when it ends."""
        stretch = self._factor / self._speed
        if self._pace is None:
            self.due = ended + (ended - began) * (stretch - 1)
        else:
            pace = self._pace * stretch
            self.due = (max(self.due, began - pace) if self.due else began) + pace
        self._factor = self._read()

    def paused(self) -> None:
        """The region stands still: its next step starts a grid of its own."""
        self.due = 0.0

    def _read(self) -> float:
        if self._slow is None:
            return 1.0
        try:
            return max(1.0, float(self._slow.read_text()))
        except (OSError, ValueError):
            return 1.0


def pacing_of(task: RegionTask, mailbox: Mailbox) -> StepPacing:
    """The pace that this region was told to train at."""
    chaos = task.spec.chaos
    speed = task.spec.region(task.region).speed
    # Only chaos writes the file, so that others need not look for it.
    slow = mailbox.folder / SLOW if chaos else None
    return StepPacing(speed=speed, pace=chaos.step_seconds if chaos else None, slow=slow)
