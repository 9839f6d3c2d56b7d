"""What puts requests on the line: httpx's own HTTP/2, or pyreqwest's.

Both are transports of httpx: they take an `httpx.Request` and give an `httpx.Response` whose
body is still to come. A link asks its transport directly: `httpx.Client` would do cookies,
redirects, logins and a log line for each request, which nobody here wants, and a short call
would take half as much processor time again.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Literal

import httpx

from diloco_cli.net.credentials import Credentials

Carrier = Literal["pyreqwest", "httpx"]

WHOLE, ARRIVED = "diloco-body", "diloco-pieces"
"""Extensions for bodies that are not copied: of a request, what is sent; of an answer, a
function that gives its pieces."""

STREAM_WINDOW_BYTES = 64 << 20
CONNECTION_WINDOW_BYTES = 128 << 20
"""Bytes on the way before an acknowledgement: at 100 ms, 64 MiB are 5 Gbit/s."""


def make_transport(
    url: str, *, bulk: bool, carrier: Carrier, connect: float, probe: float, identity: Credentials
) -> httpx.BaseTransport:
    """Makes what speaks HTTP/2 with `url`; nothing from the environment changes where it connects.

    `connect` is how long a connection may take to be made, `probe` the silence after which one
    is asked whether it is still there, both in seconds.
    """
    tls = url.startswith("https://")
    if not (bulk and carrier == "pyreqwest"):
        return httpx.HTTPTransport(
            http1=tls,  # On TLS the two sides agree on a version.
            http2=True,
            # Loading certificates that nobody asks for takes 50 ms.
            verify=identity.context() if tls else False,
            trust_env=False,
        )
    from diloco_cli.net.backends import PyreqwestTransport

    return PyreqwestTransport.connect(
        prior_knowledge=not tls,
        connect=timedelta(seconds=connect),
        probe=timedelta(seconds=probe),
        stream_window=STREAM_WINDOW_BYTES,
        connection_window=CONNECTION_WINDOW_BYTES,
        identity=identity,
    )


def standing_headers(url: str, identity: Credentials) -> dict[str, str]:
    """What every request to `url` carries; refuses to say a secret where others can hear it."""
    identity.check(url)
    # Frames and weights are compressed already or do not compress.
    encoding = {"accept-encoding": "identity"}
    return {"accept": "*/*", **encoding, "user-agent": "diloco", **identity.headers}
