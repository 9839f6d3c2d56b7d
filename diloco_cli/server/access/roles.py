"""Authorisation: the caller's role and region against what a call requires.

Without a client certificate there is no connection, but the application never sees whose it
was. The token identifies the caller: it names a role and, for a region, the region.
"""

from __future__ import annotations

import base64
from collections import Counter
from typing import Protocol

from starlette.requests import Request

from diloco_cli.server.access.floods import Flood
from diloco_cli.server.access.tokens import Caller, Role, TokenList
from diloco_cli.server.refusals import HttpRefusal

LONGEST_HEADER = 2048
BAD_CREDENTIALS = (600, 2.0)
"""Of one peer, at once and then per second; more are answered without a look at why."""
REQUESTS_PER_CALLER = 128
"""At once; a worker needs fewer than ten."""


class RestrictedCall(Protocol):
    """A call of the API, and the roles that may make it; without roles, anyone may."""

    @property
    def name(self) -> str: ...
    @property
    def may(self) -> frozenset[Role]: ...


class AccessCheck:
    """Decides who may make which call; without tokens (loopback only), anyone may make any."""

    def __init__(self, tokens: TokenList | None) -> None:
        self._tokens = tokens
        self.met: set[tuple[str, int]] = set()
        """Addresses of authorised clients; `IdleConnections` removes closed ones."""
        self._under_way: Counter[str] = Counter()
        self._bad = Flood(*BAD_CREDENTIALS)

    def check(self, call: RestrictedCall, request: Request) -> Caller | None:
        """Returns the caller, or refuses."""
        if self._tokens is None:
            self._meet(request)
            return None
        if not call.may:
            return None
        caller = self._who(self._tokens, request)
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

    def _who(self, tokens: TokenList, request: Request) -> Caller:
        """Says whose token it is; many bad ones of one peer are told to wait, good ones never."""
        try:
            return tokens.who(presented(request.headers.get("authorization", "")))
        except HttpRefusal as refusal:
            peer = request.client.host if request.client else ""
            if refusal.status == 401 and self._bad.take(peer) is None:
                raise HttpRefusal(
                    "too-many",
                    f"{peer} has shown too many credentials that open nothing.",
                    refusal.hint,
                    headers={"retry-after": "60"},
                ) from None
            raise

    def _count(self, who: str, request: Request) -> None:
        """Limits requests in progress; one that its client abandoned counts until answered."""
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
        """Notes that a counted request is over."""
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
        except ValueError:  # Not base64, or not text.
            return None
    return None
