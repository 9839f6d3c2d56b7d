"""Nothing is said before it is on the disk, and many wait for one flush.

    append ──▶ (page cache) ──flush in a thread──▶ durable ──▶ whoever waits goes on

A failed flush is final: the kernel may have dropped the pages it could not write, so a
second flush that succeeds would prove nothing. The server stops and replays. A full disk
is another matter: the records wait, whoever waited is told, and the flush is tried again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

from diloco_cli.server.store.durable import DiskFull

RETRY_SECONDS = 2.0
"""How often a full disk is tried again."""


class Log(Protocol):
    """An append-only journal; `append` may be called while `sync` runs in another thread."""

    @property
    def last(self) -> int:
        """Number of the newest record; 0 before the first."""
        ...

    def append(self, record: Mapping[str, Any]) -> int: ...
    def sync(self) -> None: ...


class GroupCommit:
    """Appends records and tells when they are durable."""

    def __init__(self, log: Log) -> None:
        self.log = log
        self.on_durable: Callable[[], None] = lambda: None
        """Called after every flush."""
        self.on_failure: Callable[[BaseException], None] = lambda error: None
        self.failed: BaseException | None = None
        self.full: DiskFull | None = None
        """Set while the disk has no room: nothing new is decided then, so nothing piles up."""
        self._synced = log.last
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []
        self._flush: asyncio.Task[None] | None = None
        self._thread = ThreadPoolExecutor(1, "journal")

    def append(self, record: Mapping[str, Any]) -> int:
        """Writes a record and sees to it that it becomes durable soon."""
        if stuck := self.failed or self.full:
            raise stuck
        number = self.log.append(record)
        self._start()
        return number

    async def durable(self) -> None:
        """Waits until every record written so far is on the disk."""
        if self.failed is not None:
            raise self.failed
        if self._synced >= self.log.last:
            return
        done = asyncio.get_running_loop().create_future()
        self._waiting.append((self.log.last, done))
        self._start()
        await done

    async def in_turn(self, work: Callable[[], None]) -> None:
        """Does something to the journal between two flushes; only a full disk is survived."""
        try:
            await asyncio.get_running_loop().run_in_executor(self._thread, work)
        except DiskFull:
            raise
        except Exception as error:
            self.failed = error
            self._release(error)
            self.on_failure(error)

    async def close(self) -> None:
        """Flushes what is left, unless a flush has failed before."""
        if self.failed is None:
            await self.durable()
        self._thread.shutdown(wait=False)

    def _start(self) -> None:
        if self._flush is None and self._synced < self.log.last and not self.failed:
            self._flush = asyncio.get_running_loop().create_task(self._flush_all())

    async def _flush_all(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while self._synced < (number := self.log.last):
                await loop.run_in_executor(self._thread, self.log.sync)
                self._synced, self.full = number, None
                self._release(None)
                self.on_durable()
        except DiskFull as error:
            self.full = error
            self._release(error)
            loop.call_later(RETRY_SECONDS, self._start)
        except Exception as error:
            self.failed = error
            self._release(error)
            self.on_failure(error)
        finally:
            self._flush = None

    def _release(self, error: Exception | None) -> None:
        waiting, self._waiting = self._waiting, []
        for number, done in waiting:
            if done.done():
                continue  # Whoever waited has gone away.
            if number <= self._synced:
                done.set_result(None)
            elif error is not None:
                done.set_exception(error)
            else:
                self._waiting.append((number, done))
