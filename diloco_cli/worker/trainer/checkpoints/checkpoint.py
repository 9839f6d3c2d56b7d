"""A region's local checkpoint, in one file, and when the next one is due.

Weights, optimiser, anchors and books belong to the same inner step, so they are one
file, replaced as a whole: a reader sees the old one or the new one, never half of
either. It needs no order relative to what was posted; the outbox speaks for that.

    safetensors   params/NAME, optimizer/PATH, anchor/NUMBER
    metadata      diloco: JSON {version, step, clock, cursor, books, meta, sums}

No more than one part in 200 of the time goes into checkpoints, the thread that writes them
included. A small model is saved every two seconds, a large one as often as it can bear.
"""

from __future__ import annotations

import json
import time
import zlib
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from diloco_cli.core.lanes import Cursor
from diloco_cli.errors import DilocoError, RunFailed, StoreError
from diloco_cli.system.failpoints import reach
from diloco_cli.system.files import keep_files

if TYPE_CHECKING:
    from diloco_cli.worker.trainer.weights_and_books import WeightsAndBooks

VERSION = 1
SHORTEST = 2.0
LONGEST = 20.0
SHARE = 200.0
"""Of the time, a checkpoint may take one part in so many."""
BLOCKED_SHARE = 50.0
"""A model too large for that may still hold the training up for this part."""
TROUBLE = (OSError, SafetensorError, DilocoError)
"""What may go wrong with a checkpoint that costs the checkpoint, not the training."""
HINT = "Delete the file; the region then restarts from the published weights."


class ShardedArrays(NamedTuple):
    """The arrays of a checkpoint that was written by many devices."""

    held: list[np.ndarray]
    """What is held of each fragment; more may follow the last value."""
    optimizer: Mapping[str, np.ndarray]
    """Read when it is asked for, or by an engine to its devices."""


@dataclass(frozen=True)
class Checkpoint:
    """All a trainer needs to go on as if it had never stopped; plain data and numpy."""

    params: dict[str, np.ndarray]
    opt_state: dict[str, np.ndarray]
    """As the engine gives it."""

    anchors: list[np.ndarray]
    """Published weights as adopted, one vector per fragment."""

    books: list[dict[str, Any]]
    """Held counters and flights, one per fragment."""

    cursor: Cursor
    clock: int
    step: int
    meta: dict[str, Any] = field(default_factory=dict)
    """Anything else that is plain: run, layout, owner, terms."""

    sharded: ShardedArrays | None = None
    """In place of all the arrays above."""


def save(path: Path, checkpoint: Checkpoint) -> None:
    """Makes a checkpoint durable, then visible, in that order."""
    arrays = _arrays(checkpoint)
    notes = {
        "version": VERSION,
        "step": checkpoint.step,
        "clock": checkpoint.clock,
        "cursor": checkpoint.cursor.as_record(),
        "books": checkpoint.books,
        "meta": checkpoint.meta,
        "sums": {name: zlib.crc32(values.data) for name, values in arrays.items()},
    }
    metadata = {"diloco": json.dumps(notes)}
    # Durable with its name: otherwise a power cut could bring back a checkpoint older than
    # frames that were posted long ago.
    keep_files({path: lambda draft: save_file(arrays, draft, metadata=metadata)})


def load(path: Path) -> Checkpoint:
    """Reads a checkpoint back bit for bit, or says what is wrong with the file."""
    try:
        with safe_open(path, framework="np") as file:
            notes = json.loads((file.metadata() or {})["diloco"])
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except FileNotFoundError:
        raise StoreError(f"There is no checkpoint {path}.", hint=HINT) from None
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise StoreError(f"The checkpoint {path} cannot be read: {error}.", hint=HINT) from None
    if notes.get("version") != VERSION:
        raise StoreError(
            f"The checkpoint {path} has version {notes.get('version')}, this program reads "
            f"version {VERSION}.",
            hint=HINT,
        )
    _check_sums(path, arrays, notes["sums"])
    anchors = _under("anchor/", arrays)
    return Checkpoint(
        params=_under("params/", arrays),
        opt_state=_under("optimizer/", arrays),
        anchors=[anchors[name] for name in sorted(anchors)],
        books=notes["books"],
        cursor=Cursor.of(notes["cursor"]),
        clock=notes["clock"],
        step=notes["step"],
        meta=notes["meta"],
    )


def read_cursor(path: Path) -> Cursor:
    """Where the reading of a checkpoint stands; nothing else of it is read."""
    try:
        with safe_open(path, framework="np") as file:
            return Cursor.of(json.loads((file.metadata() or {})["diloco"])["cursor"])
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        raise StoreError(f"The checkpoint {path} cannot be read: {error}.", hint=HINT) from None


def _arrays(checkpoint: Checkpoint) -> dict[str, np.ndarray]:
    groups: dict[str, Mapping[str, np.ndarray]] = {
        "params/": checkpoint.params,
        "optimizer/": checkpoint.opt_state,
        "anchor/": {f"{number:05d}": anchor for number, anchor in enumerate(checkpoint.anchors)},
    }
    return {
        # Not ascontiguousarray: that turns a counter of no dimension into a vector.
        prefix + name: np.asarray(values, order="C")
        for prefix, group in groups.items()
        for name, values in group.items()
    }


def _under(prefix: str, arrays: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    return {
        name.removeprefix(prefix): values
        for name, values in arrays.items()
        if name.startswith(prefix)
    }


def _check_sums(path: Path, arrays: Mapping[str, np.ndarray], sums: Mapping[str, int]) -> None:
    """Refuses a file whose bytes changed on disk; safetensors itself checks lengths only."""
    if missing := sorted(set(sums) ^ set(arrays)):
        raise StoreError(f"The checkpoint {path} lacks {missing[0]}.", hint=HINT)
    for name, values in arrays.items():
        if zlib.crc32(values.data) != sums[name]:
            raise StoreError(
                f"The checkpoint {path} is damaged: {name} is not what was written.", hint=HINT
            )


class CheckpointTarget(Protocol):
    """Where checkpoints go, and how often."""

    def begin(self, weights: WeightsAndBooks) -> Callable[[], None]:
        """Copies what a checkpoint needs; gives what makes it durable, beside the training."""
        ...

    def interval(self, blocked: float, effort: float) -> float:
        """Seconds to the next one, by what the last held the training up and cost beside it."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class CheckpointFile:
    """One file, replaced as a whole; for models that fit one host."""

    path: Path

    def begin(self, weights: WeightsAndBooks) -> Callable[[], None]:
        return partial(save, self.path, weights.checkpoint())

    def interval(self, blocked: float, effort: float) -> float:
        return interval(blocked, effort)

    def close(self) -> None:
        pass


class CheckpointWriter:
    """Writes checkpoints in a thread of its own and remembers what they cost."""

    def __init__(self, target: CheckpointTarget, *, wake: Callable[[], None], now: float) -> None:
        self._target, self._wake = target, wake
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._writing: Future[str] | None = None
        self.tried = self.kept = Cursor()
        """Of the newest checkpoint, and of the newest that is durable."""
        self._saved_at, self._blocked = now, 0.0
        self._effort = 0.0

    def save(self, weights: WeightsAndBooks) -> None:
        """Begins a checkpoint; the training waits until it is copied, not until it is written."""
        began = time.monotonic()
        self.tried = weights.cursor
        try:
            finish = self._target.begin(weights)
        except TROUBLE as error:
            finish = partial(_raise, error)
        self._writing = self._thread.submit(self._finish, finish, weights.cursor)
        self._writing.add_done_callback(lambda _: self._wake())
        self._saved_at = time.monotonic()
        self._blocked = self._saved_at - began

    def keep_realigned(self, weights: WeightsAndBooks) -> None:
        """Makes the step from a run to the one that continues it durable, or fails.

        Until then every start makes the same step from the same files. A frame that was posted
        before would be taken for nothing by it, and its work sent once more.
        """
        weights.engine.wait()
        reach("realign.stood")
        self.save(weights)
        if trouble := self.wait():
            raise RunFailed(f"{trouble}; it is tried again with the next start")
        reach("realign.saved")

    def is_due(self, *, now: float) -> bool:
        pause = self._target.interval(self._blocked, self._effort)
        return now >= self._saved_at + pause and not self.busy

    def wait(self) -> str:
        """Waits for the checkpoint being written; says what went wrong with it, if anything."""
        writing, self._writing = self._writing, None
        return writing.result() if writing else ""

    def trouble(self) -> str:
        """Says what went wrong with the last checkpoint, once, without waiting for one."""
        return "" if self.busy else self.wait()

    def close(self) -> None:
        self._thread.shutdown()
        self._target.close()

    @property
    def busy(self) -> bool:
        return self._writing is not None and not self._writing.done()

    def _finish(self, finish: Callable[[], None], cursor: Cursor) -> str:
        began = time.thread_time()
        try:
            finish()
            self.kept = cursor
        except TROUBLE as error:
            return f"the checkpoint could not be written: {error}"
        finally:
            self._effort = time.thread_time() - began
        return ""


def _raise(error: Exception) -> None:
    raise error


def interval(blocked: float, effort: float) -> float:
    """Seconds between checkpoints: `blocked` held the training up, `effort` is CPU beside it."""
    rarest = max(LONGEST, BLOCKED_SHARE * blocked)
    return min(max(SHORTEST, SHARE * (blocked + effort)), rarest)
