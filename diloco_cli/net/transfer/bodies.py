"""Bodies to and from the server, each in the way its size and the link call for.

    up     in one piece if that is short on this link, else in parts
    down   in one range; in several above `part_bytes`; from where it broke off, always

Each connection is a lane of its own: one of them tops out at what the kernel buffers, and
what is lost on one is not lost on the others.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TypeVar

import httpx

from diloco_cli.errors import LinkError, WireError
from diloco_cli.net.connection import Carrier, Connection, Retry, Timeouts
from diloco_cli.net.credentials import NOBODY, Credentials
from diloco_cli.net.refusal import Gone
from diloco_cli.net.transfer.download import Download, fresh
from diloco_cli.net.transfer.throughput import MOST_LANES, PART_BYTES, Throttle, Throughput
from diloco_cli.net.transfer.upload import Upload, opened
from diloco_cli.wire.messages import Answer

T = TypeVar("T")

WORTH_PARTS = 1_000_000
"""A body shorter than this is sent in one piece on any link."""

MOST_KEPT_BYTES = 256_000_000
"""Memory of a download that is kept for the next one."""

FRAME = {"content-type": "application/octet-stream"}


class Transfer:
    """The connections for bodies to one server, and what was learned about the way."""

    def __init__(
        self,
        url: str,
        *,
        timeouts: Timeouts,
        retry: Retry | None = None,
        stop: threading.Event | None = None,
        carrier: Carrier = "pyreqwest",
        part_bytes: int = PART_BYTES,
        lanes: int = MOST_LANES,
        rate_limit: float | None = None,
        say: Callable[[str], None] | None = None,
        identity: Credentials = NOBODY,
    ) -> None:
        self._make = partial(
            Connection,
            url,
            bulk=True,
            carrier=carrier,
            timeouts=timeouts,
            retry=retry,
            stop=stop or threading.Event(),
            bucket=Throttle(rate_limit) if rate_limit else None,
            identity=identity,
        )
        self._lanes = [self._make()]
        self._growing = threading.Lock()
        gauge = partial(
            Throughput,
            answer=timeouts.answer,
            slowest=timeouts.slowest_bytes_per_second,
            part_bytes=part_bytes,
            lanes=lanes,
            say=say,
        )
        self.up, self.down = gauge("uploads"), gauge("downloads")
        self._fetching: Download | None = None
        self._kept = bytearray(1)

    def close(self) -> None:
        for lane in self._lanes:
            lane.close()

    def lane(self, number: int) -> Connection:
        """One of the connections; those after the first are made when they are needed."""
        with self._growing:
            while len(self._lanes) <= number:
                self._lanes.append(self._make())
            return self._lanes[number]

    def send(
        self,
        path: str,
        frame: bytes | Path,
        answer: Callable[[httpx.Response], Answer],
        *,
        headers: dict[str, str],
    ) -> Answer:
        """Puts a contribution under its path and returns what `answer` reads of its fate."""
        with opened(frame) as source:
            if source.size < WORTH_PARTS or self.up.short(source.size):
                try:
                    return self._put(path, frame, source.size, answer, headers)
                except LinkError as error:
                    if source.size < WORTH_PARTS or not _broke_off(error):
                        raise
                    self.up.broke()
            return Upload(
                source, path, lane=self.lane, gauge=self.up, headers=headers, answer=answer
            ).run()

    def _put(
        self,
        path: str,
        frame: bytes | Path,
        size: int,
        answer: Callable[[httpx.Response], Answer],
        headers: dict[str, str],
    ) -> Answer:
        """Sends a contribution in one piece; a long one that broke off not again like this."""
        began = time.monotonic()
        found = self.lane(0).call(
            "PUT",
            path,
            answer,
            body=frame,
            headers={**headers, **FRAME},
            seconds=self.up.seconds(size),
            answers=frozenset({409, 422}),
            enough=lambda failure: size >= WORTH_PARTS and isinstance(failure, httpx.RequestError),
        )
        self.up.moved(size, time.monotonic() - began)
        return found

    def fetch(
        self,
        path: str,
        receive: Callable[[memoryview], T],
        *,
        most: int,
        headers: dict[str, str],
    ) -> T:
        """Fetches a resource of at most `most` bytes; what `receive` refuses is fetched again."""
        fetch = self._fetching
        if fetch is None or fetch.path != path:
            fetch = Download(
                path,
                lane=self.lane,
                gauge=self.down,
                headers=headers,
                most=most,
                room=self._room,
            )
        # What has arrived when the link breaks for good is there when it is tried again.
        self._fetching = fetch
        first, failures = self.lane(0), 0
        while True:
            try:
                found = receive(fetch.run())
                self._fetching = None
                return found
            except Gone:
                self._fetching = None
                raise
            except WireError:
                fetch.forget()
                failures += 1
                pause = first.retry.pause(failures, chance=random.random())
                if failures >= first.retry.tries or first.stop.wait(pause):
                    raise

    def _room(self, size: int) -> memoryview:
        """A place for so many bytes: that of the last body, once nobody looks at it any more.

        Memory that is new to a process costs more time than a fast link needs to fill it.
        """
        if size > MOST_KEPT_BYTES:
            return fresh(size)
        try:
            if len(self._kept) < size:
                self._kept.extend(bytes(size - len(self._kept)))
            else:
                self._kept.append(self._kept.pop())  # Not allowed while a view of it exists.
        except BufferError:
            self._kept = bytearray(size)
        return memoryview(self._kept)[:size]


def _broke_off(error: LinkError) -> bool:
    """Whether a connection broke, rather than that there was none or a "later"."""
    cause = error.__cause__
    return isinstance(cause, httpx.RequestError) and not isinstance(cause, httpx.ConnectError)
