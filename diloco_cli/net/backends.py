"""pyreqwest's HTTP/2 as a transport of httpx, with its edges filed off.

What differs from the transport as it ships: failures in the middle of a body arrive as
httpx errors, a time-out is called one, a connection that broke is not called one that
could not be made, the limit on a request is one deadline, closing closes the connection,
the `host` header stays away (HTTP/2 says it in `:authority`; some proxies answer 400 to
both), and a body is copied once less on either way: a part is sent from where it lies, and
what arrives can be had as it arrived.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta

import httpx
from pyreqwest.client import SyncClientBuilder
from pyreqwest.compatibility.httpx import SyncHttpxTransport
from pyreqwest.exceptions import ConnectError, PyreqwestError, RequestTimeoutError
from pyreqwest.request import SyncRequestBuilder, SyncStreamRequest
from pyreqwest.response import SyncResponse

from diloco_cli.net.carriers import ARRIVED, WHOLE
from diloco_cli.net.credentials import NOBODY, Credentials

FRAME_BYTES = 1 << 18
SHORT_BYTES = 1 << 16
"""A body said to be no longer is taken in one go; HTTP lets no server send more than it said."""


class PyreqwestTransport(SyncHttpxTransport):
    @classmethod
    def connect(
        cls,
        *,
        prior_knowledge: bool,
        connect: timedelta,
        probe: timedelta,
        stream_window: int,
        connection_window: int,
        identity: Credentials = NOBODY,
    ) -> PyreqwestTransport:
        """Makes a transport that notices by itself when the other end is gone."""
        builder = SyncClientBuilder()
        builder = builder.http2_prior_knowledge() if prior_knowledge else builder.http2(True)
        builder = builder.no_proxy().follow_redirects(False).connect_timeout(connect)
        builder = builder.gzip(False).deflate(False).brotli(False).zstd(False)
        builder = builder.http2_initial_stream_window_size(stream_window)
        builder = builder.http2_initial_connection_window_size(connection_window)
        builder = builder.http2_max_frame_size(FRAME_BYTES)
        builder = builder.http2_keep_alive_interval(probe).http2_keep_alive_timeout(2 * probe)
        if not prior_knowledge:
            builder = builder.min_tls_version("TLSv1.3")
        if root := identity.root_pem:
            builder = builder.add_root_certificate_pem(root)
        if own := identity.own_pem:
            builder = builder.identity_pem(own)
        return cls(builder.build())

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        # What `super()` does, in fewer steps.
        headers = [pair for pair in request.headers.multi_items() if pair[0] != "host"]
        seconds = request.extensions.get("timeout", {}).get("read")
        try:
            builder = self._client.request(request.method, str(request.url)).headers(headers)
            if seconds:
                builder = builder.timeout(timedelta(seconds=seconds))
            sending = self._map_body(builder, request).build_streamed()
            found = sending.__enter__()
        except PyreqwestError as error:
            raise _unanswered(error, request) from error
        stream = _Stream(sending, found, request)
        return httpx.Response(
            found.status,
            headers=list(found.headers.items()),
            stream=stream,
            extensions={ARRIVED: stream.views},
        )

    def _map_body(self, builder: SyncRequestBuilder, request: httpx.Request) -> SyncRequestBuilder:
        body = request.extensions.get(WHOLE)
        return super()._map_body(builder, request) if body is None else builder.body_bytes(body)

    def close(self) -> None:
        # Closing alone leaves the idle connection open; it ends with the object.
        if client := self.__dict__.pop("_client", None):
            client.close()


class _Stream(httpx.SyncByteStream):
    """A body whose failures are httpx errors."""

    def __init__(
        self, sending: SyncStreamRequest, response: SyncResponse, request: httpx.Request
    ) -> None:
        self._sending, self._reader = sending, response.body_reader
        self._request, self._length = request, _length(request, response)

    def __iter__(self) -> Iterator[bytes]:
        return map(bytes, self.views())

    def views(self) -> Iterator[memoryview]:
        """The pieces as they arrived, each where it was put."""
        found = 0
        try:
            if self._length is not None and self._length <= SHORT_BYTES:
                yield memoryview(piece := self._reader.bytes())
                found = len(piece)
            else:
                while (piece := self._reader.read_chunk()) is not None:
                    found += len(piece)
                    yield memoryview(piece)
        except PyreqwestError as error:
            raise _translated(error, self._request) from error
        # A stream that a server gives up with a goodbye ends here like one that is complete.
        if self._length is not None and found < self._length:
            said = f"{found} of {self._length} bytes arrived"
            raise httpx.ReadError(said, request=self._request)

    def close(self) -> None:
        self._sending.__exit__(None, None, None)


def _length(request: httpx.Request, response: SyncResponse) -> int | None:
    """How long the body is said to be, where there is one."""
    said = response.get_header("content-length") or ""
    bare = response.status in (204, 304) or request.method == "HEAD"
    return None if bare or not said.isdecimal() else int(said)


def _unanswered(error: PyreqwestError, request: httpx.Request) -> httpx.RequestError:
    """Why there is no answer."""
    if isinstance(error, ConnectError):
        kind = httpx.WriteError if _was_connected(error) else httpx.ConnectError
        return kind(error.message, request=request)
    return _translated(error, request)


def _was_connected(error: ConnectError) -> bool:
    """Whether it is a connection that broke while a request was sent; the name tells nothing."""
    causes = " ".join(str(cause) for cause in (error.details or {}).get("causes") or ())
    # Reset before the first byte was taken, a request counts as cancelled, not as sent.
    return "SendRequest" in causes or "Canceled" in causes


def _translated(error: PyreqwestError, request: httpx.Request) -> httpx.RequestError:
    # What ran out may be the time for connecting or the deadline; a time-out is all we know.
    kind = httpx.ReadTimeout if isinstance(error, RequestTimeoutError) else httpx.ReadError
    return kind(error.message, request=request)
