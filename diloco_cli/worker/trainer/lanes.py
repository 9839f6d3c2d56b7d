"""Which lanes does this trainer read, and which does it hand over?

What the server says is followed at a boundary between two steps. A lane that is given up is
reported only once a checkpoint holds all the work of the windows before: whoever reads on from
there reads nothing again, and nothing is lost if we die.
"""

from __future__ import annotations

from dataclasses import asdict

from diloco_cli.core import lanes
from diloco_cli.core.lanes import (
    Assignment,
    CorpusOrder,
    Cursor,
    LanePosition,
    Positions,
    read_positions,
)
from diloco_cli.wire.messages import LaneAssignment, TextCursor, TextOrder
from diloco_cli.worker.trainer.checkpoints.checkpoint import CheckpointWriter
from diloco_cli.worker.trainer.weights_and_books import TrainedWeights


class LaneFollower:
    def __init__(
        self, weights: TrainedWeights, checkpoints: CheckpointWriter, saved: Cursor | None
    ) -> None:
        """`saved` is what the trainer goes on from: durable, and of this text or of another."""
        self._weights, self._checkpoints = weights, checkpoints
        self.order: CorpusOrder = weights.stream.order.named
        if saved is None or saved.order != self.order.digest:
            saved = Cursor(self.order.digest, self.order.lanes)
        weights.cursor = checkpoints.tried = checkpoints.kept = saved
        self._reported: Positions = saved.released

    def follow(self, told: LaneAssignment | None) -> tuple[Positions, Positions] | None:
        """Reads on as the server says; gives what was taken up and what was given up, if any."""
        if told is None:
            return None
        before = self._weights.cursor
        heard = Assignment(told.order, told.count, read_positions(told.lanes), told.asked)
        after = self._weights.cursor = lanes.follow(before, heard, windows=self.order.windows)
        if after is before:
            return None
        return _new(after.lanes, before.lanes), _new(after.released, before.released)

    @property
    def owes_checkpoint(self) -> bool:
        """Something was given up that no checkpoint holds yet, nor one that is being written."""
        return bool(_new(self._weights.cursor.released, self._checkpoints.tried.released))

    @property
    def has_news(self) -> bool:
        """Something that was given up is durable and not reported yet."""
        return bool(_new(self._released(), self._reported))

    def report(self) -> TextCursor:
        """How far we are, and what others may read on."""
        cursor, self._reported = self._weights.cursor, self._released()
        return TextCursor(
            order=TextOrder(**asdict(self.order)),
            count=cursor.count,
            lanes=dict(cursor.lanes),
            released=dict(self._reported),
        )

    def waits_for(self, told: LaneAssignment | None) -> str:
        """Says why there is nothing to read; empty if there is something."""
        if self._weights.cursor.lanes:
            return ""
        if told is None:
            return "waiting for the server to say which lanes of the text to read"
        if told.order != self.order.digest:
            return "waiting for lanes: this text is another than the server knows of"
        return f"waiting for lanes: others read all {told.count} and are asked for some"

    def _released(self) -> Positions:
        """What was given up, in the lanes there are now, as far as it is durable."""
        durable, cursor = self._checkpoints.kept.released, self._weights.cursor
        return {lane: at for lane, at in cursor.released.items() if durable.get(lane) == at}


def _new(after: Positions, before: Positions) -> dict[int, LanePosition]:
    return {lane: at for lane, at in after.items() if before.get(lane) != at}
