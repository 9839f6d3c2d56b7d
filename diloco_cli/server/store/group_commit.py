"""Group commit: many tasks wait for one flush of the journal.

    append ──▶ (in memory) ──sync in a thread──▶ durable ──▶ the waiting tasks continue

This file decides when the journal is flushed and which tasks wait for it; how records become
durable is `journal`'s subject. A failed flush is final: the kernel may have dropped the pages
it could not write, so a second flush that succeeds would prove nothing. The server stops and
replays. On a full disk the records stay, the waiting tasks get the error, and the flush is
retried.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from diloco_cli.server.store import Journal
from diloco_cli.system.files import DiskFull

RETRY_SECONDS = 2.0
"""Between two attempts to write to a full disk."""


class GroupCommit:
    """Appends records and tells when they are durable."""

    def __init__(self, journal: Journal) -> None:
        self.journal = journal
        self.on_durable: Callable[[], None] = lambda: None
        """Called after every flush."""
        self.on_failure: Callable[[BaseException], None] = lambda error: None
        self.failed: BaseException | None = None
        self.full: DiskFull | None = None
        """Set while the disk has no room: `append` then raises it, so that nothing piles up."""
        self._synced = journal.last
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []
        self._flush: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(1, "journal")

    def append(self, record: Mapping[str, Any]) -> int:
        """Appends a record and starts a flush unless one is running."""
        if error := self.failed or self.full:
            raise error
        number = self.journal.append(record)
        self._start()
        return number

    async def durable(self) -> None:
        """Waits until every record appended so far is durable."""
        if self.failed is not None:
            raise self.failed
        if self._synced >= self.journal.last:
            return
        done = asyncio.get_running_loop().create_future()
        self._waiting.append((self.journal.last, done))
        self._start()
        await done

    async def between_flushes(self, work: Callable[[], None]) -> None:
        """Runs `work` between two flushes; an error is final unless the disk is full."""
        try:
            await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except DiskFull:
            raise
        except Exception as error:
            self._fail(error)

    async def close(self) -> None:
        """Flushes what is left, unless a flush has failed before; then none is under way."""
        if self.failed is None:
            await self.durable()
        if self._flush:
            await asyncio.wait([self._flush])
        self._thread.shutdown(wait=False)

    def _start(self) -> None:
        if self._flush is None and self._synced < self.journal.last and not self.failed:
            self._flush = asyncio.get_running_loop().create_task(self._flush_all())

    async def _flush_all(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while self._synced < (number := self.journal.last):
                await loop.run_in_executor(self._thread, self.journal.sync)
                self._synced, self.full = number, None
                self._release(None)
                self.on_durable()
        except DiskFull as error:
            self.full = error
            self._release(error)
            loop.call_later(RETRY_SECONDS, self._start)
        except Exception as error:
            self._fail(error)
        finally:
            self._flush = None

    def _fail(self, error: Exception) -> None:
        self.failed = error
        self._release(error)
        self.on_failure(error)

    def _release(self, error: Exception | None) -> None:
        waiting, self._waiting = self._waiting, []
        for number, done in waiting:
            if done.done():
                continue  # The waiting task was cancelled.
            if number <= self._synced:
                done.set_result(None)
            elif error is not None:
                done.set_exception(error)
            else:
                self._waiting.append((number, done))
