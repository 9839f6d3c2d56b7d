"""Bodies to and from the server, each in the way its size and the link call for.

    up     in one piece if that is short on this link, else in parts
    down   in one range; in several above `part_bytes`; always resumable

Each connection is a lane of its own: one of them tops out at what the kernel buffers, and
bytes lost on one are not lost on the others.
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
from diloco_cli.net.connection import Connection
from diloco_cli.net.options import Options
from diloco_cli.net.refusal import Gone
from diloco_cli.net.transfer.download import Download, fresh
from diloco_cli.net.transfer.throttle import Throttle
from diloco_cli.net.transfer.throughput import Throughput
from diloco_cli.net.transfer.upload import Upload, opened
from diloco_cli.wire.messages import Answer

T = TypeVar("T")

WORTH_PARTS = 1_000_000
"""A body shorter than this is sent in one piece on any link."""

MOST_KEPT_BYTES = 256_000_000
"""A download's buffer up to this size is kept for the next one."""

FRAME = {"content-type": "application/octet-stream"}


class Transfer:
    """The connections for bodies to one server, and the throughput measured on them."""

    def __init__(
        self,
        url: str,
        options: Options,
        *,
        stop: threading.Event | None = None,
    ) -> None:
        throttle = Throttle(options.rate_limit) if options.rate_limit else None
        self._connect = partial(
            Connection,
            url,
            options,
            options.backend,
            stop=stop or threading.Event(),
            throttle=throttle,
        )
        self._lanes = [self._connect()]
        self._lanes_lock = threading.Lock()
        self.up = Throughput("uploads", options)
        self.down = Throughput("downloads", options)
        self._download: Download | None = None
        self._buffer = bytearray(1)

    def close(self) -> None:
        for lane in self._lanes:
            lane.close()

    def lane(self, number: int) -> Connection:
        """One of the connections; those after the first are made when they are needed."""
        with self._lanes_lock:
            while len(self._lanes) <= number:
                self._lanes.append(self._connect())
            return self._lanes[number]

    def send(
        self,
        path: str,
        frame: bytes | Path,
        answer: Callable[[httpx.Response], Answer],
        *,
        headers: dict[str, str],
    ) -> Answer:
        """Uploads a contribution; `answer` parses the server's decision."""
        with opened(frame) as source:
            if source.size < WORTH_PARTS or self.up.short(source.size):
                try:
                    return self._put(path, frame, source.size, answer, headers)
                except LinkError as error:
                    if source.size < WORTH_PARTS or not _broke_off(error):
                        raise
                    self.up.broke()
            upload = Upload(
                source, path, lane=self.lane, throughput=self.up, headers=headers, answer=answer
            )
            return upload.run()

    def _put(
        self,
        path: str,
        frame: bytes | Path,
        size: int,
        answer: Callable[[httpx.Response], Answer],
        headers: dict[str, str],
    ) -> Answer:
        """Sends a contribution in one piece; a long one that breaks off is not retried so."""
        began = time.monotonic()
        decision = self.lane(0).call(
            "PUT",
            path,
            answer,
            body=frame,
            headers={**headers, **FRAME},
            seconds=self.up.seconds(size),
            answers=frozenset({409, 422}),
            final=lambda failure: size >= WORTH_PARTS and isinstance(failure, httpx.RequestError),
        )
        self.up.moved(size, time.monotonic() - began)
        return decision

    def fetch(
        self,
        path: str,
        receive: Callable[[memoryview], T],
        *,
        most: int,
        headers: dict[str, str],
    ) -> T:
        """Fetches a resource of at most `most` bytes; what `receive` refuses is fetched again."""
        download = self._download
        if download is None or download.path != path:
            download = Download(
                path,
                lane=self.lane,
                throughput=self.down,
                headers=headers,
                most=most,
                allocate=self._allocate,
            )
        # Kept when the link breaks for good, so that the next call resumes.
        self._download = download
        first, failures = self.lane(0), 0
        while True:
            try:
                received = receive(download.run())
                self._download = None
                return received
            except Gone:
                self._download = None
                raise
            except WireError:
                download.forget()
                failures += 1
                pause = first.retry.pause(failures, chance=random.random())
                if failures >= first.retry.tries or first.stop.wait(pause):
                    raise

    def _allocate(self, size: int) -> memoryview:
        """Memory for a download: the last one's, unless a view of it is still in use.

        New memory costs a process more time than a fast link needs to fill it.
        """
        if size > MOST_KEPT_BYTES:
            return fresh(size)
        try:
            if len(self._buffer) < size:
                self._buffer.extend(bytes(size - len(self._buffer)))
            else:
                self._buffer.append(self._buffer.pop())  # Raises while a view of it exists.
        except BufferError:
            self._buffer = bytearray(size)
        return memoryview(self._buffer)[:size]


def _broke_off(error: LinkError) -> bool:
    """Whether an established connection broke."""
    cause = error.__cause__
    return isinstance(cause, httpx.RequestError) and not isinstance(cause, httpx.ConnectError)
