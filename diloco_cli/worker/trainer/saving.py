"""When is a checkpoint due?

A trainer that dies loses what it did since its last checkpoint, so the next one comes as
soon as the last one is paid for: at most one part in `SHARE` of the time goes into
checkpoints, the thread that writes them included. A small model is saved every two
seconds, a large one as often as it can bear.
"""

from __future__ import annotations

from diloco_cli.worker.trainer.checkpoint import Checkpoint
from diloco_cli.worker.trainer.mail import MailThreads

SHORTEST = 2.0
LONGEST = 20.0
SHARE = 200.0
"""Of the time, a checkpoint may take one part in so many."""
BLOCKED_SHARE = 50.0
"""A model that cannot be saved for that may still hold the training up for this part."""


class CheckpointSchedule:
    """Hands checkpoints to the desk and remembers what they cost."""

    def __init__(self, desk: MailThreads, *, now: float) -> None:
        self._desk = desk
        self._saved_at, self._blocked = now, 0.0

    def save(self, checkpoint: Checkpoint, *, began: float, now: float) -> None:
        """Writes a checkpoint beside the training, which it has held up since `began`."""
        self._desk.save(checkpoint)
        self._saved_at, self._blocked = now, now - began

    def is_due(self, *, now: float) -> bool:
        pause = interval(self._blocked, self._desk.effort)
        return now >= self._saved_at + pause and not self._desk.saving


def interval(blocked: float, effort: float) -> float:
    """Seconds from one checkpoint to the next: `blocked` stops the training, `effort` is beside."""
    rarest = max(LONGEST, BLOCKED_SHARE * blocked)
    return min(max(SHORTEST, SHARE * (blocked + effort)), rarest)
