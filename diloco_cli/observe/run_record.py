"""What a run left behind, as columns: for a report, a notebook or a program of one's own.

    record = read_run("runs/quickstart")
    record.evaluations["loss"]           # lists of equal length; a DataFrame takes them as they are
    record.regions["left"]["loss"]

The folder is only read, while the run goes on as well as afterwards.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from diloco_cli.errors import SpecError
from diloco_cli.observe.events import Event, read_events
from diloco_cli.observe.history import History
from diloco_cli.observe.metrics_file import metrics_folders, read_metrics
from diloco_cli.observe.status import Status, Summary

Columns = Mapping[str, list[Any]]

HISTORY, SUMMARY, RESOLVED, CURRENT = (
    "history.npz",
    "summary.json",
    "spec.resolved.yaml",
    "spec.current.yaml",
)


@dataclass(frozen=True)
class RunRecord:
    """One run, read from its folder."""

    folder: Path
    summary: Mapping[str, Any]
    """`summary.json`; empty while the run has not ended or stopped."""
    curves: Columns
    """The run over time: `at` (seconds since it began), `applied`, `tokens_per_second`, …"""
    regions: Mapping[str, Columns]
    """The same of each region: `at`, `loss`, `tokens_per_second`, …"""
    metrics: Mapping[str, Columns]
    """Of each region whose folder is here, finer, by its own word: `step`, `tokens`, `loss`,
    `learning_rate`, `gradient_norm`, …"""
    evaluations: Columns
    """`at`, `tokens`, `loss`, `outer_step` of every evaluation of the global weights."""
    ema: Columns
    """The same of the average of the published weights; empty where the run keeps none."""
    spec: str = ""
    """The run's settings, as YAML; by the newest amendment, where there is one."""
    _document: Mapping[str, Any] = field(default_factory=dict, repr=False)

    @property
    def name(self) -> str:
        return str(self.summary.get("name") or self.folder.name)

    @property
    def result(self) -> Summary:
        """The summary, typed; of a run without one only that it is running."""
        return Summary.read(json.dumps({"state": "running", **self.summary}).encode())

    @property
    def history(self) -> Mapping[str, Any]:
        """The document of `GET /v1/history`."""
        return self._document

    def events(self) -> Iterator[Event]:
        """What happened, in order; see docs/reference/events.md."""
        return read_events(self.folder / "events.jsonl")


def read_run(folder: str | Path) -> RunRecord:
    """Reads the folder of a run."""
    folder = Path(folder)
    if not (folder / RESOLVED).exists():
        raise SpecError(
            f"{folder} is not the folder of a run: it has no {RESOLVED}.",
            hint="Name the run folder, such as runs/quickstart.",
        )
    history = History(1)
    path = folder / HISTORY
    if path.exists():
        try:
            history.load(path.read_bytes())
        except ValueError as error:
            raise SpecError(
                f"{path}: {error}.", hint="Delete it: the run goes on without its curves."
            ) from None
    document = history.document()
    document["now"] = max([0.0, *document["run"]["at"]])
    return RunRecord(
        folder,
        _summary(folder / SUMMARY),
        document["run"],
        document["regions"],
        {name: read_metrics(region) for name, region in metrics_folders(folder)},
        _columns(document["evaluations"]),
        _columns(document["ema"]),
        _text(folder / CURRENT) or _text(folder / RESOLVED),
        document,
    )


def _columns(points: Sequence[Sequence[float]]) -> Columns:
    names = ("at", "tokens", "loss", "outer_step")
    return {name: [point[column] for point in points] for column, name in enumerate(names)}


def summary_of(status: Status) -> dict[str, Any]:
    """What a summary would say of a run that is still being served."""
    plain = status.plain()
    both = ("run", "name", "state", "why", "tokens", "loss", "outer_steps", "wire", "goodput")
    return {
        **{key: plain[key] for key in (*both, "goodputs")},
        "wall_seconds": status.seconds,
        "regions": {
            region.name: {"share": region.share, "lost": region.lost, "refused": region.refused}
            for region in status.regions
        },
    }


def _summary(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(_text(path) or "{}")
    except (ValueError, RecursionError):
        return {}  # Damaged by a disk that was full or failed; the rest of the record stands.
    return found if isinstance(found, dict) else {}


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        return ""
