"""Keeps the history of the run: two samples a second, on disk every minute.

It only looks on. A history that cannot be read is begun anew, one that cannot be written is
tried again a minute later, and an error of its own costs one sample; none holds up a round.
"""

from __future__ import annotations

import asyncio
import logging
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from diloco_cli.observe.history import History, packed
from diloco_cli.server.build_status import build_status
from diloco_cli.server.rounds.coordinator import Coordinator
from diloco_cli.system.files import keep_bytes

log = logging.getLogger(__name__)

SAMPLE_SECONDS = 0.5
"""Twice in each row of the curves: one that comes late leaves no gap."""
KEEP_SECONDS = 60.0
NAME = "history.npz"


class HistoryRecorder:
    """Folds what a server does into a `History`."""

    def __init__(self, folder: Path, fragments: int, note: Callable[..., None]) -> None:
        """`note` is where events go on to."""
        self.history = History(fragments)
        self._path, self._note = folder / NAME, note
        self._coordinator: Coordinator | None = None
        self._writing: asyncio.Task[None] | None = None
        self._said: set[str] = set()
        """Where an error came from that was reported: it may come twice a second."""
        try:
            self.history.load(self._path.read_bytes())
        except FileNotFoundError:
            pass  # A run that begins, or one whose curves were deleted.
        except (ValueError, OSError) as error:
            log.warning(f"{self._path}: {error}; the curves begin anew")

    def note(self, kind: str, **fields: Any) -> None:
        """Takes an event of the server and passes it on."""
        at = self._coordinator.state.seconds if self._coordinator else 0.0
        with self._reported():
            self.history.note(kind, fields, at, time.time())
        self._note(kind, **fields)
        if kind in ("evaluated", "evaluated-ema") and self._coordinator:
            self.sample(self._coordinator)  # The next second may bring another one.

    async def run(self, coordinator: Coordinator) -> None:
        """Samples until it is cancelled."""
        state = coordinator.state
        self._coordinator = coordinator
        kept = state.clock()
        while True:
            self.sample(coordinator)
            is_written = self._writing is None or self._writing.done()
            if state.clock() - kept >= KEEP_SECONDS and is_written:
                self._writing = asyncio.create_task(self._write_beside())
                kept = state.clock()
            await asyncio.sleep(SAMPLE_SECONDS)

    def sample(self, coordinator: Coordinator) -> None:
        with self._reported():
            self._sample(coordinator)

    def _sample(self, coordinator: Coordinator) -> None:
        state = coordinator.state
        at = state.seconds
        self.history.sample(at, build_status(coordinator, ""))
        for region, lease in state.leases.all.items():
            if lease.heartbeat:
                versions = [progress.version for progress in lease.heartbeat.fragments]
                self.history.rounds.adopted(region, versions, at)

    async def keep(self) -> None:
        """Writes the file, after a write that is on its way: nobody waits for a lock meanwhile."""
        if self._writing:
            await self._writing
        await self._write_beside()

    async def _write_beside(self) -> None:
        with self._reported():
            # The copy is made here, where nothing changes meanwhile; a disk may be slow.
            await asyncio.to_thread(self._write, self.history.snapshot())

    def _write(self, arrays: Mapping[str, np.ndarray]) -> None:
        """A full disk costs the picture of a minute."""
        try:
            keep_bytes(self._path, packed(arrays))
        except OSError as error:
            log.warning(f"{self._path}: {error}; the curves are not kept")

    @contextmanager
    def _reported(self) -> Iterator[None]:
        """Logs what goes wrong instead of raising it: the run does not need its picture."""
        try:
            yield
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            where = f"{Path(place.filename).name}, line {place.lineno}"
            if where not in self._said:
                self._said.add(where)
                what = f"{type(error).__name__}: {error} ({where})"
                log.warning(f"the curves lack something: {what}; the run goes on, please report it")
