"""The two HTTP/2 implementations that carry requests: httpx's own, and pyreqwest's.

Both are transports of httpx: they take an `httpx.Request` and return an `httpx.Response` whose
body is still to come. A `Connection` calls its transport directly: `httpx.Client` would add
cookies, redirects, authentication and a log line for each request, none of which is wanted, and
half as much processor time again for a short call.

`PyreqwestTransport` differs from the transport that pyreqwest ships: failures in the middle of a
body are httpx errors, a time-out is reported as one, a connection that broke is not reported as
one that could not be made, the limit on a request is one deadline, closing closes the connection,
the `host` header is left out (HTTP/2 has `:authority`; some proxies answer 400 to both), and
bodies are copied once less in either direction.
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

from diloco_cli.net.credentials import Credentials
from diloco_cli.net.options import Backend, Options, Timeouts

BODY, PIECES = "diloco-body", "diloco-pieces"
"""Extensions for bodies that are not copied: a request's body as it lies in memory, and a
function that yields the pieces of a response as they arrived."""

STREAM_WINDOW_BYTES = 64 << 20
CONNECTION_WINDOW_BYTES = 128 << 20
"""Bytes on the way before an acknowledgement: at 100 ms, 64 MiB are 5 Gbit/s."""

FRAME_BYTES = 1 << 18
SHORT_BYTES = 1 << 16
"""A body whose declared length is at most this is read at once; HTTP lets no server send more
than it declared."""


def make_transport(url: str, backend: Backend, options: Options) -> httpx.BaseTransport:
    """Makes an HTTP/2 transport for `url`; proxy settings of the environment do not apply."""
    tls = url.startswith("https://")
    if backend == "pyreqwest":
        return PyreqwestTransport.connect(options.timeouts, options.credentials, tls=tls)
    return httpx.HTTPTransport(
        http1=tls,  # Over TLS the two sides negotiate a version.
        http2=True,
        # Loading certificates that are not needed takes 50 ms.
        verify=options.credentials.context() if tls else False,
        trust_env=False,
    )


def make_httpx_client(url: str, options: Options) -> httpx.Client:
    """Makes a plain httpx client with our transport and headers, to look at a server's answers."""
    timeouts = options.timeouts
    return httpx.Client(
        base_url=url,
        headers=default_headers(url, options.credentials),
        timeout=httpx.Timeout(timeouts.answer, connect=timeouts.connect),
        transport=make_transport(url, "httpx", options),
        trust_env=False,
    )


def default_headers(url: str, credentials: Credentials) -> dict[str, str]:
    """The headers of every request to `url`; refuses to send a token unencrypted."""
    credentials.check(url)
    # Frames and weights are compressed already or do not compress.
    encoding = {"accept-encoding": "identity"}
    return {"accept": "*/*", **encoding, "user-agent": "diloco", **credentials.headers}


class PyreqwestTransport(SyncHttpxTransport):
    @classmethod
    def connect(
        cls, timeouts: Timeouts, credentials: Credentials, *, tls: bool
    ) -> PyreqwestTransport:
        """Makes a transport that notices by itself when the server is gone."""
        builder = SyncClientBuilder()
        builder = builder.http2(True) if tls else builder.http2_prior_knowledge()
        builder = builder.no_proxy().follow_redirects(False)
        builder = builder.connect_timeout(timedelta(seconds=timeouts.connect))
        builder = builder.gzip(False).deflate(False).brotli(False).zstd(False)
        builder = builder.http2_initial_stream_window_size(STREAM_WINDOW_BYTES)
        builder = builder.http2_initial_connection_window_size(CONNECTION_WINDOW_BYTES)
        builder = builder.http2_max_frame_size(FRAME_BYTES)
        probe = timedelta(seconds=timeouts.probe)
        builder = builder.http2_keep_alive_interval(probe).http2_keep_alive_timeout(2 * probe)
        if tls:
            builder = builder.min_tls_version("TLSv1.3")
        if root := credentials.root_pem:
            builder = builder.add_root_certificate_pem(root)
        if client := credentials.client_pem:
            builder = builder.identity_pem(client)
        return cls(builder.build())

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        # What `super()` does, in fewer steps.
        headers = [pair for pair in request.headers.multi_items() if pair[0] != "host"]
        seconds = request.extensions.get("timeout", {}).get("read")
        try:
            builder = self._client.request(request.method, str(request.url)).headers(headers)
            if seconds:
                builder = builder.timeout(timedelta(seconds=seconds))
            exchange = self._map_body(builder, request).build_streamed()
            response = exchange.__enter__()
        except PyreqwestError as error:
            raise _without_response(error, request) from error
        stream = _Stream(exchange, response, request)
        return httpx.Response(
            response.status,
            headers=list(response.headers.items()),
            stream=stream,
            extensions={PIECES: stream.pieces},
        )

    def _map_body(self, builder: SyncRequestBuilder, request: httpx.Request) -> SyncRequestBuilder:
        body = request.extensions.get(BODY)
        return super()._map_body(builder, request) if body is None else builder.body_bytes(body)

    def close(self) -> None:
        # Closing alone leaves the idle connection open; it ends with the object.
        if client := self.__dict__.pop("_client", None):
            client.close()


class _Stream(httpx.SyncByteStream):
    """A response body whose failures are httpx errors."""

    def __init__(
        self, exchange: SyncStreamRequest, response: SyncResponse, request: httpx.Request
    ) -> None:
        self._exchange, self._reader = exchange, response.body_reader
        self._request, self._length = request, _content_length(request, response)

    def __iter__(self) -> Iterator[bytes]:
        return map(bytes, self.pieces())

    def pieces(self) -> Iterator[memoryview]:
        """The body as it arrived, uncopied."""
        length = 0
        try:
            if self._length is not None and self._length <= SHORT_BYTES:
                yield memoryview(piece := self._reader.bytes())
                length = len(piece)
            else:
                while (piece := self._reader.read_chunk()) is not None:
                    length += len(piece)
                    yield memoryview(piece)
        except PyreqwestError as error:
            raise _translated(error, self._request) from error
        # A stream that the server ended with GOAWAY looks like a complete one.
        if self._length is not None and length < self._length:
            message = f"{length} of {self._length} bytes arrived"
            raise httpx.ReadError(message, request=self._request)

    def close(self) -> None:
        self._exchange.__exit__(None, None, None)


def _content_length(request: httpx.Request, response: SyncResponse) -> int | None:
    """The declared length of the body, if there is a body."""
    header = response.get_header("content-length") or ""
    empty = response.status in (204, 304) or request.method == "HEAD"
    return None if empty or not header.isdecimal() else int(header)


def _without_response(error: PyreqwestError, request: httpx.Request) -> httpx.RequestError:
    """The httpx error for a request that got no response."""
    if isinstance(error, ConnectError):
        kind = httpx.WriteError if _was_connected(error) else httpx.ConnectError
        return kind(error.message, request=request)
    return _translated(error, request)


def _was_connected(error: ConnectError) -> bool:
    """Whether a connection broke while a request was sent; the error's class does not tell."""
    causes = " ".join(str(cause) for cause in (error.details or {}).get("causes") or ())
    # A request whose connection was reset before its first byte counts as cancelled, not as sent.
    return "SendRequest" in causes or "Canceled" in causes


def _translated(error: PyreqwestError, request: httpx.Request) -> httpx.RequestError:
    # Whether the time to connect or the whole deadline ran out is not known.
    kind = httpx.ReadTimeout if isinstance(error, RequestTimeoutError) else httpx.ReadError
    return kind(error.message, request=request)
