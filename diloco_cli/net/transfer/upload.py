"""An upload that survives its connections: in parts, over several of them, resumable.

    which bytes are there? ─▶ the missing ones, a part at a time ─▶ complete

How long a part is and how many travel at once follows from the throughput so far. A part that
breaks off is sent again, maybe shorter; the server keeps what it has, also when the worker ends
and another resumes the upload of the same frame.
"""

from __future__ import annotations

import json
import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import httpx
from isal.isal_zlib import crc32  # The same sum as zlib's, in a fifth of the time.

from diloco_cli.errors import DilocoError, LinkError, WireError
from diloco_cli.net.connection import RETRYABLE, Connection, Damaged, RetryLater, link_error
from diloco_cli.net.refusal import MOST_REFUSAL_BYTES, read, refusal
from diloco_cli.net.transfer.throughput import Throughput
from diloco_cli.wire import messages
from diloco_cli.wire.error_bodies import parse_error
from diloco_cli.wire.frame import DIGEST_BYTES
from diloco_cli.wire.messages import (
    PARTS_HEADER,
    Answer,
    Having,
    parse,
)

Range = tuple[int, int]

MOST_ROUNDS = 4
"""Times an upload is planned anew because the server turns out to have something else."""

SHORTEST_LAST_PART = 8
"""A last part is no shorter than a whole one divided by this: a shorter one would take less time to
travel than the round trip of its request."""


class Replan(Exception):
    """The server has other bytes than expected."""


class Source:
    """Bytes to send: in memory, or in a file that stays the same when it is replaced."""

    def __init__(self, body: bytes | Path) -> None:
        self._body = memoryview(body if isinstance(body, bytes) else b"")
        self._handle = os.open(body, os.O_RDONLY) if isinstance(body, Path) else -1
        self.size = os.fstat(self._handle).st_size if self._handle >= 0 else len(self._body)

    def read(self, start: int, stop: int) -> bytes | memoryview:
        """The bytes from `start` to `stop`; those in memory stay where they are."""
        if self._handle < 0:
            return self._body[start:stop]
        return os.pread(self._handle, stop - start, start)

    @property
    def digest(self) -> str:
        """A frame's own digest: its last bytes."""
        return self.read(max(0, self.size - DIGEST_BYTES), self.size).hex()

    def close(self) -> None:
        if self._handle >= 0:
            os.close(self._handle)
            self._handle = -1


@contextmanager
def opened(body: bytes | Path) -> Iterator[Source]:
    source = Source(body)
    try:
        yield source
    finally:
        source.close()


class Upload:
    """One frame on its way; `lane` gives a connection for each thread that helps."""

    def __init__(
        self,
        source: Source,
        contribution: str,
        *,
        lane: Callable[[int], Connection],
        throughput: Throughput,
        headers: dict[str, str],
        answer: Callable[[httpx.Response], Answer],
    ) -> None:
        """`contribution` is the path of the frame; `answer` parses the server's decision."""
        self._source, self._path, self._lane = source, contribution, lane
        self._throughput, self._headers, self._answer = throughput, headers, answer
        self._frame = source.digest
        first = lane(0)
        self._url, self._stop = first.url, first.stop
        # A part that breaks off is no reason to give up; a link that moves no bytes is.
        self._retry = replace(first.retry, tries=max(4, first.retry.tries), first=0.1)
        self._lock = threading.Lock()
        self._gaps: list[Range] = []
        self._helpers: list[threading.Thread] = []
        self._active = 0
        self._started: set[int] = set()
        self._failures = 0
        self._began = time.monotonic()
        self._error: Exception | None = None

    def run(self) -> Answer:
        """Sends what is missing, completes the upload, and returns the server's decision."""
        why = ""
        for _ in range(MOST_ROUNDS):
            try:
                self.send_missing()
                return self._complete()
            except Replan as reason:
                why = str(reason)
        raise LinkError(
            f"{self._url} has other parts of this frame than were sent: {why}.",
            hint="Is another worker of this region sending? The upload is retried.",
        )

    def send_missing(self) -> None:
        """Sends what the server does not have, unless it has decided already."""
        having = self._ask()
        if not having.decided:
            self._send(having)

    def _ask(self) -> Having:
        began = time.monotonic()
        having = self._lane(0).call(
            "GET",
            messages.parts_path(self._path, frame=self._frame),
            lambda response: parse(Having, read(self._url, response, MOST_REFUSAL_BYTES)),
            headers=self._headers,
            retry=self._retry,
        )
        self._throughput.answered(time.monotonic() - began)
        return having

    def _complete(self) -> Answer:
        def receive(response: httpx.Response) -> Answer:
            if response.status_code == 409:
                body = read(self._url, response, MOST_REFUSAL_BYTES)
                parsed = parse_error(body)
                if parsed and parsed[0].code == "incomplete":
                    raise Replan(parsed[0].message.rstrip("."))
                if parsed and "fate" in parsed[1]:
                    fields = {"why": parsed[0].message, **parsed[1]}
                    return parse(Answer, json.dumps(fields).encode())
                raise refusal(self._url, 409, body)
            return self._answer(response)

        first = self._lane(0)
        return first.call(
            "PUT",
            self._path,
            receive,
            headers={**self._headers, PARTS_HEADER: self._frame},
            # No bytes travel, but the server reads the whole frame once more.
            seconds=first.timeouts.transfer(self._source.size),
            answers=frozenset({409, 422}),
            retry=self._retry,
        )

    # The parts

    def _send(self, having: Having) -> None:
        self._gaps = missing(having.have, self._source.size)
        self._error, self._active, self._failures = None, 1, 0
        self._started.clear()
        self._send_parts(0)
        for helper in self._helpers:
            helper.join()
        self._helpers.clear()
        if self._error:
            raise self._error

    def _send_parts(self, number: int) -> None:
        """Sends part after part over one connection until there is none left."""
        while (part := self._next(number)) is not None:
            try:
                self._put(self._lane(number), *part)
            except (*RETRYABLE, Replan, DilocoError, OSError) as error:
                self._failed(part, error)
            except BaseException as error:
                self._error = self._error or RuntimeError(repr(error))
                raise
        with self._lock:
            self._active -= 1

    def _next(self, number: int) -> Range | None:
        with self._lock:
            if self._stop.is_set() and not self._error:
                self._error = LinkError(f"The upload to {self._url} was told to stop.")
            left = sum(stop - start for start, stop in self._gaps)
            wanted = self._throughput.lanes(left)
            # A lane too many makes every part slower, and a slow part is likelier to break.
            if self._error or not left or number >= max(1, wanted):
                return None
            if self._active < wanted:
                self._start_helper()
            start, stop = self._gaps[0]
            length, least = self._lengths(number, left, wanted)
            cut = min(stop, start + length)
            if stop - cut < least // 2:
                cut = stop
            self._gaps[0] = (cut, stop)
            if cut == stop:
                del self._gaps[0]
            return start, cut

    def _lengths(self, number: int, left: int, wanted: int) -> tuple[int, int]:
        """How long a lane's next part should be, and how long one should be at least."""
        whole = self._throughput.part(wanted)
        least = max(self._throughput.least, whole // SHORTEST_LAST_PART)
        # The last parts become shorter, so that no lane waits long for another.
        length = min(whole, max(least, -(-left // wanted)))
        if number and number not in self._started:
            # Lanes that begin together end together, and nothing would be on its way while
            # all of them wait for an answer.
            length = max(least, length * number // wanted)
        self._started.add(number)
        return length, least

    def _start_helper(self) -> None:
        busy = {helper.name for helper in self._helpers if helper.is_alive()}
        number = next(n for n in range(1, len(busy) + 2) if f"lane {n}" not in busy)
        self._active += 1
        helper = threading.Thread(
            target=self._send_parts, args=(number,), name=f"lane {number}", daemon=True
        )
        self._helpers.append(helper)
        helper.start()

    def _put(self, connection: Connection, start: int, stop: int) -> None:
        data = self._source.read(start, stop)
        path = messages.part_path(
            self._path,
            start,
            size=self._source.size,
            frame=self._frame,
            digest=messages.check_value(crc32(data)),
        )
        began, lanes = time.monotonic(), self._active
        connection.once(
            "PUT",
            path,
            self._taken,
            body=data,
            headers={**self._headers, "content-type": "application/octet-stream"},
            seconds=self._throughput.seconds(len(data), lanes=lanes),
            answers=frozenset({400, 409}),
        )
        self._throughput.moved(len(data), time.monotonic() - began, lanes=lanes)
        self._failures = 0

    def _taken(self, response: httpx.Response) -> None:
        body = read(self._url, response, MOST_REFUSAL_BYTES)
        if response.is_success:
            return
        parsed = parse_error(body)
        if parsed and parsed[0].code == "damaged":
            raise Damaged(WireError(parsed[0].message, hint=parsed[0].hint))
        if parsed and parsed[0].code == "conflict":
            raise Replan(parsed[0].message.rstrip("."))
        raise refusal(self._url, response.status_code, body)

    def _failed(self, part: Range, error: Exception) -> None:
        if not isinstance(error, RETRYABLE):
            self._error = self._error or error
            return
        self._throughput.broke(slow=isinstance(error, httpx.TimeoutException))
        with self._lock:
            self._gaps.insert(0, part)
            self._failures += 1
            failures, lanes = self._failures, max(1, self._active)
            if failures >= self._retry.tries * lanes:
                allowed = self._throughput.seconds(part[1] - part[0], lanes=lanes)
                elapsed = time.monotonic() - self._began
                self._error = link_error(self._url, error, allowed, failures, elapsed)
                return
        retry_after = error.retry_after if isinstance(error, RetryLater) else 0.0
        rounds = -(-failures // lanes)
        self._stop.wait(self._retry.pause(rounds, retry_after=retry_after, chance=random.random()))


def missing(have: tuple[Range, ...], size: int) -> list[Range]:
    """The ranges of `size` bytes that the server lacks; it may list others in any order."""
    gaps, at = [], 0
    valid = sorted((start, stop) for start, stop in have if start < stop)
    for start, stop in (*valid, (size, size)):
        if at < min(start, size):
            gaps.append((at, min(start, size)))
        at = max(at, stop)
    return gaps
