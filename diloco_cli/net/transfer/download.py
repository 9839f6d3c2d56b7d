"""A download that survives its connections: what has arrived is never fetched again.

The first request asks for the first part and learns how long the whole is. What is left
then comes over several connections, a range each; a range that breaks off is asked for
from the byte where it broke. `If-Range` makes all of them bytes of one and the same
resource: had it changed, the server would send it from the beginning.
"""

from __future__ import annotations

import mmap
import random
import re
import threading
import time
from collections.abc import Callable
from contextlib import suppress

import httpx

from diloco_cli.errors import DilocoError, LinkError, WireError
from diloco_cli.net.connection import ARRIVED, BROKEN, Connection, Damaged, RetryLater, in_words
from diloco_cli.net.transfer.throughput import Throughput

Range = tuple[int, int]

HUGE_PAGE_BYTES = 2 << 20

_PLACE = re.compile(r"bytes (\d+)-(\d+)/(\d+)")


class Download:
    """One resource on its way; `lane` gives a connection for each thread that helps."""

    def __init__(
        self,
        path: str,
        *,
        lane: Callable[[int], Connection],
        gauge: Throughput,
        headers: dict[str, str],
        most: int,
        room: Callable[[int], memoryview] | None = None,
    ) -> None:
        """`most` is how long the resource may be at all; `room` makes a place for so many bytes."""
        self.path = path
        self._lane, self._gauge, self._headers, self._most = lane, gauge, headers, most
        self._room = room or fresh
        first = lane(0)
        self._url, self._stop, self._retry = first.url, first.stop, first.retry
        self._lock = threading.Lock()
        self._began, self._active = 0.0, 1
        self._over: Exception | None = None
        self.forget()

    def forget(self) -> None:
        """Begins anew: what has arrived cannot be used."""
        self._buffer, self._etag = memoryview(b""), ""
        self._gaps: list[Range] = []
        self._known = False
        self._failures = 0

    @property
    def left(self) -> int:
        """Bytes that are still missing, as far as known."""
        return sum(stop - start for start, stop in self._gaps)

    def run(self) -> memoryview:
        """Returns the whole resource; called again after a failure, it goes on where it was."""
        self._began, self._over, self._failures = time.monotonic(), None, 0
        self._active = 1
        helpers: list[threading.Thread] = []
        while not self._known and not self._over:
            self._try(self._lane(0), (0, self._gauge.part_bytes), helpers)
        self._help(helpers)
        self._carry(0)
        for helper in helpers:
            helper.join()
        if isinstance(self._over, WireError):
            self.forget()
        if self._over:
            raise self._over
        return self._buffer

    def _help(self, helpers: list[threading.Thread]) -> None:
        """Starts a thread for every further connection the rest is worth."""
        lanes = max(self._gauge.lanes(self.left), min(2, self._gauge.most_lanes))
        wanted = min(lanes - 1, -(-self.left // self._gauge.part_bytes))
        while len(helpers) < wanted:
            number = len(helpers) + 1
            helper = threading.Thread(target=self._carry, args=(number,), daemon=True)
            helpers.append(helper)
            self._active = 1 + len(helpers)
            helper.start()

    def _carry(self, number: int) -> None:
        while (part := self._next()) is not None:
            self._try(self._lane(number), part)

    def _next(self) -> Range | None:
        with self._lock:
            if self._stop.is_set() and self._gaps and not self._over:
                self._over = LinkError(f"The download from {self._url} was told to stop.")
            if self._over or not self._gaps:
                return None
            start, stop = self._gaps[0]
            cut = min(stop, start + self._gauge.part_bytes)
            self._gaps[0] = (cut, stop)
            if cut == stop:
                del self._gaps[0]
            return start, cut

    def _try(
        self, link: Connection, part: Range, helpers: list[threading.Thread] | None = None
    ) -> None:
        """Asks for a range once; what does not arrive of it is missing again."""
        arriving = _Arriving(self, part, helpers)
        headers = {**self._headers, "range": f"bytes={part[0]}-{part[1] - 1}"}
        if self._etag:
            headers["if-range"] = self._etag
        lanes = max(1, self._active)
        allowed = self._gauge.seconds(min(part[1], self._most) - part[0], lanes=lanes)
        began = time.monotonic()
        try:
            link.once("GET", self.path, arriving.receive, headers=headers, seconds=allowed)
        except BROKEN as error:
            self._failed(arriving, error, allowed)
        except (DilocoError, OSError) as error:
            self._over = self._over or error
        except BaseException as error:
            self._over = self._over or RuntimeError(repr(error))
            raise
        else:
            self._failures = 0
        finally:
            if arriving.count:
                self._gauge.moved(arriving.count, time.monotonic() - began, lanes=lanes)

    def _failed(self, arriving: _Arriving, error: Exception, allowed: float) -> None:
        self._gauge.broke(slow=isinstance(error, httpx.TimeoutException))
        with self._lock:
            if isinstance(error, Damaged):
                self._over = self._over or error.error
                return
            if arriving.left:
                self._gaps.insert(0, arriving.left)
            if arriving.count and self._etag:
                self._failures = 0
                return
            self._failures += 1
            if self._failures >= self._retry.tries:
                elapsed = time.monotonic() - self._began
                self._over = in_words(self._url, error, allowed, self._failures, elapsed)
                return
        asked = error.asked if isinstance(error, RetryLater) else 0.0
        chance = random.random()
        if self._stop.wait(self._retry.pause(self._failures, asked=asked, chance=chance)):
            self._over = in_words(self._url, error, allowed, self._failures, 0.0)


class _Arriving:
    """One range as it comes in."""

    def __init__(
        self, fetch: Download, part: Range, helpers: list[threading.Thread] | None
    ) -> None:
        self._fetch, self._part, self._helpers = fetch, part, helpers
        self.count = 0
        self._asked_at = time.monotonic()
        self.left: Range | None = part if fetch._known else None

    def receive(self, response: httpx.Response) -> None:
        self._fetch._gauge.answered(time.monotonic() - self._asked_at)
        if response.status_code == 206:
            self._begin(response)
            self._fill(response)
        else:
            self._all(response)

    def _begin(self, response: httpx.Response) -> None:
        """Checks that these are the bytes asked for, of the resource the others are of."""
        fetch, (start, stop) = self._fetch, self._part
        etag = response.headers.get("etag", "")
        place = _PLACE.fullmatch(response.headers.get("content-range", ""))
        if place is None or int(place[1]) != start:
            raise WireError(f"{fetch._url} sent another range than the bytes {start}-{stop - 1}.")
        total = int(place[3])
        if not fetch._known:
            if total > fetch._most:
                raise _too_long(fetch)
            fetch._buffer, fetch._etag = fetch._room(total), etag
            stop = min(stop, total)
            fetch._gaps = [(stop, total)] if stop < total else []
            fetch._known = True
            self.left = (start, stop)
            if self._helpers is not None:
                fetch._help(self._helpers)
        elif etag != fetch._etag or total != len(fetch._buffer):
            raise _changed(fetch)

    def _fill(self, response: httpx.Response) -> None:
        assert self.left is not None
        at, stop = self.left
        for piece in response.extensions.get(ARRIVED, response.iter_raw)():
            if at + len(piece) > stop:
                raise WireError(f"{self._fetch._url} sends more than the range it was asked for.")
            self._fetch._buffer[at : at + len(piece)] = piece
            at += len(piece)
            self.count += len(piece)
            self.left = (at, stop) if at < stop else None
        if self.left:
            raise httpx.ReadError(f"{stop - at} bytes are missing")

    def _all(self, response: httpx.Response) -> None:
        """Takes the whole resource from a server that does not send ranges of it."""
        fetch = self._fetch
        if fetch._known:
            raise _changed(fetch)
        found = bytearray()
        for piece in response.iter_raw():
            found += piece
            self.count = len(found)
            if len(found) > fetch._most:
                raise _too_long(fetch)
        fetch._buffer, fetch._gaps, fetch._known = memoryview(found), [], True


def fresh(size: int) -> memoryview:
    """New memory for so many bytes, in large pages where there are any.

    Page by page, the system needs longer to make room for a body than a fast link to fill it.
    """
    if size < HUGE_PAGE_BYTES:
        return memoryview(bytearray(size))
    try:
        made = mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:  # What others call a lack of memory.
        raise MemoryError(f"{size} bytes for a body") from error
    if advice := getattr(mmap, "MADV_HUGEPAGE", None):
        with suppress(OSError):  # A system without them.
            made.madvise(advice)
    return memoryview(made)


def _changed(fetch: Download) -> WireError:
    return WireError(f"{fetch._url}{fetch.path} changed while it was fetched.")


def _too_long(fetch: Download) -> WireError:
    return WireError(
        f"{fetch._url} sends more than the {fetch._most} bytes its answer may have.",
        hint="Is this a diloco server of the same run?",
    )
