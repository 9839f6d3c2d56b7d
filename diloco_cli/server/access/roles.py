"""May they? The caller's role and region against what a call asks for.

The certificate is the gate: without one there is no connection, but the application never
sees whose it was. The token is the identity: it names a role and, for a region, the region.
"""

from __future__ import annotations

import base64
from collections import Counter
from typing import TYPE_CHECKING

from starlette.requests import Request

from diloco_cli.server.access.tokens import Caller, TokenList
from diloco_cli.server.refusals import HttpRefusal

if TYPE_CHECKING:
    from diloco_cli.server.http.calls import Call

LONGEST_HEADER = 2048
REQUESTS_PER_CALLER = 128
"""At once; a worker needs fewer than ten."""


class AccessCheck:
    """Decides who may do what; without a keyring (loopback only) everybody may everything."""

    def __init__(self, keyring: TokenList | None) -> None:
        self._keyring = keyring
        self.met: set[tuple[str, int]] = set()
        """Where those who may are connected from; whoever sweeps removes who is gone."""
        self._under_way: Counter[str] = Counter()

    def check(self, call: Call, request: Request) -> Caller | None:
        """Says who is asking, or denies."""
        if self._keyring is None:
            self._meet(request)
            return None
        if not call.may:
            return None
        caller = self._keyring.who(presented(request.headers.get("authorization", "")))
        request.state.caller = caller
        self._meet(request)
        if caller.role not in call.may:
            raise HttpRefusal(
                "wrong-role",
                f"{caller.role} {caller.name!r} may not make this call ({call.name}).",
                f"It takes one of these roles: {', '.join(sorted(call.may))}.",
            )
        region = request.path_params.get("region")
        if region is not None and region != caller.name:
            raise HttpRefusal(
                "other-region",
                f"This is the credential of region {caller.name!r}, not of {region[:64]!r}.",
                "Each region uses its own folder of certificates and token (--certs).",
            )
        self._count(str(caller), request)
        return caller

    def _count(self, who: str, request: Request) -> None:
        """A request that its client has forgotten still waits for its answer here."""
        if self._under_way[who] >= REQUESTS_PER_CALLER:
            raise HttpRefusal(
                "busy",
                f"{who} has {REQUESTS_PER_CALLER} requests under way, the most it may have.",
                "Ask again when some of them are answered.",
                headers={"retry-after": "2"},
            )
        self._under_way[who] += 1
        request.state.counted = who

    def left(self, who: str | None) -> None:
        """Takes note that a request that was let in is over."""
        if who is not None:
            self._under_way[who] -= 1

    def _meet(self, request: Request) -> None:
        if request.client:
            self.met.add((request.client.host, int(request.client.port)))


def presented(header: str) -> str | None:
    """The token in an Authorization header: Bearer, or Basic with the token as password.

    Basic is for browsers, which cannot be told to send anything else.
    """
    kind, _, value = header[:LONGEST_HEADER].partition(" ")
    value = value.strip()
    if kind.lower() == "bearer":
        return value or None
    if kind.lower() == "basic":
        try:
            return base64.b64decode(value, validate=True).decode().partition(":")[2] or None
        except ValueError:  # No base64, or no text.
            return None
    return None
