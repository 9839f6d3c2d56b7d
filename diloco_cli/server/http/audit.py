"""Who took what, who brought what, who was turned away: one JSON line each.

    {"time": …, "who": "upload:paris", "peer": "203.0.113.7", "call": "contribute",
     "path": "/v1/fragments/0/contributions/paris/3-4", "status": 201, "outcome": "accepted",
     "code": null, "bytes_in": 103412, "bytes_out": 74, "digest": "9f…", "range": null}

The files are 0600, never longer than `MOST_BYTES` each, and the oldest of `KEPT` goes when a
new one is begun. They hold no token, no key and no weight.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import time
from contextlib import suppress
from functools import partial
from io import TextIOWrapper
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Any

from starlette.types import Message, Scope, Send

from diloco_cli.server.access.floods import Flood
from diloco_cli.server.intake.body import LimitedReceive

log = logging.getLogger(__name__)

MOST_BYTES = 8 << 20
KEPT = 8
LONGEST = 200
TURNED_AWAY = (200, 1 / 30)
"""Lines about one peer that was turned away, at once and then per second: whoever is refused on
and on must not push out what the others did. The next line says how many were left out."""

ITEMS = frozenset({"join", "contribute", "contribute_part", "version", "weights", "stop"})
"""Calls of which every answer is written down; of the others, only what was not allowed."""

DOWNLOADS = frozenset({"version", "weights"})
_OWNER_ONLY = partial(os.open, mode=0o600)


class Audit(RotatingFileHandler):
    """Appends to one file and begins the next when it is full."""

    def __init__(self, path: Path, *, most: int = MOST_BYTES, kept: int = KEPT) -> None:
        super().__init__(path, maxBytes=most, backupCount=kept - 1, encoding="utf-8", delay=True)
        self._failure: OSError | None = None
        self.turned_away = Flood(*TURNED_AWAY)

    def write(self, **facts: Any) -> None:
        """Adds a line; a disk that refuses it is said once and stops nobody."""
        line = json.dumps({"time": round(time.time(), 3), **facts})
        self.handle(logging.makeLogRecord({"msg": line}))

    def emit(self, record: logging.LogRecord) -> None:
        before, self._failure = self._failure, None
        super().emit(record)
        if self._failure and not before:
            why = self._failure.strerror
            log.warning(f"{self.baseFilename} cannot be written: {why}; going on without it")

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exception()
        if not isinstance(error, OSError):
            raise
        self._failure = error
        if self.stream:  # The next line opens the file again.
            with suppress(OSError):
                self.stream.close()
            self.stream = None

    def _open(self) -> TextIOWrapper:
        return open(self.baseFilename, "a", encoding="utf-8", opener=_OWNER_ONLY)


class Watched:
    """One request on its way through: what came in, what went out, how it ended."""

    def __init__(self, scope: Scope, incoming: LimitedReceive, send: Send) -> None:
        self._scope, self._incoming, self._send = scope, incoming, send
        self._out = self.status = 0
        # A server may hand the same dictionary to every request.
        self.state: dict[str, Any] = {}
        scope["state"] = self.state

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
        await self._send(message)
        self._out += len(message.get("body", b""))

    def note(self, audit: Audit) -> None:
        """Writes the line, if this is something to write down."""
        call, status = self.state.get("call", ""), self.status
        if call not in ITEMS and status not in (401, 403, 429):
            return
        client = self._scope.get("client") or ("", 0)
        held_back: int | None = 0
        if status in (401, 403, 429):
            held_back = audit.turned_away.take(str(client[0]))
            if held_back is None:
                return
        beside = {"held_back": held_back} if held_back else {}
        audit.write(
            who=str(self.state.get("caller") or "nobody"),
            peer=str(client[0]),
            call=call,
            path=str(self._scope.get("path", ""))[:LONGEST],
            status=status or None,
            outcome=self._outcome(call, status),
            code=self.state.get("code"),
            bytes_in=self._incoming.received,
            bytes_out=self._out,
            digest=self.state.get("digest"),
            range=self.state.get("range"),
            **beside,
        )

    @staticmethod
    def _outcome(call: str, status: int) -> str:
        if status == 0:
            return "broken off"
        if status >= 400:
            return "refused"
        return "downloaded" if call in DOWNLOADS else "accepted"
