"""Calls over HTTP/2 with retries.

A call is retried after a broken connection, a time-out, a body that arrived damaged, or an
answer that says "later" (502, 503, 504, 507): after a random pause that doubles, or the one the
server asked for. A refusal (4xx) is final; it becomes the exception that says what to do.
"""

from __future__ import annotations

import os
import random
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from io import BufferedReader
from pathlib import Path
from typing import TypeVar

import httpx
from h2.exceptions import H2Error

from diloco_cli.errors import DilocoError, LinkError, SpecError, WireError
from diloco_cli.net.backends import BODY, default_headers, make_transport
from diloco_cli.net.credentials import handshake_error
from diloco_cli.net.options import Backend, Options, Retry
from diloco_cli.net.refusal import MOST_REFUSAL_BYTES, read, refusal
from diloco_cli.net.transfer.throttle import Throttle
from diloco_cli.wire.error_bodies import parse_error

T = TypeVar("T")

LATER = frozenset({502, 503, 504, 507})
"""Answers that decide nothing; everything else is final."""

UPLOAD_BYTES = 1 << 18
"""One piece of an upload. httpx's own HTTP/2 copies what is left of a piece for every frame
it sends, so one piece of 32 MB moves at 10 MB/s; in these pieces at several hundred."""

MOST_WHOLE_BYTES = 32 << 20
"""A file up to this size is read before it is sent, if the backend takes bodies whole."""


class RetryLater(Exception):
    """The server answered that it cannot answer now."""

    def __init__(self, status: int, retry_after: float, message: str, hint: str | None) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after = retry_after
        self.hint = hint


class Damaged(Exception):
    """The answer arrived, but its content cannot be trusted; `error` says why."""

    def __init__(self, error: WireError) -> None:
        super().__init__(error.message)
        self.error = error


RETRYABLE = (httpx.RequestError, httpx.StreamError, RetryLater, Damaged)
"""Failures after which the same call may work."""

Body = bytes | memoryview | Path | None
Source = bytes | memoryview | BufferedReader


class Connection:
    """One connection to one server; use one in each thread."""

    def __init__(
        self,
        url: str,
        options: Options,
        backend: Backend,
        *,
        stop: threading.Event | None = None,
        throttle: Throttle | None = None,
    ) -> None:
        """Opens no connection yet. `throttle` limits the rate at which bodies are sent."""
        self.url = checked_url(url)
        self.timeouts, self.retry = options.timeouts, options.retry
        self.stop = stop or threading.Event()
        self.throttle = throttle
        # pyreqwest takes a body as it is; in pieces it would call Python for each of them.
        self._takes_whole = backend == "pyreqwest" and throttle is None
        self._credentials = options.credentials
        self._headers = default_headers(self.url, options.credentials)
        self._closed = False
        self._transport = make_transport(self.url, backend, options)

    def close(self) -> None:
        self._closed = True
        self._transport.close()

    def _send(self, request: httpx.Request) -> httpx.Response:
        if self._closed:  # One of the backends would open another connection.
            raise RuntimeError(f"The connection to {self.url} is closed.")
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
        final: Callable[[Exception], bool] = lambda failure: False,
    ) -> T:
        """Makes one call, with retries, and returns what `receive` makes of the answer.

        `seconds` is how long one try may take; `answers` are refusals that `receive` handles
        itself; `final` picks failures that are not retried. When `stop` is set, waiting ends and
        the last failure is raised.
        """
        retry = retry or self.retry
        allowed = self.timeouts.answer if seconds is None else seconds
        begun = time.monotonic()
        failures = 0
        while True:
            retry_after = 0.0
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
            except RETRYABLE as error:
                failure: Exception = error
                retry_after = error.retry_after if isinstance(error, RetryLater) else 0.0
            failures += 1
            pause = retry.pause(failures, retry_after=retry_after, chance=random.random())
            if failures >= retry.tries or final(failure) or self.stop.wait(pause):
                elapsed = time.monotonic() - begun
                raise link_error(self.url, failure, allowed, failures, elapsed) from failure

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
        """Makes one call; a failure that a retry may mend is one of `RETRYABLE`."""
        allowed = self.timeouts.answer if seconds is None else seconds
        # Opened anew for every try, and read to its end even if it is replaced meanwhile.
        source = body.open("rb") if isinstance(body, Path) else body
        try:
            request = self._request(method, path, source, headers or {}, allowed)
            return self._exchange(request, partial(self._received, receive, answers))
        except (httpx.NetworkError, httpx.ProtocolError) as error:
            if reason := handshake_error(self.url, self._credentials, error):
                raise reason from error
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
            # After GOAWAY, httpx's HTTP/2 takes whatever still arrives for a protocol error, which
            # it does not translate.
            raise httpx.RemoteProtocolError(str(error) or repr(error)) from error

    def _request(
        self, method: str, path: str, body: Source | None, headers: dict[str, str], allowed: float
    ) -> httpx.Request:
        limits = httpx.Timeout(allowed, connect=min(allowed, self.timeouts.connect)).as_dict()
        extensions: dict[str, object] = {"timeout": limits}
        headers, content = {**self._headers, **headers}, None
        if body is not None:
            size = _size(body)
            if self._takes_whole and size <= MOST_WHOLE_BYTES and isinstance(body, BufferedReader):
                size = len(body := body.read())
            if self._takes_whole and not isinstance(body, BufferedReader):
                extensions[BODY] = body
            else:
                content = self._throttled(body)
            headers["content-length"] = str(size)
        return httpx.Request(
            method, self.url + path, headers=headers, content=content, extensions=extensions
        )

    def _throttled(self, body: Source) -> Iterator[bytes]:
        """Yields a body in pieces, no faster than the throttle lets them pass."""
        most = self.throttle.piece if self.throttle else UPLOAD_BYTES
        if isinstance(body, BufferedReader):
            pieces = iter(lambda: body.read(most), b"")
        else:
            pieces = (bytes(body[at : at + most]) for at in range(0, len(body), most))
        for piece in pieces:
            if self.throttle:
                self.throttle.take(len(piece))
            yield piece

    def _received(
        self,
        receive: Callable[[httpx.Response], T],
        answers: frozenset[int],
        response: httpx.Response,
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
        quoted = str(parsed.copy_with(userinfo=b"")) if parsed.userinfo else url
        raise SpecError(
            f"{quoted!r} is not the URL of a server.",
            hint="It looks like http://127.0.0.1:8080.",
        )
    if parsed.userinfo:
        raise SpecError(
            f"The URL of {parsed.host} has a name or a password in it, which no server asks for.",
            hint="Who may do what is said by certificates and tokens: --certs.",
        )
    return url.rstrip("/")


NO_TLS = ("WRONG_VERSION_NUMBER", "InvalidContentType")
"""How OpenSSL and rustls report an answer that is not TLS."""


def link_error(
    url: str, failure: Exception, allowed: float, tries: int, elapsed: float
) -> DilocoError:
    """Says why a call failed for good."""
    if isinstance(failure, Damaged):
        return failure.error
    effort = f"{tries} tries over {elapsed:.0f} s" if tries > 1 else "1 try"
    hint = f"Is the server up? Try `diloco status {url}`."
    if any(sign in str(failure) for sign in NO_TLS):
        hint = f"What answers there does not speak TLS: is it http{url.removeprefix('https')}?"
    if isinstance(failure, RetryLater):
        message = f"{url} answered {failure.status}: {failure} ({effort})."
        return LinkError(message, hint=failure.hint or hint)
    if isinstance(failure, httpx.TimeoutException):
        return LinkError(f"{url} did not answer in {allowed:g} s ({effort}).", hint=hint)
    if isinstance(failure, httpx.ConnectError):
        return LinkError(f"{url} cannot be reached: {failure} ({effort}).", hint=hint)
    return LinkError(f"The connection to {url} broke: {failure!r} ({effort}).", hint=hint)


def _later(url: str, response: httpx.Response) -> RetryLater:
    parsed = parse_error(read(url, response, MOST_REFUSAL_BYTES))
    message = parsed[0].message if parsed else response.reason_phrase or "no reason given"
    try:
        retry_after = max(0.0, float(response.headers.get("retry-after", "0")))
    except ValueError:  # A date, which our servers do not send.
        retry_after = 0.0
    return RetryLater(
        response.status_code, retry_after, message.rstrip("."), parsed[0].hint if parsed else None
    )
