"""The whole run as curves, in bounded memory: what the page and the report draw.

    Status ──sample──▶ one row per second ▶ Curves     2,048 rows at most: when they are full,
                                                       neighbours join and a row spans twice as long
    events ──note────▶ Rounds                          the last ones, moment by moment
    evaluations ─────▶ the exact values                4,096 at most, then every second one goes

A row without samples is a gap, never a line. Nothing here is needed to train: losing the file
costs a picture. Times are seconds since the run began, on the server's clock.
"""

from __future__ import annotations

import io
import json
import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from diloco_cli.observe.status import RegionStatus, Status

Seconds = float

RUN_COLUMNS = (
    "applied",
    "pending",
    "outer_steps",
    "train_loss",
    "tokens_per_second",
    "contributing",
    "goodput_time",
    "goodput_tokens",
    "goodput_participation",
    "bytes_up",
    "bytes_down",
)
REGION_COLUMNS = ("loss", "tokens_per_second", "staleness", "share", "blocked", "mfu")

MOST_ROWS = 2048
MOST_REGION_ROWS = 512
MOST_REGIONS = 256
"""Regions with curves of their own; the others are in the run's."""
MOST_EVALUATIONS = 4096
LEAST_ROUNDS = 256
ROUND_TURNS = 17
"""Rounds of each fragment that are kept, at least."""


MOST_TOLD = 16
"""Regions whose part in a round is kept one by one."""
MOST_EVENTS = 400
MOST_SAMPLES = 8
LONGEST_WORDS = 300
ROUND_KINDS = ("called", "accepted", "closed", "published")
MOST_POINTS = 1000
"""Of a curve in one answer: two a pixel of what shows it."""
REGION_POINTS, FEWEST_POINTS = 8000, 40
"""Points of all regions together, and at least of each."""


class Curves:
    """Columns over time, in rows of equal span that cover everything since the run began."""

    def __init__(self, columns: Sequence[str], most: int, span: Seconds = 1.0) -> None:
        self.columns, self.most, self.span = tuple(columns), most, span
        self._sums = np.zeros((most, len(self.columns)))
        self._counts = np.zeros((most, len(self.columns)), np.uint32)
        self.rows = 0

    def add(self, at: Seconds, values: Mapping[str, float | None]) -> None:
        """Takes one sample; values that are not known leave a gap."""
        if not math.isfinite(at) or at < 0:
            return
        while at >= self.most * self.span:
            self._join_neighbours()
        row = int(at / self.span)
        self.rows = max(self.rows, row + 1)
        for column, name in enumerate(self.columns):
            value = values.get(name)
            if value is not None and math.isfinite(value):
                self._sums[row, column] += value
                self._counts[row, column] += 1

    def _join_neighbours(self) -> None:
        for table in (self._sums, self._counts):
            joined = table[0::2] + table[1::2]
            table[: len(joined)], table[len(joined) :] = joined, 0
        self.span *= 2
        self.rows = (self.rows + 1) // 2

    def since(
        self, start: Seconds, points: int = MOST_ROWS
    ) -> tuple[list[Seconds], dict[str, list[float | None]]]:
        """The rows that end after `start`: the middle of each, and every column's means.

        Neighbours are joined until there are at most `points`.
        """
        first = min(self.rows, max(0, int(start / self.span)))
        wide = max(1, math.ceil((self.rows - first) / max(1, points)))
        first -= first % wide
        starts = np.arange(first, self.rows, wide)
        times = [round((row + wide / 2) * self.span, 3) for row in starts.tolist()]
        if not len(starts):
            return times, {name: [] for name in self.columns}
        counts = np.add.reduceat(self._counts[: self.rows].astype(np.float64), starts, axis=0)
        sums = np.add.reduceat(self._sums[: self.rows], starts, axis=0)
        with np.errstate(invalid="ignore", divide="ignore"):
            means = sums / counts
        return times, {
            name: [None if math.isnan(mean) else _short(mean) for mean in means[:, column].tolist()]
            for column, name in enumerate(self.columns)
        }

    def arrays(self, name: str) -> dict[str, np.ndarray]:
        """What it takes to go on, for a file."""
        return {
            f"{name}/sums": self._sums[: self.rows].copy(),
            f"{name}/counts": self._counts[: self.rows].copy(),
            f"{name}/span": np.array(self.span),
        }

    def restore(self, arrays: Mapping[str, np.ndarray], name: str) -> None:
        """Goes on from what `arrays` gave; ValueError where it is of another form."""
        sums, counts = arrays[f"{name}/sums"], arrays[f"{name}/counts"]
        shape = (len(sums), len(self.columns))
        if sums.shape != shape or counts.shape != shape or len(sums) > self.most:
            raise ValueError(f"{name} has the shape {sums.shape}")
        self.rows, self.span = len(sums), float(arrays[f"{name}/span"])
        self._sums[: self.rows], self._counts[: self.rows] = sums, counts


def _short(value: float) -> float:
    """Six digits: what a drawing shows, at half the bytes."""
    return float(f"{value:.6g}")


@dataclass(frozen=True)
class HeldoutPoint:
    """One evaluation of the global weights."""

    at: Seconds
    tokens: float
    loss: float
    outer_step: int


@dataclass(frozen=True)
class TextSampled:
    """What the global weights wrote after the beginning of a held-out text."""

    outer_step: int
    tokens: float
    prompt: str
    text: str


@dataclass
class RoundRecord:
    """One round, moment by moment."""

    number: int
    fragment: int
    version: int
    """In force when it was called; the round makes the next one."""
    called: Seconds
    answered: dict[str, Seconds] = field(default_factory=dict)
    tokens: dict[str, float] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    """Bytes of each answer."""
    asked: list[str] = field(default_factory=list)
    """Regions that were there when it was called."""
    asked_count: int = 0
    met: Seconds | None = None
    """When as many had answered as the quorum needs."""
    closed: Seconds | None = None
    why: str = ""
    members: list[str] = field(default_factory=list)
    member_count: int = 0
    weights: list[float] = field(default_factory=list)
    """Of the members, in their order."""
    missing: list[str] = field(default_factory=list)
    """Asked, and not among the members."""
    missing_count: int = 0
    published: Seconds | None = None
    bytes: int = 0
    adopted: dict[str, Seconds] = field(default_factory=dict)

    def take(self, region: str, at: Seconds, tokens: float, size: int, quorum: int) -> None:
        self.answered[region], self.tokens[region], self.sizes[region] = at, tokens, size
        if self.met is None and len(self.answered) >= quorum:
            self.met = max(at, self.called)

    def close(
        self, at: Seconds, why: str, members: Sequence[str], weights: Sequence[float]
    ) -> None:
        self.closed, self.why, self.member_count = at, why, len(members)
        inside = set(members)
        missing = [region for region in self.asked if region not in inside]
        self.missing, self.missing_count = missing[:MOST_TOLD], len(missing)
        self.members, self.weights = list(members), list(weights)
        if max(self.asked_count, len(self.answered)) > MOST_TOLD:
            self._shorten()

    def _shorten(self) -> None:
        """Of many regions the counts are kept, the first to answer and who was missing."""
        first = sorted(self.answered, key=lambda region: self.answered[region])[:MOST_TOLD]
        for moments in (self.answered, self.tokens, self.sizes):
            for region in moments.keys() - set(first):
                del moments[region]
        self.asked, self.members, self.weights = [], self.members[:MOST_TOLD], []

    def plain(self) -> dict[str, Any]:
        return asdict(self)


class Rounds:
    """The last rounds of every fragment, folded from the server's events and the heartbeats."""

    def __init__(self, fragments: int) -> None:
        self.most = max(LEAST_ROUNDS, ROUND_TURNS * fragments)
        self.all: list[RoundRecord] = []
        self._open: dict[int, RoundRecord] = {}
        self.present: list[str] = []
        """Regions that are there, by the newest sample."""
        self.quorum = 1
        self._early: dict[int, dict[str, tuple[Seconds, float, int]]] = {}
        """Contributions that wait for their fragment to be called, by fragment and region."""
        self.lasted = {"count": 0.0, "seconds": 0.0}
        """How many rounds were published since this server was started, and their seconds."""
        self._number = 0
        self._versions: dict[str, list[int]] = {}

    def note(self, kind: str, fields: Mapping[str, Any], at: Seconds) -> None:
        """Takes an event of one of `ROUND_KINDS`."""
        fragment = fields["fragment"]
        if kind == "called":
            self._call(fragment, fields["version"], at)
        elif kind == "accepted":
            arrival = (at, float(fields.get("tokens", 0.0)), int(fields.get("bytes", 0)))
            record = self._open.get(fragment)
            if record and record.closed is None:
                record.take(fields["region"], *arrival, self.quorum)
            else:
                self._early.setdefault(fragment, {})[fields["region"]] = arrival
        elif record := self._open.get(fragment):
            if kind == "closed":
                weights = [float(weight) for weight in fields.get("weights", ())]
                record.close(at, fields.get("why", ""), fields["members"], weights)
            else:
                record.published, record.bytes = at, fields.get("bytes", 0)
                self.lasted["count"] += 1
                self.lasted["seconds"] += at - record.called
                del self._open[fragment]

    def _call(self, fragment: int, version: int, at: Seconds) -> None:
        self._number += 1
        record = self._open[fragment] = RoundRecord(self._number, fragment, version, at)
        record.asked, record.asked_count = list(self.present), len(self.present)
        for region, arrival in self._early.pop(fragment, {}).items():
            record.take(region, *arrival, self.quorum)
        self.all.append(record)
        del self.all[: max(0, len(self.all) - self.most)]

    def adopted(self, region: str, versions: Sequence[int], at: Seconds) -> None:
        """Takes the versions that a region trains on, as it reports them."""
        before = self._versions.get(region)
        self._versions[region] = list(versions)
        if before == list(versions):
            return
        for record in self.all:
            fragment, made = record.fragment, record.version + 1
            if record.published is None or fragment >= len(versions):
                continue
            new = versions[fragment] >= made and (before is None or before[fragment] < made)
            if new and len(record.adopted) < MOST_TOLD:
                record.adopted.setdefault(region, at)

    def go_on_from(self, records: Sequence[RoundRecord]) -> None:
        """Takes rounds that were kept; the next ones are counted on from them."""
        self.all = list(records)[-self.most :]
        self._number = max([0, *(record.number for record in records)])

    def after(self, number: int) -> list[dict[str, Any]]:
        """Rounds after this number, and earlier ones that were not over yet."""
        return [record.plain() for record in self.all if record.number > number]


class History:
    """Everything that is drawn of a run."""

    def __init__(self, fragments: int) -> None:
        self.run = Curves(RUN_COLUMNS, MOST_ROWS)
        self.regions: dict[str, Curves] = {}
        self.evaluations: list[HeldoutPoint] = []
        self.ema: list[HeldoutPoint] = []
        """The same of the average of the published weights."""
        self.rounds = Rounds(fragments)
        self.samples: deque[TextSampled] = deque(maxlen=MOST_SAMPLES)
        """What the weights wrote lately, the newest last."""
        self.events: deque[tuple[float, str, str, str]] = deque(maxlen=MOST_EVENTS)
        """The last ones that are not about a round: wall time, kind, region, words."""

    def note(self, kind: str, fields: Mapping[str, Any], at: Seconds, wall: float) -> None:
        """Takes an event of the server."""
        if kind in ROUND_KINDS:
            self.rounds.note(kind, fields, at)
            return
        if kind == "sampled":
            step, tokens = int(fields["outer_steps"]), float(fields["tokens"])
            if not self.samples or self.samples[-1].outer_step < step:
                self.samples.append(TextSampled(step, tokens, fields["prompt"], fields["text"]))
        self.events.append((wall, kind, str(fields.get("region", "")), _words(kind, fields)))

    def sample(self, at: Seconds, status: Status) -> None:
        """Takes what a status document says now."""
        goodputs, wire = status.goodputs, status.wire
        speeds = [region.tokens_per_second for region in status.regions]
        self.run.add(
            at,
            {
                "applied": status.tokens.applied,
                "pending": status.tokens.pending,
                "outer_steps": status.outer_steps,
                "train_loss": status.loss.train,
                "tokens_per_second": sum(speed or 0.0 for speed in speeds),
                "contributing": sum(region.contributing for region in status.regions),
                "goodput_time": goodputs.time,
                "goodput_tokens": goodputs.tokens,
                "goodput_participation": goodputs.participation,
                "bytes_up": wire.bytes_up,
                "bytes_down": wire.bytes_down,
            },
        )
        self.rounds.quorum = status.quorum or 1
        self.rounds.present = [region.name for region in status.regions if region.alive]
        for region in status.regions:
            self._sample_region(at, region)
        measured, tokens = status.loss, status.tokens.applied
        _evaluated(self.evaluations, at, tokens, measured.heldout, measured.heldout_at)
        _evaluated(self.ema, at, tokens, measured.ema, measured.ema_at)

    def _sample_region(self, at: Seconds, region: RegionStatus) -> None:
        if not region.alive:
            return
        if region.name not in self.regions and len(self.regions) >= MOST_REGIONS:
            return
        curves = self.regions.setdefault(region.name, Curves(REGION_COLUMNS, MOST_REGION_ROWS))
        curves.add(at, {name: getattr(region, name) for name in REGION_COLUMNS})

    def document(
        self, since: Seconds = 0.0, *, points: int = MOST_POINTS, round_after: int = 0
    ) -> dict[str, Any]:
        """As JSON: what was sampled after `since`, and the rounds after a number."""
        times, run = self.run.since(since, points)
        least = REGION_POINTS // max(1, len(self.regions))
        regions = {}
        for name, curves in self.regions.items():
            region_times, columns = curves.since(since, max(FEWEST_POINTS, min(points, least)))
            regions[name] = {"at": region_times, **columns}
        return {
            "span": self.run.span,
            "run": {"at": times, **run},
            "regions": regions,
            "evaluations": _rows(self.evaluations, since),
            "ema": _rows(self.ema, since),
            "samples": [asdict(each) for each in self.samples],
            "rounds": self.rounds.after(round_after),
        }

    def snapshot(self) -> dict[str, np.ndarray]:
        """A copy of everything that a file keeps; rounds that are not over are left out."""
        arrays = self.run.arrays("run")
        for index, (_, curves) in enumerate(self.regions.items()):
            arrays |= curves.arrays(f"region{index}")
        for name, kept in (("evaluations", self.evaluations), ("ema", self.ema)):
            points = [(p.at, p.tokens, p.loss, p.outer_step) for p in kept]
            arrays[name] = np.array(points, np.float64).reshape(-1, 4)
        over = [record.plain() for record in self.rounds.all if record.published is not None]
        for name, listed in (
            ("names", list(self.regions)),
            ("rounds", over),
            ("events", list(self.events)),
            ("samples", [asdict(each) for each in self.samples]),
        ):
            arrays[name] = np.frombuffer(json.dumps(listed).encode(), np.uint8)
        return arrays

    def dump(self) -> bytes:
        """As a file."""
        return packed(self.snapshot())

    def load(self, data: bytes) -> None:
        """Goes on from a file; ValueError where it is damaged or of another form."""
        try:
            with np.load(io.BytesIO(data), allow_pickle=False) as file:
                arrays: dict[str, np.ndarray] = dict(file)
            restored = History(1)
            restored.run.restore(arrays, "run")
            for index, name in enumerate(json.loads(arrays["names"].tobytes())):
                curves = Curves(REGION_COLUMNS, MOST_REGION_ROWS)
                curves.restore(arrays, f"region{index}")
                restored.regions[str(name)] = curves
            points, ema = (_points(arrays[name].tolist()) for name in ("evaluations", "ema"))
            rounds = [RoundRecord(**each) for each in json.loads(arrays["rounds"].tobytes())]
            samples = [TextSampled(**each) for each in json.loads(arrays["samples"].tobytes())]
            events = [
                (float(wall), str(kind), str(region), str(words))
                for wall, kind, region, words in json.loads(arrays["events"].tobytes())
            ]
        except (KeyError, OSError, EOFError, TypeError, ValueError) as error:
            raise ValueError(f"the history is damaged: {error}") from None
        except Exception as error:  # What zipfile and zlib raise has no common base.
            raise ValueError(f"the history is damaged: {error}") from error
        self.run, self.regions = restored.run, restored.regions
        self.evaluations, self.ema = points, ema
        self.rounds.go_on_from(rounds)
        self.events.extend(events)
        self.samples.extend(samples)


def packed(arrays: Mapping[str, np.ndarray]) -> bytes:
    """The bytes of a file with these arrays; any thread may make them."""
    file = io.BytesIO()
    np.savez_compressed(file, **arrays)  # pyright: ignore[reportArgumentType]
    return file.getvalue()


def _words(kind: str, fields: Mapping[str, Any]) -> str:
    """What an event says, in a line."""
    if kind in ("evaluated", "evaluated-ema"):
        what = "held-out" if kind == "evaluated" else "held-out of the average"
        return f"{what} {fields['loss']:.3f} at outer step {fields['outer_steps']}"
    if kind == "sampled":
        return f"a sample at outer step {fields['outer_steps']}"
    if why := fields.get("why"):
        return str(why)
    if (silent := fields.get("silent_seconds")) is not None:
        return f"silent for {silent:.1f} s"
    shown = (f"{key} {value}" for key, value in fields.items() if key not in ("region", "owner"))
    return ", ".join(shown)[:LONGEST_WORDS]


def _evaluated(
    known: list[HeldoutPoint], at: Seconds, tokens: float, loss: float | None, step: int | None
) -> None:
    """Takes an evaluation, unless it is known; of very many every second one goes."""
    if loss is None or step is None or not math.isfinite(loss):
        return
    if known and known[-1].outer_step >= step:
        return
    known.append(HeldoutPoint(at, tokens, loss, step))
    if len(known) > MOST_EVALUATIONS:
        kept = (known[0], min(known, key=lambda point: point.loss), known[-1])
        known[:] = [each for index, each in enumerate(known) if index % 2 or each in kept]


def _rows(points: Iterable[HeldoutPoint], since: Seconds) -> list[list[float]]:
    """Evaluations from a moment on, no more than a drawing shows."""
    listed = [point for point in points if point.at >= since]
    step = max(1, math.ceil(len(listed) / MOST_POINTS))
    return [
        [round(point.at, 3), point.tokens, point.loss, point.outer_step]
        for index, point in enumerate(listed)
        if index % step == 0 or index == len(listed) - 1
    ]


def _points(rows: Iterable[Sequence[float]]) -> list[HeldoutPoint]:
    return [HeldoutPoint(at, tokens, loss, int(step)) for at, tokens, loss, step in rows]
