"""Short questions to a server: asked once, answered within seconds or not at all."""

from __future__ import annotations

import http.client
import json
import socket
import ssl
from collections.abc import Callable
from typing import TypeVar
from urllib.parse import urlsplit

from diloco_cli.errors import LinkError, WireError
from diloco_cli.net.client import Client
from diloco_cli.net.credentials import NOBODY, Credentials, Untrusted
from diloco_cli.net.options import ONCE, Options, Timeouts
from diloco_cli.observe.status import Status
from diloco_cli.wire import messages

T = TypeVar("T")

LONGEST_ABOUT = 1 << 16
SOON = Timeouts(connect=2.0, answer=5.0)
HINT = "Is the server running, and is this the URL it printed? A tunnel may be down."


class ShortCalls:
    """Asks servers for their status, or to stop; keeps one connection while the URL stays."""

    def __init__(self, credentials: Credentials = NOBODY) -> None:
        self._options = Options(retry=ONCE, timeouts=SOON, credentials=credentials)
        self._client: Client | None = None

    def status(self, url: str) -> Status:
        return self._ask(url, Client.status)

    def stop(self, url: str) -> None:
        self._ask(url, Client.stop)

    def close(self) -> None:
        if self._client:
            self._client.close()
            self._client = None

    def _ask(self, url: str, call: Callable[[Client], T]) -> T:
        if self._client is None or self._client.url != url:
            self.close()
            self._client = Client(url, self._options)
        try:
            return call(self._client)
        except LinkError as error:
            # A connection to a server that died is no use to the one that follows it.
            self.close()
            if isinstance(error, Untrusted):
                raise
            if "not a diloco server" in error.message or _is_another_program(url):
                raise _not_a_server(url) from error
            # A hint to run `diloco status` is of no use to `diloco status`.
            hint = HINT if "diloco status" in (error.hint or "") else error.hint
            if "broke" in error.message and _speaks_tls(url):
                hint = f"It speaks TLS: try https{url.removeprefix('http')}, with --certs FOLDER."
            raise LinkError(error.message, hint=hint) from error
        except WireError as error:
            if _is_another_program(url):
                raise _not_a_server(url) from error
            raise


def _is_another_program(url: str) -> bool:
    """Says whether another program's HTTP server has this address.

    Most of those do not know HTTP/2, so to us they look like a connection that broke.
    """
    host, port = urlsplit(url).hostname, urlsplit(url).port
    if not url.startswith("http://") or host is None:
        return False
    connection = http.client.HTTPConnection(host, port, timeout=SOON.connect)
    try:
        connection.request("GET", messages.RUN)
        document = json.loads(connection.getresponse().read(LONGEST_ABOUT))
    except (OSError, http.client.HTTPException):
        return False
    except ValueError:
        return True
    finally:
        connection.close()
    return not isinstance(document, dict) or not {"run", "error"} & set(document)


def _speaks_tls(url: str) -> bool:
    """Says whether a server that was asked in the clear would rather be asked over TLS."""
    parts = urlsplit(url)
    if parts.scheme != "http":
        return False
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    # Nothing is said on it; who it is matters to the next call.
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    where = (parts.hostname or "", parts.port or 80)
    try:
        with socket.create_connection(where, SOON.connect) as plain, context.wrap_socket(plain):
            return True
    except OSError:
        return False


def _not_a_server(url: str) -> LinkError:
    return LinkError(
        f"What answers at {url} is not a diloco server.",
        hint="Compare the URL with the one that `diloco serve` printed; a proxy or another "
        "program may have its port.",
    )
