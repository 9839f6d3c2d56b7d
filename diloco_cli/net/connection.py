"""Bytes to the server and back over HTTP/2, whatever the link does meanwhile.

A call is tried again after a broken connection, a time-out, a body that arrived damaged,
or an answer that says "later" (503, 507): after a pause that doubles and is never quite
the same, or the one the server asked for. An answer that says "no" (4xx) is never asked
for again; it becomes the exception that says what to do about it.

Two transports carry the same `httpx.Request`: httpx's own HTTP/2 for short calls, and
pyreqwest's, which moves large bodies at a third of the processor time, for bulk. Both
speak HTTP/2 with prior knowledge on http:// and pass one conformance suite.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any, TypeVar

import httpx
from h2.exceptions import H2Error

from diloco_cli.errors import DilocoError, LinkError, SpecError, WireError
from diloco_cli.net.carriers import ARRIVED, WHOLE, Carrier, make_transport, standing_headers
from diloco_cli.net.credentials import NOBODY, Credentials, in_handshake
from diloco_cli.net.refusal import MOST_REFUSAL_BYTES, read, refusal
from diloco_cli.net.transfer.throughput import Throttle
from diloco_cli.wire.messages import parse_error

__all__ = ["ARRIVED", "BROKEN", "Carrier", "Connection", "Retry", "Timeouts", "checked_url"]

T = TypeVar("T")

LATER = frozenset({502, 503, 504, 507})
"""Answers that decide nothing; everything else is final."""

UPLOAD_BYTES = 1 << 18
"""One piece of an upload. httpx's own HTTP/2 copies what is left of a piece for every frame
it sends, so one piece of 32 MB moves at 10 MB/s; in these pieces at several hundred."""

MOST_WHOLE_BYTES = 32 << 20
"""A file up to this size is read before it is sent, where the transport likes that better."""


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


class RetryLater(Exception):
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


BROKEN = (httpx.RequestError, httpx.StreamError, RetryLater, Damaged)
"""Failures after which the same call may work."""

Body = bytes | memoryview | Path | None
Source = bytes | memoryview | BufferedReader


class Connection:
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
        bucket: Throttle | None = None,
        identity: Credentials = NOBODY,
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
        self._headers = standing_headers(self.url, identity)
        self._closed = False
        self._transport = make_transport(
            self.url,
            bulk=bulk,
            carrier=carrier,
            connect=self.timeouts.connect,
            probe=self.timeouts.probe,
            identity=identity,
        )

    def close(self) -> None:
        self._closed = True
        self._transport.close()

    def _send(self, request: httpx.Request) -> httpx.Response:
        if self._closed:  # One of the transports would open another connection.
            raise RuntimeError(f"The link to {self.url} is closed.")
        return self._transport.handle_request(request)

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
                asked = error.asked if isinstance(error, RetryLater) else 0.0
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
        # Opened anew for every try, and read to its end even if it is replaced meanwhile.
        source = body.open("rb") if isinstance(body, Path) else body
        try:
            request = self._request(method, path, source, headers or {}, allowed)
            return self._exchange(request, lambda found: self._received(found, receive, answers))
        except (httpx.NetworkError, httpx.ProtocolError) as error:
            if trouble := in_handshake(self.url, self._identity, error):
                raise trouble from error
            raise
        finally:
            if isinstance(source, BufferedReader):
                source.close()

    def _exchange(self, request: httpx.Request, receive: Callable[[httpx.Response], T]) -> T:
        try:
            response = self._send(request)
            try:
                return receive(response)
            finally:
                response.close()
        except H2Error as error:
            # After a goodbye (GOAWAY) httpx's own HTTP/2 takes whatever still comes for a
            # fault, and lets the library underneath say so.
            raise httpx.RemoteProtocolError(str(error) or repr(error)) from error

    def _request(
        self, method: str, path: str, body: Source | None, headers: dict[str, str], allowed: float
    ) -> httpx.Request:
        limits = httpx.Timeout(allowed, connect=min(allowed, self.timeouts.connect)).as_dict()
        extensions: dict[str, Any] = {"timeout": limits}
        headers, content = {**self._headers, **headers}, None
        if body is not None:
            size = _size(body)
            if self._whole and size <= MOST_WHOLE_BYTES and isinstance(body, BufferedReader):
                size = len(body := body.read())
            if self._whole and not isinstance(body, BufferedReader):
                extensions[WHOLE] = body
            else:
                content = self._paced(body)
            headers["content-length"] = str(size)
        return httpx.Request(
            method, self.url + path, headers=headers, content=content, extensions=extensions
        )

    def _paced(self, body: Source) -> Iterator[bytes]:
        """Gives a body in pieces, at the rate that is allowed."""
        most = self._bucket.piece if self._bucket else UPLOAD_BYTES
        if isinstance(body, BufferedReader):
            pieces = iter(lambda: body.read(most), b"")
        else:
            pieces = (bytes(body[at : at + most]) for at in range(0, len(body), most))
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
        request = self._request("GET", path, None, headers, silence)
        try:
            response = self._send(request)
            try:
                if not response.is_success:
                    said = read(self.url, response, MOST_REFUSAL_BYTES)
                    raise refusal(self.url, response.status_code, said)
                yield from response.iter_lines()
            finally:
                response.close()
        except httpx.RequestError as error:
            trouble = in_handshake(self.url, self._identity, error)
            raise trouble or in_words(self.url, error, silence, 1, 0.0) from error


def make_client(url: str, *, timeouts: Timeouts, identity: Credentials = NOBODY) -> httpx.Client:
    """Makes a client for looking at a server, on httpx's own HTTP/2."""
    return httpx.Client(
        base_url=url,
        headers=standing_headers(url, identity),
        timeout=httpx.Timeout(timeouts.answer, connect=timeouts.connect),
        transport=make_transport(
            url,
            bulk=False,
            carrier="httpx",
            connect=timeouts.connect,
            probe=timeouts.probe,
            identity=identity,
        ),
        trust_env=False,
    )


def _size(body: Source) -> int:
    return os.fstat(body.fileno()).st_size if isinstance(body, BufferedReader) else len(body)


def checked_url(url: str) -> str:
    """Returns a server's URL without its trailing slash, or says what a URL looks like."""
    try:
        parsed = httpx.URL(url)
    except httpx.InvalidURL:
        parsed = httpx.URL()
    port = parsed.port if parsed.port is not None else 1
    if parsed.scheme not in ("http", "https") or not parsed.host or not 0 < port < 1 << 16:
        raise SpecError(
            f"{url!r} is not the URL of a server.",
            hint="It looks like http://127.0.0.1:8080.",
        )
    if parsed.userinfo:
        raise SpecError(
            f"The URL of {parsed.host} has a name or a password in it, which no server asks for.",
            hint="Who may do what is said by certificates and tokens: --certs.",
        )
    return url.rstrip("/")


NO_TLS = ("WRONG_VERSION_NUMBER", "InvalidContentType")
"""How OpenSSL and rustls call an answer in the clear."""


def in_words(
    url: str, failure: Exception, allowed: float, tries: int, elapsed: float
) -> DilocoError:
    """Says why a call failed for good."""
    if isinstance(failure, Damaged):
        return failure.error
    effort = f"{tries} tries over {elapsed:.0f} s" if tries > 1 else "1 try"
    hint = f"Is the server up? Try `diloco status {url}`."
    if any(words in str(failure) for words in NO_TLS):
        hint = f"What answers there does not speak TLS: is it http{url.removeprefix('https')}?"
    if isinstance(failure, RetryLater):
        said = f"{url} answered {failure.status}: {failure} ({effort})."
        return LinkError(said, hint=failure.hint or hint)
    if isinstance(failure, httpx.TimeoutException):
        return LinkError(f"{url} did not answer in {allowed:g} s ({effort}).", hint=hint)
    if isinstance(failure, httpx.ConnectError):
        return LinkError(f"{url} cannot be reached: {failure} ({effort}).", hint=hint)
    return LinkError(f"The connection to {url} broke: {failure!r} ({effort}).", hint=hint)


def _later(url: str, response: httpx.Response) -> RetryLater:
    found = parse_error(read(url, response, MOST_REFUSAL_BYTES))
    message = found[0].message if found else response.reason_phrase or "no reason given"
    try:
        asked = max(0.0, float(response.headers.get("retry-after", "0")))
    except ValueError:  # A date: more than we need to know.
        asked = 0.0
    return RetryLater(
        response.status_code, asked, message.rstrip("."), found[0].hint if found else None
    )
