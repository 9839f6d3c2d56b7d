"""Bytes to the server and back over HTTP/2, whatever the link does meanwhile.

A call is tried again after a broken connection, a time-out, a body that arrived damaged,
or an answer that says "later" (503, 507): after a pause that doubles and is never quite
the same, or the one the server asked for. An answer that says "no" (4xx) is never asked
for again; it becomes the exception that says what to do about it.

Two transports carry the same `httpx.Client`: httpx's own HTTP/2 for short calls, and
pyreqwest's, which moves large bodies at a third of the processor time, for bulk. Both
speak HTTP/2 with prior knowledge on http:// and pass one conformance suite.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, TypeVar

import httpx
from h2.exceptions import H2Error

from diloco_cli.errors import DilocoError, LinkError, SpecError, WireError
from diloco_cli.net.gauge import Bucket
from diloco_cli.net.identity import NOBODY, Identity, in_handshake
from diloco_cli.net.refusal import MOST_REFUSAL_BYTES, read, refusal
from diloco_cli.wire.messages import parse_error

T = TypeVar("T")

Carrier = Literal["pyreqwest", "httpx"]

LATER = frozenset({502, 503, 504, 507})
"""Answers that decide nothing; everything else is final."""

UPLOAD_BYTES = 1 << 18
"""One piece of an upload. httpx's own HTTP/2 copies what is left of a piece for every frame
it sends, so one piece of 32 MB moves at 10 MB/s; in these pieces at several hundred."""

MOST_WHOLE_BYTES = 32 << 20
"""A file up to this size is read before it is sent, where the transport likes that better."""

WHOLE, ARRIVED = "diloco-body", "diloco-pieces"
"""Extensions for bodies that are not copied: of a request, what is sent; of an answer, a
function that gives its pieces."""

STREAM_WINDOW_BYTES = 64 << 20
CONNECTION_WINDOW_BYTES = 128 << 20
"""Bytes on the way before an acknowledgement: at 100 ms, 64 MiB are 5 Gbit/s."""


@dataclass(frozen=True)
class Timeouts:
    """How long to wait for the other side, in seconds unless said otherwise."""

    connect: float = 5.0
    answer: float = 10.0
    """Between a request and its answer, not counting the time bodies need to travel."""

    slowest_bytes_per_second: float = 128 * 1024
    """A transfer slower than this is given up."""

    probe: float = 10.0
    """Bulk: silence after which a connection is asked whether it is still there."""

    def transfer(self, size: int) -> float:
        """Says how long a body of `size` bytes may take."""
        return self.answer + size / self.slowest_bytes_per_second


@dataclass(frozen=True)
class Retry:
    """How often to try, and how long to wait in between, in seconds."""

    tries: int = 5
    first: float = 0.5
    most: float = 15.0
    most_asked: float = 60.0
    """The longest pause a server may ask for with Retry-After."""

    def pause(self, failures: int, *, asked: float = 0.0, chance: float) -> float:
        """Says how long to wait after so many failures; `chance` is within 0 and 1."""
        # Half of it random: regions that lost the server together must not return together.
        grown = min(self.most, self.first * 2 ** min(failures - 1, 60))
        # Whoever is asked to wait waits a little longer, for the same reason.
        return max(min(asked, self.most_asked) * (1 + 0.5 * chance), grown * (0.5 + 0.5 * chance))


class Later(Exception):
    """The server answered that it cannot answer now."""

    def __init__(self, status: int, asked: float, message: str, hint: str | None) -> None:
        super().__init__(message)
        self.status = status
        self.asked = asked
        self.hint = hint


class Damaged(Exception):
    """The answer came, but what it carried cannot be trusted; `error` says why."""

    def __init__(self, error: WireError) -> None:
        super().__init__(error.message)
        self.error = error


BROKEN = (httpx.RequestError, httpx.StreamError, Later, Damaged)
"""Failures after which the same call may work."""

Body = bytes | memoryview | Path | None
Content = bytes | memoryview | Iterator[bytes] | None


class Link:
    """One connection to one server; use one in each thread."""

    def __init__(
        self,
        url: str,
        *,
        bulk: bool = False,
        carrier: Carrier = "pyreqwest",
        timeouts: Timeouts | None = None,
        retry: Retry | None = None,
        stop: threading.Event | None = None,
        bucket: Bucket | None = None,
        identity: Identity = NOBODY,
    ) -> None:
        """`bucket` limits the rate at which bodies leave."""
        self.url = checked_url(url)
        self.timeouts = timeouts or Timeouts()
        self.retry = retry or Retry()
        self.stop = stop or threading.Event()
        self._bucket = bucket
        # It takes a body as it is; in pieces it would ask Python for each of them.
        self._whole = bulk and carrier == "pyreqwest" and bucket is None
        self._identity = identity
        self._client = make_client(
            self.url, bulk=bulk, carrier=carrier, timeouts=self.timeouts, identity=identity
        )

    def close(self) -> None:
        self._client.close()

    def call(
        self,
        method: str,
        path: str,
        receive: Callable[[httpx.Response], T],
        *,
        body: Body = None,
        headers: dict[str, str] | None = None,
        seconds: float | None = None,
        answers: frozenset[int] = frozenset(),
        retry: Retry | None = None,
        enough: Callable[[Exception], bool] = lambda failure: False,
    ) -> T:
        """Makes one call, again while that makes sense; returns what `receive` makes of the answer.

        `seconds` is how long one try may take; `answers` are refusals that `receive` wants to
        see; `enough` names failures that are not to be tried again. When `stop` is set, waiting
        ends and the last failure is raised.
        """
        retry = retry or self.retry
        allowed = self.timeouts.answer if seconds is None else seconds
        begun = time.monotonic()
        failures = 0
        while True:
            asked = 0.0
            try:
                return self.once(
                    method,
                    path,
                    receive,
                    body=body,
                    headers=headers,
                    seconds=allowed,
                    answers=answers,
                )
            except BROKEN as error:
                failure: Exception = error
                asked = error.asked if isinstance(error, Later) else 0.0
            failures += 1
            pause = retry.pause(failures, asked=asked, chance=random.random())
            if failures >= retry.tries or enough(failure) or self.stop.wait(pause):
                elapsed = time.monotonic() - begun
                raise in_words(self.url, failure, allowed, failures, elapsed) from failure

    def once(
        self,
        method: str,
        path: str,
        receive: Callable[[httpx.Response], T],
        *,
        body: Body = None,
        headers: dict[str, str] | None = None,
        seconds: float | None = None,
        answers: frozenset[int] = frozenset(),
    ) -> T:
        """Makes one call; what a second try could mend is raised as one of `BROKEN`."""
        allowed = self.timeouts.answer if seconds is None else seconds
        try:
            with self._request(method, path, body, headers or {}, allowed) as response:
                return self._received(response, receive, answers)
        except (httpx.NetworkError, httpx.ProtocolError) as error:
            if trouble := in_handshake(self.url, self._identity, error):
                raise trouble from error
            raise

    @contextmanager
    def _request(
        self,
        method: str,
        path: str,
        body: Body,
        headers: dict[str, str],
        allowed: float,
    ) -> Iterator[httpx.Response]:
        timeout = httpx.Timeout(allowed, connect=min(allowed, self.timeouts.connect))
        with self._pieces(body) as (pieces, size):
            sent: dict[str, Any] = {"content": pieces}
            if isinstance(pieces, bytes | memoryview):
                sent = {"extensions": {WHOLE: pieces}}
            if size is not None:
                headers = {**headers, "content-length": str(size)}
            try:
                with self._client.stream(
                    method, path, headers=headers, timeout=timeout, **sent
                ) as response:
                    yield response
            except H2Error as error:
                # After a goodbye (GOAWAY) httpx's own HTTP/2 takes whatever still comes for a
                # fault, and lets the library underneath say so.
                raise httpx.RemoteProtocolError(str(error) or repr(error)) from error

    @contextmanager
    def _pieces(self, body: Body) -> Iterator[tuple[Content, int | None]]:
        """Gives a body as it is best sent, and its length.

        A file is opened anew for every try, and read to its end even if it is replaced meanwhile.
        """
        if body is None:
            yield None, None
        elif isinstance(body, Path):
            with body.open("rb") as file:
                size = os.fstat(file.fileno()).st_size
                if self._whole and size <= MOST_WHOLE_BYTES:
                    yield (data := file.read()), len(data)
                else:
                    yield self._paced(iter(lambda: file.read(self._piece), b"")), size
        elif self._whole:
            yield body, len(body)
        else:
            starts = range(0, len(body), self._piece)
            pieces = (bytes(body[start : start + self._piece]) for start in starts)
            yield self._paced(pieces), len(body)

    @property
    def _piece(self) -> int:
        return self._bucket.piece if self._bucket else UPLOAD_BYTES

    def _paced(self, pieces: Iterator[bytes]) -> Iterator[bytes]:
        for piece in pieces:
            if self._bucket:
                self._bucket.take(len(piece))
            yield piece

    def _received(
        self,
        response: httpx.Response,
        receive: Callable[[httpx.Response], T],
        answers: frozenset[int],
    ) -> T:
        status = response.status_code
        if status in LATER:
            raise _later(self.url, response)
        if not response.is_success and status not in answers:
            raise refusal(self.url, status, read(self.url, response, MOST_REFUSAL_BYTES))
        try:
            return receive(response)
        except WireError as error:
            if not response.is_success:
                raise
            raise Damaged(error) from error

    def stream(self, path: str, *, headers: dict[str, str], silence: float) -> Iterator[str]:
        """Yields the lines of an answer that has no end; not tried again."""
        timeout = httpx.Timeout(silence, connect=self.timeouts.connect)
        try:
            with self._client.stream("GET", path, headers=headers, timeout=timeout) as response:
                if not response.is_success:
                    raise refusal(
                        self.url,
                        response.status_code,
                        read(self.url, response, MOST_REFUSAL_BYTES),
                    )
                yield from response.iter_lines()
        except httpx.RequestError as error:
            trouble = in_handshake(self.url, self._identity, error)
            raise trouble or in_words(self.url, error, silence, 1, 0.0) from error


def make_client(
    url: str,
    *,
    bulk: bool = False,
    carrier: Carrier = "pyreqwest",
    timeouts: Timeouts | None = None,
    identity: Identity = NOBODY,
) -> httpx.Client:
    """Makes an HTTP/2 client for `url`; nothing from the environment changes where it connects."""
    timeouts = timeouts or Timeouts()
    # Frames and weights are compressed already or do not compress.
    headers = {"accept-encoding": "identity", "user-agent": "diloco", **identity.headers}
    identity.check(url)
    timeout = httpx.Timeout(timeouts.answer, connect=timeouts.connect)
    if bulk and carrier == "pyreqwest":
        from diloco_cli.net.bulk import BulkTransport

        transport = BulkTransport.connect(
            prior_knowledge=url.startswith("http://"),
            connect=timedelta(seconds=timeouts.connect),
            probe=timedelta(seconds=timeouts.probe),
            stream_window=STREAM_WINDOW_BYTES,
            connection_window=CONNECTION_WINDOW_BYTES,
            identity=identity,
        )
        return httpx.Client(
            base_url=url, transport=transport, timeout=timeout, headers=headers, trust_env=False
        )
    tls = url.startswith("https://")
    return httpx.Client(
        base_url=url,
        http1=tls,  # On TLS the two sides agree on a version.
        http2=True,
        # Loading certificates that nobody asks for takes 50 ms.
        verify=identity.context() if tls else False,
        timeout=timeout,
        headers=headers,
        trust_env=False,
    )


def checked_url(url: str) -> str:
    """Returns a server's URL without its trailing slash, or says what a URL looks like."""
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL:
        parsed = httpx.URL()
    if parsed.scheme not in ("http", "https") or not parsed.host:
        raise SpecError(
            f"{url!r} is not the URL of a server.",
            hint="It looks like http://127.0.0.1:8080.",
        )
    return url.rstrip("/")


def in_words(
    url: str, failure: Exception, allowed: float, tries: int, elapsed: float
) -> DilocoError:
    """Says why a call failed for good."""
    if isinstance(failure, Damaged):
        return failure.error
    effort = f"{tries} tries over {elapsed:.0f} s" if tries > 1 else "1 try"
    hint = f"Is the server up? Try `diloco status {url}`."
    if isinstance(failure, Later):
        said = f"{url} answered {failure.status}: {failure} ({effort})."
        return LinkError(said, hint=failure.hint or hint)
    if isinstance(failure, httpx.TimeoutException):
        return LinkError(f"{url} did not answer in {allowed:g} s ({effort}).", hint=hint)
    if isinstance(failure, httpx.ConnectError):
        return LinkError(f"{url} cannot be reached: {failure} ({effort}).", hint=hint)
    return LinkError(f"The connection to {url} broke: {failure!r} ({effort}).", hint=hint)


def _later(url: str, response: httpx.Response) -> Later:
    found = parse_error(read(url, response, MOST_REFUSAL_BYTES))
    message = found[0].message if found else response.reason_phrase or "no reason given"
    try:
        asked = max(0.0, float(response.headers.get("retry-after", "0")))
    except ValueError:  # A date: more than we need to know.
        asked = 0.0
    return Later(response.status_code, asked, message.rstrip("."), found[0].hint if found else None)
