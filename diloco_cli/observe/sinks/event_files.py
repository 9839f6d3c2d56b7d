"""Event files for TensorBoard: a folder per region and one of the run, over merged tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from tensorboardX import SummaryWriter

from diloco_cli.observe.sinks.points import RUN, Point
from diloco_cli.system.outputs import writing

SUFFIX = ".diloco"
"""Ends the names of our files: those of an earlier time are replaced."""


class EventFiles:
    """`run/` and `regions/NAME/`, with the same tags: TensorBoard lays them over another."""

    def __init__(self, folder: Path) -> None:
        self.where, self._folder = f"{folder} (tensorboard --logdir {folder})", folder
        self._writers: dict[str, SummaryWriter] = {}
        with writing(folder, "--out"):
            for earlier in folder.glob(f"**/events.out.tfevents.*{SUFFIX}"):
                earlier.unlink()

    def write(self, points: Sequence[Point]) -> None:
        with writing(self._folder, "--out"):
            for point in points:
                writer = self._writer(point.region)
                for name, value in point.values.items():
                    writer.add_scalar(name, value, round(point.tokens), point.time)
            for writer in self._writers.values():
                writer.flush()

    def _writer(self, region: str) -> SummaryWriter:
        if region not in self._writers:
            folder = self._folder / ("run" if region == RUN else f"regions/{region}")
            self._writers[region] = SummaryWriter(str(folder), filename_suffix=SUFFIX)
        return self._writers[region]

    def close(self) -> None:
        with writing(self._folder, "--out"):
            for writer in self._writers.values():
                writer.close()
