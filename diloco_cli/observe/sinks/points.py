"""What a run's folder has said since it was last asked, as points over merged tokens.

    regions/R/metrics.jsonl   every line is a point of region R
    history.npz               rows of the run; of regions that train on other hosts, too
                              every evaluation of the global weights

Each point is given once, while the run goes on as well as afterwards.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from diloco_cli.observe.history import History
from diloco_cli.observe.metrics_file import MetricsReader, metrics_folders
from diloco_cli.observe.run_record import HISTORY, RESOLVED

RUN = ""
"""The region of points that are about the whole run."""
MOST_POINTS = 10_000
"""That are held at once."""
HELDOUT, HELDOUT_EMA = "heldout_loss", "heldout_loss_ema"

REGION_VALUES: Mapping[str, str] = {
    "step": "",
    "trained": "tokens",
    "loss": "nats per token",
    "learning_rate": "",
    "gradient_norm": "",
    "tokens_per_second": "tokens/s",
    "mfu": "",
    "blocked": "",
    "bytes_up": "By",
    "bytes_down": "By",
    "staleness": "versions",
    "share": "",
}
"""What a region's points may carry, with units."""

RUN_VALUES: Mapping[str, str] = {
    HELDOUT: "nats per token",
    HELDOUT_EMA: "nats per token",
    "train_loss": "nats per token",
    "pending": "tokens",
    "outer_steps": "",
    "tokens_per_second": "tokens/s",
    "contributing": "regions",
    "goodput_time": "",
    "goodput_tokens": "",
    "goodput_participation": "",
    "bytes_up": "By",
    "bytes_down": "By",
}
"""What the run's points may carry, with units."""


@dataclass(frozen=True, slots=True)
class Point:
    """Some numbers at one place of the run."""

    region: str
    """Its name, or `RUN`."""
    time: float
    """Wall clock, seconds since 1970."""
    tokens: float
    """Merged tokens of the run."""
    values: Mapping[str, float]


@dataclass(frozen=True)
class ObservedRun:
    """A run, by its folder."""

    folder: Path

    @property
    def settings(self) -> dict[str, Any]:
        """Of the run, as it began; empty on a host that has none."""
        with contextlib.suppress(OSError, UnicodeDecodeError, yaml.YAMLError, RecursionError):
            found = yaml.safe_load((self.folder / RESOLVED).read_text(encoding="utf-8"))
            return found if isinstance(found, dict) else {}
        return {}

    @property
    def name(self) -> str:
        return str(self.settings.get("name") or self.folder.name)


class RunPoints:
    """Gives the points of a run, each of them once."""

    def __init__(self, run: ObservedRun) -> None:
        self.run = run
        self._readers: dict[str, MetricsReader] = {}
        self._tokens: dict[str, float] = {}
        self._history = HistoryPoints(run.folder / HISTORY)

    def more(self, *, over: bool) -> list[Point]:
        """The next points, by time; none if all were given. The run is `over`: wait for nothing."""
        found: list[Point] = []
        for name, folder in metrics_folders(self.run.folder):
            reader = self._readers.setdefault(name, MetricsReader(folder))
            while len(found) < MOST_POINTS and (rows := reader.more()):
                found += [self._point(name, row) for row in rows]
        if len(found) < MOST_POINTS:
            found += self._history.more(own=self._readers, over=over)
        return sorted(found, key=lambda point: point.time)

    def _point(self, region: str, row: Mapping[str, float | None]) -> Point:
        tokens = row["tokens"]
        if tokens is None:
            tokens = self._tokens.get(region, 0.0)
        self._tokens[region] = tokens
        values = {name: value for name in REGION_VALUES if (value := row.get(name)) is not None}
        return Point(region, row["time"] or 0.0, tokens, values)


class HistoryPoints:
    """Gives the rows of `history.npz`, each once.

    The file has seconds since the run began. The wall clock is reckoned back from when the file
    was written.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._seen: object = None
        self._at = -1.0
        self._evaluated: dict[str, float] = {}
        """By series: when the newest evaluation was that was given."""

    def more(self, *, own: Iterable[str], over: bool) -> list[Point]:
        """Rows after the last ones given; none of regions that have files of their `own`.

        The newest row is still being filled, unless the run is over.
        """
        loaded = self._load(over)
        if loaded is None:
            return []
        document, wrote = loaded
        run = document["run"]
        if not run["at"]:
            return []
        began = wrote - run["at"][-1]
        until = run["at"][-1] if over else run["at"][-1] - document["span"]
        found = list(self._rows(document, own, began, until))
        for name, rows in ((HELDOUT, document["evaluations"]), (HELDOUT_EMA, document["ema"])):
            last = self._evaluated.get(name, -1.0)
            for at, tokens, loss, outer_step in rows:
                if at > last:
                    values = {name: loss, "outer_steps": outer_step}
                    found.append(Point(RUN, began + at, tokens, values))
                    self._evaluated[name] = at
        self._at = max(self._at, until)
        return found

    def _load(self, over: bool) -> tuple[dict[str, Any], float] | None:
        """The document and when it was written; None if it is as it was, or not there."""
        try:
            state = os.stat(self._path)
            seen = (state.st_mtime_ns, state.st_size, over)
            if seen == self._seen:
                return None
            history = History(1)
            history.load(self._path.read_bytes())
        except (OSError, ValueError):
            return None  # Not there yet, deleted, or damaged: the regions' lines stand alone.
        self._seen = seen
        return history.document(), state.st_mtime

    def _rows(
        self, document: Mapping[str, Any], own: Iterable[str], began: float, until: float
    ) -> Iterator[Point]:
        run = document["run"]
        known = [index for index, tokens in enumerate(run["applied"]) if tokens is not None]
        times = [run["at"][index] for index in known]
        tokens = [run["applied"][index] for index in known]
        if not known:
            return
        tables = {RUN: run} | {
            name: columns for name, columns in document["regions"].items() if name not in set(own)
        }
        for region, columns in tables.items():
            names = RUN_VALUES if region == RUN else REGION_VALUES
            for index, at in enumerate(columns["at"]):
                values = {
                    name: columns[name][index]
                    for name in names
                    if name in columns and columns[name][index] is not None
                }
                if values and self._at < at <= until:
                    yield Point(region, began + at, float(np.interp(at, times, tokens)), values)
