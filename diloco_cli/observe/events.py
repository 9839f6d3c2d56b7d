"""What happened, in order: the run log.

Every process of a run appends its own events to `FOLDER/events.jsonl`, one JSON object
a line; status, metrics and pages are folds over these lines. The log is there to be
read by people and programs, nothing is ever rebuilt from it: the truth is the journal.
Two files of `MOST_BYTES` are kept, and either may be deleted at any time.

    {"kind": "published", "time": 1789.1, "seconds": 12.5, "process": "server", "fragment": 3, …}

A line is written by one `write` to a file opened for appending and stays below 4 KiB,
so the lines of several processes never mix.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diloco_cli.observe.event_file import EVERYTHING, EventFile, EventReader
from diloco_cli.wire.messages import JsonObject

MOST_BYTES = 64 << 20
LARGEST_LINE = 4096
LONGEST_TEXT = 500


@dataclass(frozen=True, slots=True)
class EventKind:
    """A kind of event: what it means and which fields it may carry."""

    meaning: str
    fields: tuple[str, ...] = ()


KINDS: Mapping[str, EventKind] = {
    "run-started": EventKind(
        "a process of the run began", ("run", "name", "url", "version", "resumed")
    ),
    "run-finished": EventKind("the budget is spent and everything is merged", ("why", "tokens")),
    "run-stopped": EventKind("the run was stopped before its end", ("why",)),
    "run-ended": EventKind(
        "the budget is reached; what is held is being drained", ("why", "tokens")
    ),
    "run-resumed": EventKind(
        "less than the budget came out of the drain; the run goes on", ("why",)
    ),
    "server-started": EventKind("the server listens", ("url", "pid", "recovered", "seconds_taken")),
    "server-restarted": EventKind(
        "the server died and was started again", ("code", "why", "restarts")
    ),
    "worker-restarted": EventKind(
        "a region's worker died and was started again", ("region", "code", "why", "restarts")
    ),
    "worker-gone": EventKind(
        "a region's worker will not be started again", ("region", "code", "why", "restarts")
    ),
    "joined": EventKind("a region took its lease", ("region", "epoch", "owner", "boot")),
    "lapsed": EventKind("a region's lease ran out", ("region", "silent_seconds")),
    "revived": EventKind("a region with a lapsed lease is back", ("region", "silent_seconds")),
    "fenced": EventKind("a region was told that another worker has its place", ("region", "epoch")),
    "left": EventKind("a region said goodbye", ("region", "why")),
    "retired": EventKind("a region is no member of the run any more", ("region", "why", "by")),
    "lanes-dealt": EventKind(
        "lanes of a text got other readers, or were cut into more",
        ("order", "why", "lanes", "count"),
    ),
    "text-changed": EventKind(
        "a region reads another text than before", ("region", "order", "tokens")
    ),
    "lanes-followed": EventKind(
        "a region took lanes up or gave lanes up, and where, as {lane: [grant, position]}",
        ("region", "step", "taken", "released"),
    ),
    "called": EventKind(
        "every live region is asked for a fragment", ("fragment", "version", "why")
    ),
    "accepted": EventKind(
        "a contribution is durable and waits for its round",
        (
            *("region", "fragment", "version", "base", "clock", "digest", "tokens", "steps"),
            *("bytes", "counted"),
        ),
    ),
    "returned": EventKind(
        "a contribution came back; its work is kept and sent again",
        ("region", "fragment", "version", "base", "clock", "digest", "why"),
    ),
    "refused": EventKind(
        "a contribution was unfit and its work is dropped",
        ("region", "fragment", "version", "base", "clock", "digest", "tokens", "why"),
    ),
    "quarantined": EventKind(
        "a region's work is kept out until it is sound again", ("region", "why")
    ),
    "diverging": EventKind(
        "a region gave its work up again and again, because it was not finite", ("region", "why")
    ),
    "paced": EventKind("a region's pace was learnt", ("region", "steps_per_second")),
    "foreign": EventKind(
        "a contribution came from an older copy of its region",
        ("region", "fragment", "version", "base", "clock", "digest", "why"),
    ),
    "amended": EventKind(
        "settings of the run changed",
        ("number", "by", "why", "set", "add", "remove", "repace", "reopens"),
    ),
    "closed": EventKind(
        "a round has its members", ("fragment", "version", "members", "weights", "why", "drain")
    ),
    "published": EventKind(
        "a version became visible",
        ("fragment", "version", "members", "bytes", "seconds_taken", "tokens"),
    ),
    "adopted": EventKind(
        "a region took a version over", ("region", "fragment", "version", "merged", "step")
    ),
    "evaluated": EventKind(
        "the global weights were measured on held-out text",
        ("region", "versions", "loss", "outer_steps"),
    ),
    "sampled": EventKind(
        "the global weights wrote a few words after the beginning of a held-out text",
        ("region", "versions", "prompt", "text", "outer_steps", "tokens"),
    ),
    "evaluated-ema": EventKind(
        "the average of the published weights was measured on held-out text",
        ("region", "versions", "loss", "outer_steps"),
    ),
    "trainer-started": EventKind("a region's trainer was started", ("region", "pid", "restarts")),
    "realigned": EventKind(
        "a region goes on in the run that continues its own; tokens by fragment",
        ("region", "run", "since", "versions", "held", "lost"),
    ),
    "trainer-adopted": EventKind(
        "a new worker took over the trainer of one that died", ("region", "pid", "step")
    ),
    "trainer-died": EventKind("a region's trainer ended unasked", ("region", "pid", "code", "why")),
    "trainer-exited": EventKind("a region's trainer ended in order", ("region", "pid", "why")),
    "first-step": EventKind(
        "a trainer made its first inner step; what it took, in seconds, and tokens it had lost",
        ("region", "pid", "step", "resumed", "lost", "import", "restore", "compile", "total"),
    ),
    "link-lost": EventKind(
        "a region cannot reach the server and trains on", ("region", "url", "why")
    ),
    "link-back": EventKind(
        "a region reaches the server again", ("region", "url", "silent_seconds")
    ),
    "fault": EventKind(
        "`diloco chaos` did something to the run, or had nobody to do it to",
        ("fault", "region", "at", "duration", "why"),
    ),
    "note": EventKind("something worth a line for people", ("why", "region")),
}


@dataclass(frozen=True, slots=True)
class Event:
    """One line of the run log."""

    kind: str
    process: str
    time: float
    """Wall clock, seconds since 1970."""

    seconds: float
    """Since the process that wrote it began."""

    fields: JsonObject


class EventLog:
    """Appends the events of one process; safe to share between its threads."""

    def __init__(
        self,
        path: Path,
        process: str,
        *,
        most: int = MOST_BYTES,
        clock: Callable[[], float] = time.time,
        steady: Callable[[], float] = time.monotonic,
    ) -> None:
        self.path = path
        self.process = process
        self._clock = clock
        self._steady = steady
        self._began = steady()
        self._lock = threading.Lock()
        self._file = EventFile(path, most=most)

    def note(self, kind: str, **fields: Any) -> None:
        """Writes one event; a full disk costs the line, never the run.

        An unknown kind or field is a mistake of the caller and raises ValueError.
        """
        check(kind, fields)
        line = _line(
            {
                "kind": kind,
                "time": round(self._clock(), 3),
                "seconds": round(self._steady() - self._began, 3),
                "process": self.process,
                **fields,
            }
        )
        try:
            with self._lock:
                self._file.write(line)
        except OSError:
            return

    def close(self) -> None:
        with self._lock:
            self._file.close()


def check(kind: str, fields: Mapping[str, Any]) -> None:
    """Refuses events that no reader would understand."""
    if kind not in KINDS:
        raise ValueError(f"there is no event kind {kind!r}; known: {', '.join(sorted(KINDS))}")
    if unknown := sorted(set(fields) - set(KINDS[kind].fields)):
        raise ValueError(f"event {kind!r} has no field {unknown[0]!r}; it has {KINDS[kind].fields}")


def read_events(path: Path, *, after: str = EVERYTHING) -> Iterator[Event]:
    """Yields the events that are kept, or those after an id; a missing file is an empty log.

    A line that is not whole (a writer was killed in mid-write, or is writing just now)
    is left out.
    """
    reader = EventReader(path, after)
    while lines := reader.more():
        for line in lines:
            if event := parse(line.text):
                yield event


def parse(line: bytes) -> Event | None:
    """Reads one line, or says None when it is not a whole event."""
    try:
        fields = json.loads(line)
        return Event(
            kind=fields.pop("kind"),
            process=fields.pop("process"),
            time=float(fields.pop("time")),
            seconds=float(fields.pop("seconds")),
            fields=fields,
        )
    except (ValueError, KeyError, AttributeError, TypeError):
        return None


def _line(fields: JsonObject) -> bytes:
    line = _json(fields)
    if len(line) < LARGEST_LINE:
        return line
    short = {
        key: f"{value[: LONGEST_TEXT - 1]}…" if _is_long(value) else value
        for key, value in fields.items()
    }
    line = _json(short)
    if len(line) < LARGEST_LINE:
        return line
    head = {key: short[key] for key in ("kind", "time", "seconds", "process")}
    return _json({**head, "cut": sorted(set(short) - set(head))})


def _is_long(value: Any) -> bool:
    return isinstance(value, str) and len(value) > LONGEST_TEXT


def _json(fields: JsonObject) -> bytes:
    return json.dumps(fields, ensure_ascii=False, default=str).encode() + b"\n"
