"""A download that survives its connections: bytes that have arrived are never fetched again.

The first request asks for the first part and learns how long the whole is. The rest then comes
over several connections, a range each; a range that breaks off is resumed at the byte where it
broke. `If-Range` makes all of them bytes of the same resource: had it changed, the server would
send it from the beginning.
"""

from __future__ import annotations

import mmap
import random
import re
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

import httpx

from diloco_cli.errors import DilocoError, LinkError, WireError
from diloco_cli.net.backends import PIECES
from diloco_cli.net.connection import RETRYABLE, Connection, Damaged, RetryLater, link_error
from diloco_cli.net.transfer.throughput import Throughput

Range = tuple[int, int]

HUGE_PAGE_BYTES = 2 << 20

_CONTENT_RANGE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")


@dataclass
class _Part:
    """A range that was asked for; `start` advances as its bytes arrive."""

    start: int
    stop: int
    received: int = 0


class Download:
    """One resource on its way; `lane` gives a connection for each thread that helps."""

    def __init__(
        self,
        path: str,
        *,
        lane: Callable[[int], Connection],
        throughput: Throughput,
        headers: dict[str, str],
        most: int,
        allocate: Callable[[int], memoryview] | None = None,
    ) -> None:
        """`most` limits the length of the resource; `allocate` makes memory for so many bytes."""
        self.path = path
        self._lane, self._throughput, self._headers, self._most = lane, throughput, headers, most
        self._allocate = allocate or fresh
        first = lane(0)
        self._url, self._stop, self._retry = first.url, first.stop, first.retry
        self._lock = threading.Lock()
        self._began, self._active = 0.0, 1
        self._helpers: list[threading.Thread] = []
        self._error: Exception | None = None
        self.forget()

    def forget(self) -> None:
        """Starts over: what has arrived cannot be used."""
        self._buffer, self._etag = memoryview(b""), ""
        self._gaps: list[Range] = []
        self._size_known = False
        self._failures = 0

    @property
    def left(self) -> int:
        """Bytes that are still missing, as far as known."""
        return sum(stop - start for start, stop in self._gaps)

    def run(self) -> memoryview:
        """Returns the whole resource; called again after a failure, it resumes."""
        self._began, self._error, self._failures = time.monotonic(), None, 0
        self._active = 1
        self._helpers = []
        while not self._size_known and not self._error:
            self._try(self._lane(0), 0, self._throughput.part_bytes)
        self._start_helpers()
        self._fetch_parts(0)
        for helper in self._helpers:
            helper.join()
        if isinstance(self._error, WireError):
            self.forget()
        if self._error:
            raise self._error
        return self._buffer

    def _start_helpers(self) -> None:
        """Starts a thread for every further connection that the rest is worth."""
        throughput = self._throughput
        lanes = max(throughput.lanes(self.left), min(2, throughput.most_lanes))
        wanted = min(lanes - 1, -(-self.left // throughput.part_bytes))
        while len(self._helpers) < wanted:
            number = len(self._helpers) + 1
            helper = threading.Thread(target=self._fetch_parts, args=(number,), daemon=True)
            self._helpers.append(helper)
            self._active = 1 + len(self._helpers)
            helper.start()

    def _fetch_parts(self, number: int) -> None:
        while (part := self._next()) is not None:
            self._try(self._lane(number), *part)

    def _next(self) -> Range | None:
        with self._lock:
            if self._stop.is_set() and self._gaps and not self._error:
                self._error = LinkError(f"The download from {self._url} was told to stop.")
            if self._error or not self._gaps:
                return None
            start, stop = self._gaps[0]
            cut = min(stop, start + self._throughput.part_bytes)
            self._gaps[0] = (cut, stop)
            if cut == stop:
                del self._gaps[0]
            return start, cut

    def _try(self, connection: Connection, start: int, stop: int) -> None:
        """Asks for a range once; bytes that do not arrive are missing again."""
        part = _Part(start, stop)
        headers = {**self._headers, "range": f"bytes={start}-{stop - 1}"}
        if self._etag:
            headers["if-range"] = self._etag
        lanes = max(1, self._active)
        allowed = self._throughput.seconds(min(stop, self._most) - start, lanes=lanes)
        began = time.monotonic()

        def receive(response: httpx.Response) -> None:
            self._throughput.answered(time.monotonic() - began)
            self._receive(part, response)

        try:
            connection.once("GET", self.path, receive, headers=headers, seconds=allowed)
        except RETRYABLE as error:
            self._failed(part, error, allowed)
        except (DilocoError, OSError) as error:
            self._error = self._error or error
        except BaseException as error:
            self._error = self._error or RuntimeError(repr(error))
            raise
        else:
            self._failures = 0
        finally:
            if part.received:
                self._throughput.moved(part.received, time.monotonic() - began, lanes=lanes)

    def _failed(self, part: _Part, error: Exception, allowed: float) -> None:
        self._throughput.broke(slow=isinstance(error, httpx.TimeoutException))
        with self._lock:
            if isinstance(error, Damaged):
                self._error = self._error or error.error
                return
            if self._size_known and part.start < part.stop:
                self._gaps.insert(0, (part.start, part.stop))
            if part.received and self._etag:
                self._failures = 0
                return
            self._failures += 1
            if self._failures >= self._retry.tries:
                elapsed = time.monotonic() - self._began
                self._error = link_error(self._url, error, allowed, self._failures, elapsed)
                return
        retry_after = error.retry_after if isinstance(error, RetryLater) else 0.0
        chance = random.random()
        if self._stop.wait(
            self._retry.pause(self._failures, retry_after=retry_after, chance=chance)
        ):
            self._error = link_error(self._url, error, allowed, self._failures, 0.0)

    # One answer

    def _receive(self, part: _Part, response: httpx.Response) -> None:
        if response.status_code != 206:
            self._receive_whole(part, response)
            return
        self._check_range(part, response)
        for piece in response.extensions.get(PIECES, response.iter_raw)():
            if part.start + len(piece) > part.stop:
                raise WireError(f"{self._url} sends more than the range it was asked for.")
            self._buffer[part.start : part.start + len(piece)] = piece
            part.start += len(piece)
            part.received += len(piece)
        if part.start < part.stop:
            raise httpx.ReadError(f"{part.stop - part.start} bytes are missing")

    def _check_range(self, part: _Part, response: httpx.Response) -> None:
        """Checks that these are the bytes asked for, of the resource the others belong to."""
        etag = response.headers.get("etag", "")
        header = _CONTENT_RANGE.fullmatch(response.headers.get("content-range", ""))
        if header is None or int(header[1]) != part.start:
            wanted = f"{part.start}-{part.stop - 1}"
            raise WireError(f"{self._url} sent another range than the bytes {wanted}.")
        size = int(header[3])
        if self._size_known:
            if etag != self._etag or size != len(self._buffer):
                raise self._changed()
            return
        if size > self._most:
            raise self._too_long()
        self._buffer, self._etag = self._allocate(size), etag
        part.stop = min(part.stop, size)
        self._gaps = [(part.stop, size)] if part.stop < size else []
        self._size_known = True
        self._start_helpers()

    def _receive_whole(self, part: _Part, response: httpx.Response) -> None:
        """Takes the whole resource from a server that does not send ranges of it."""
        if self._size_known:
            raise self._changed()
        body = bytearray()
        for piece in response.iter_raw():
            body += piece
            part.received = len(body)
            if len(body) > self._most:
                raise self._too_long()
        self._buffer, self._gaps, self._size_known = memoryview(body), [], True

    def _changed(self) -> WireError:
        return WireError(f"{self._url}{self.path} changed while it was fetched.")

    def _too_long(self) -> WireError:
        return WireError(
            f"{self._url} sends more than the {self._most} bytes its answer may have.",
            hint="Is this a diloco server of the same run?",
        )


def fresh(size: int) -> memoryview:
    """Allocates memory in large pages where the system has them.

    Page by page, the system needs longer to allocate a body than a fast link to fill it.
    """
    if size < HUGE_PAGE_BYTES:
        return memoryview(bytearray(size))
    try:
        memory = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:  # ENOMEM, which mmap does not report as a MemoryError.
        raise MemoryError(f"{size} bytes for a body") from error
    if advice := getattr(mmap, "MADV_HUGEPAGE", None):
        with suppress(OSError):  # No huge pages here.
            memory.madvise(advice)
    return memoryview(memory)
