"""Short questions to a server: asked once, answered within seconds or not at all."""

from __future__ import annotations

from typing import Any

from diloco_cli.errors import LinkError
from diloco_cli.net.client import Server
from diloco_cli.net.transport import Retry, Timeouts

ONCE = Retry(tries=1)
SOON = Timeouts(connect=2.0, answer=5.0)


class Asking:
    """Asks servers for their status, or to stop; keeps one connection while the URL stays."""

    def __init__(self) -> None:
        self._server: Server | None = None

    def status(self, url: str) -> dict[str, Any]:
        return self._ask(url, "status")

    def stop(self, url: str) -> None:
        self._ask(url, "stop")

    def close(self) -> None:
        if self._server:
            self._server.close()
            self._server = None

    def _ask(self, url: str, what: str) -> dict[str, Any]:
        if self._server is None or self._server.url != url:
            self.close()
            self._server = Server(url, retry=ONCE, timeouts=SOON)
        try:
            return getattr(self._server, what)()
        except LinkError:
            # A connection to a server that died is no use to the one that follows it.
            self.close()
            raise
