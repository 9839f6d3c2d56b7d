"""Checkpoints of a region on many devices: each device's part apart, written by Orbax.

A whole copy of weights, optimiser and anchors on one host is too much from a billion parameters
on. Here arrays are saved as they lie, and only what is nowhere else: what is held of every
fragment, and the optimiser. The published weights are in the mailbox, or at the server:

    local = image − held

So a checkpoint needs no anchors and fits whatever version is the newest by then.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from diloco_cli.core.lanes import Cursor
from diloco_cli.errors import StoreError
from diloco_cli.spec.schema import RegionSpec
from diloco_cli.worker.engines.orbax_folder import OrbaxFolder, SavedState
from diloco_cli.worker.mailbox import Mailbox
from diloco_cli.worker.trainer.checkpoints.checkpoint import VERSION, Checkpoint, ShardedArrays
from diloco_cli.worker.trainer.weights_and_books import TrainedWeights, WeightsAndBooks


class ShardedCheckpoints:
    """One region's sharded checkpoints; see `CheckpointTarget`."""

    def __init__(self, folder: OrbaxFolder, every: float, *, before: Sequence[Path] = ()) -> None:
        """`before` are folders of the runs that this one continues, newest first."""
        self._folder, self._every, self._before = folder, every, before

    def begin(self, weights: WeightsAndBooks) -> Callable[[], None]:
        assert isinstance(weights, TrainedWeights)  # Whoever makes the steps can save where it is.
        fragments = weights.task.layout.fragments
        notes = {
            "version": VERSION,
            "clock": weights.clock,
            "cursor": weights.cursor.as_record(),
            **weights.notes(weights.stepper.place_now()),
        }
        anchors = zip(fragments, weights.anchors, strict=True)
        weights.stepper.save(self._folder, notes, anchors)
        return self._folder.wait

    def interval(self, blocked: float, effort: float) -> float:
        return self._every

    def newest(self, note: Callable[[str], None]) -> Checkpoint | None:
        """Reads the newest checkpoint that is whole; `note` hears of those that are not."""
        for folder in (self._folder, *(OrbaxFolder(path, keep=1) for path in self._before)):
            for number in folder.numbers():
                try:
                    return _checkpoint(folder.read(number))
                except StoreError as error:
                    note(f"{error.message} The one before is tried.")
        return None

    def close(self) -> None:
        self._folder.close()


def sharded_checkpoints(region: RegionSpec, mailbox: Mailbox) -> ShardedCheckpoints | None:
    """Opens the sharded checkpoints of a region; None if it has a file of its own."""
    if region.checkpoint is None:
        return None
    identity = mailbox.identity()
    run, was = (identity.run, identity.was) if identity else ("", ())
    to = region.checkpoint.to

    def folder(run: str) -> Path:
        # Runs that begin anew under one name, and regions that share a disk, have each their own.
        return Path(to) / run / region.name if to else mailbox.checkpoints / run

    orbax = OrbaxFolder(folder(run), keep=region.checkpoint.keep)
    before = [folder(each) for each in reversed(was) if folder(each).is_dir()]
    return ShardedCheckpoints(orbax, region.checkpoint.every_seconds, before=before)


def _checkpoint(saved: SavedState) -> Checkpoint:
    notes: Any = saved.notes
    if notes.get("version") != VERSION:
        raise StoreError(
            f"A checkpoint has version {notes.get('version')}, this program reads {VERSION}."
        )
    return Checkpoint(
        params={},
        opt_state={},
        anchors=[],
        sharded=ShardedArrays(saved.held(), saved.optimizer),
        books=notes["books"],
        cursor=Cursor.of(notes["cursor"]),
        clock=notes["clock"],
        step=notes["clock"],
        meta=notes["meta"],
    )
