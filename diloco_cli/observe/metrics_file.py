"""A region's training as lines on disk: `regions/NAME/metrics.jsonl`.

    {"time": 1789.1, "step": 640, "tokens": 81920.0, "trained": 40960.0, "loss": 2.31, …}

The region's agent writes them, from what the trainer reports anyway, so that no inner step waits
for a disk. The gap between two lines grows with the run, from a second to a minute: two files of
`MOST_BYTES` hold all of a run of months. Both may be deleted at any time, and a full disk costs
lines and nothing else. `time` is a wall clock, which may jump; `step` never goes back but after a
trainer was lost.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diloco_cli.observe.event_file import EventFile, EventReader, older

FILE = "metrics.jsonl"
MOST_BYTES = 32 << 20
SHORTEST_GAP, LONGEST_GAP = 1.0, 60.0
RESOLUTION = 10_000
"""Lines of a run whose gaps have begun to grow: one is this part of the run so far."""
TAIL_BYTES = 4096

COLUMNS: Mapping[str, str] = {
    "time": "wall clock, seconds since 1970",
    "step": "inner steps of the region",
    "tokens": "tokens of all regions that are in the published weights, as last heard",
    "trained": "tokens that the region has trained",
    "loss": "average of its last inner steps, in nats per token",
    "learning_rate": "of a late inner step",
    "gradient_norm": "of a late inner step, before clipping",
    "tokens_per_second": "of the region",
    "mfu": "share of what its devices can do at best; null of a kind that is not known",
    "blocked": "share of its time that the exchange held it up, since it began",
    "bytes_up": "sent by the region since its file began",
    "bytes_down": "received by the region since its file began",
    "staleness": "versions that its furthest fragment is behind",
}


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes of bodies in either direction."""

    up: int = 0
    down: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(self.up + other.up, self.down + other.down)

    def __sub__(self, other: Traffic) -> Traffic:
        return Traffic(self.up - other.up, self.down - other.down)


class MetricsFile:
    """Appends the lines of one region, as seldom as the length of its run allows."""

    def __init__(
        self,
        folder: Path,
        *,
        most: int = MOST_BYTES,
        clock: Callable[[], float] = time.time,
        steady: Callable[[], float] = time.monotonic,
    ) -> None:
        self.path = folder / FILE
        self._file = EventFile(self.path, most=most)
        self._clock, self._steady = clock, steady
        self._next = float("-inf")
        self._last_step = 0
        last = _last_line(self.path)
        self.traffic = Traffic(_whole(last.get("bytes_up")), _whole(last.get("bytes_down")))
        """Moved since the file began, by earlier agents too."""

    def note(
        self, step: int, seconds: float, fields: Mapping[str, Any], *, last: bool = False
    ) -> None:
        """Writes a line if one is due, `seconds` after the region began; the `last` one always is.

        A line about a step that was written already says nothing new, nor one before the first.
        """
        now = self._steady()
        if step in (0, self._last_step) or (now < self._next and not last):
            return
        self._next = now + min(LONGEST_GAP, max(SHORTEST_GAP, seconds / RESOLUTION))
        self._last_step = step
        line = {
            "time": round(self._clock(), 3),
            "step": step,
            **fields,
            "bytes_up": self.traffic.up,
            "bytes_down": self.traffic.down,
        }
        short = {name: _short(name, line.get(name)) for name in COLUMNS}
        # A full disk, or a folder that was deleted: later lines may find a place.
        with contextlib.suppress(OSError):
            self._file.write(json.dumps(short).encode() + b"\n")

    def close(self) -> None:
        self._file.close()


class MetricsReader:
    """Gives the lines of one region, each of them once, while others are being written."""

    def __init__(self, folder: Path) -> None:
        self._lines = EventReader(folder / FILE)

    def more(self) -> list[dict[str, float | None]]:
        """The next whole lines; none if all are read."""
        while lines := self._lines.more():
            if rows := [row for line in lines if (row := _row(line.text))]:
                return rows
        return []


def read_metrics(folder: Path) -> dict[str, list[float | None]]:
    """The columns of a region's folder, of equal length; empty ones where there is no file."""
    reader, columns = MetricsReader(folder), {name: [] for name in COLUMNS}
    while rows := reader.more():
        for row in rows:
            for name, column in columns.items():
                column.append(row[name])
    return columns


def metrics_folders(run: Path) -> Iterator[tuple[str, Path]]:
    """The regions of a run's folder that have lines, by name."""
    found: Iterable[Path] = (run / "regions").glob(f"*/{FILE}*")
    for folder in sorted({path.parent for path in found}):
        yield folder.name, folder


def _row(line: bytes) -> dict[str, float | None] | None:
    """One line's numbers; None when it is not whole, or not one of ours."""
    try:
        found = json.loads(line)
        step = found["step"]
    except (ValueError, TypeError, KeyError):
        return None
    if not _is_number(step):
        return None
    return {name: value if _is_number(value := found.get(name)) else None for name in COLUMNS}


def _short(name: str, value: float | None) -> float | None:
    """Six digits of what is measured; counts and times have all of theirs."""
    if not isinstance(value, float) or name in ("time", "tokens", "trained"):
        return value
    return float(f"{value:.6g}") if math.isfinite(value) else None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _last_line(path: Path) -> dict[str, Any]:
    """The newest whole line; empty where there is none."""
    for file in (path, older(path)):
        try:
            with file.open("rb") as lines:
                lines.seek(max(0, lines.seek(0, 2) - TAIL_BYTES))
                rows = [row for line in lines.read(TAIL_BYTES).splitlines() if (row := _row(line))]
        except OSError:
            continue
        if rows:
            return rows[-1]
    return {}


def _whole(value: Any) -> int:
    return int(value) if isinstance(value, int | float) else 0
