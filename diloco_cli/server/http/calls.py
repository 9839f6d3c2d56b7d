"""The calls of the API, each described once: the table makes the routes and `/openapi.json`."""

from __future__ import annotations

import re
from collections.abc import Awaitable
from dataclasses import dataclass, field
from typing import Protocol

from starlette.requests import Request
from starlette.responses import Response

from diloco_cli.server.access.tokens import ROLES, Role
from diloco_cli.server.http.handlers import Routes
from diloco_cli.wire import messages
from diloco_cli.wire.messages import LONG_POLL_SECONDS, WIRE_VERSION, JsonObject


class Handler(Protocol):
    """A method of `Routes`."""

    __name__: str

    def __call__(self, routes: Routes, request: Request, /) -> Awaitable[Response]: ...


@dataclass(frozen=True)
class Call:
    """One call: where it is, what it does, what it may answer."""

    handler: Handler
    method: str
    path: str
    does: str
    answers: dict[int, str]
    may: frozenset[Role] = field(kw_only=True)
    """The roles that may make it, where there are tokens; without roles, anyone may."""
    query: dict[str, str] | None = None
    sends: str = ""
    """Media type of the request's body."""
    message: type[messages.Message] | None = None
    """What a JSON body has to be."""
    gives: str = "application/json"
    region: bool = False
    """Made by a region: must name the run and the wire version."""
    epoch: bool = False
    """Must name the region's epoch."""
    wire: bool = False
    """Must name the wire version. A page in somebody's browser can send a POST to this
    server, but not with a header of its own."""

    @property
    def name(self) -> str:
        return self.handler.__name__

    @property
    def pattern(self) -> str:
        """The path without the kinds of its parameters."""
        return re.sub(r":\w+}", "}", self.path)

    @property
    def every_answer(self) -> dict[int, str]:
        return {**self.answers, **NOT_ALLOWED, **self.answers} if self.may else self.answers


_WAITS = f"seconds to wait for it, at most {LONG_POLL_SECONDS:g} by default and 60 at all"
_FRAME = "application/octet-stream"
_JSON = "application/json"

_ANYBODY: frozenset[Role] = frozenset()
_REGION: frozenset[Role] = frozenset({"upload"})
_ALL: frozenset[Role] = frozenset(ROLES)
_READERS: frozenset[Role] = frozenset({"read", "admin"})
_ADMIN: frozenset[Role] = frozenset({"admin"})

NOT_ALLOWED = {
    401: "no credential, or one that is unknown, expired or revoked",
    403: "a credential of another region, or of a role that may not",
    429: "too many credentials that open nothing from one address",
}
"""What a call may answer besides, where there are credentials."""

CALLS = (
    Call(
        Routes.about,
        "GET",
        messages.RUN,
        "Says which run this is and what every region must share.",
        {200: "run id, digests, wire version, sizes of the fragments, shared settings"},
        may=_ALL,
    ),
    Call(
        Routes.join,
        "POST",
        messages.JOIN,
        "Takes the lease of a region.",
        {
            200: "the news, the epoch, and the largest clock decided for the region",
            403: "another region's credential, or of a role that may not; retired: it was removed; "
            "name-taken",
            409: "held, too-soon, older-copy, other-run, other-spec, unknown-region, full",
            426: "another wire version",
        },
        sends=_JSON,
        message=messages.Join,
        region=True,
        may=_REGION,
    ),
    Call(
        Routes.heartbeat,
        "POST",
        messages.HEARTBEAT,
        "Renews the lease and reports how the region is doing.",
        {
            200: "the news: versions, open calls, fates of the region's contributions",
            409: "server-behind: the region has seen versions this server never published",
            412: "fenced: another worker speaks for the region",
        },
        sends=_JSON,
        message=messages.Heartbeat,
        region=True,
        may=_REGION,
    ),
    Call(
        Routes.calls,
        "GET",
        messages.CALLS,
        "Waits for news.",
        {200: "the news", 204: "nothing new in time", 412: "fenced"},
        {"after": "number `n` of the last news", "epoch": "from the join", "wait": _WAITS},
        region=True,
        may=_REGION,
    ),
    Call(
        Routes.contribute,
        "PUT",
        messages.CONTRIBUTION,
        "Hands over a contribution; the same frame again gets the same answer.",
        {
            201: "accepted: durable, merged with its round",
            200: "decided before; the recorded answer",
            400: "damaged: send it again",
            409: "returned (keep the work, send it later) or foreign (drop it); server-behind; "
            "incomplete: parts are missing",
            412: "fenced",
            413: "too large for this fragment",
            422: "refused: unfit to merge, drop it; or not what the URL says",
            503: "busy or closing: try again after Retry-After",
            507: "no room on the server's disk: try again later",
        },
        sends=_FRAME,
        region=True,
        epoch=True,
        may=_REGION,
    ),
    Call(
        Routes.parts,
        "GET",
        messages.PARTS,
        "Says which bytes of a contribution are there already.",
        {200: "ranges of bytes, and whether the frame is decided", 412: "fenced"},
        {"frame": "digest of the whole frame"},
        region=True,
        epoch=True,
        may=_REGION,
    ),
    Call(
        Routes.contribute_part,
        "PUT",
        messages.PART,
        "Hands over the bytes from `start` on; the PUT of the contribution itself, with the "
        "frame's digest in `diloco-parts` and no body, then has it decided.",
        {
            200: "there, and what else is",
            400: "damaged: send it again",
            409: "conflict: other bytes are in that place, or a newer frame is on its way",
            412: "fenced",
            413: "too large for this fragment",
            503: "busy or closing: try again after Retry-After",
            507: "no room on the server's disk: try again later",
        },
        {
            "size": "of the whole frame",
            "frame": "digest of the whole frame",
            "digest": "of this part, as `crc32:` and eight hexadecimal digits",
        },
        sends=_FRAME,
        region=True,
        epoch=True,
        may=_REGION,
    ),
    Call(
        Routes.fragment,
        "GET",
        messages.FRAGMENT,
        "Waits for a version newer than `after`.",
        {200: "version, members, merged digests, links", 204: "nothing newer in time"},
        {"after": "newest version one has; -1 answers at once", "wait": _WAITS},
        may=_ALL,
    ),
    Call(
        Routes.version,
        "GET",
        messages.VERSION,
        "Gives one version of a fragment: the whole frame, or the deltas that lead to it.",
        {
            200: "the frame, or the chain of deltas; immutable",
            206: "the part asked for with Range",
            304: "not changed",
            404: "not published yet",
            410: "no longer kept, or longer than the whole version: take that",
            416: "a range beyond the end",
        },
        {"from": "version to start from, for the chain of deltas"},
        gives=_FRAME,
        may=_ALL,
    ),
    Call(
        Routes.weights,
        "GET",
        messages.WEIGHTS,
        "Gives the whole model as safetensors, all fragments at one clock.",
        {
            200: "the file",
            206: "the part asked for with Range; the etag names the versions",
            304: "not changed",
            404: "not published yet",
            410: "no longer kept",
            416: "a range beyond the end",
            503: "busy: too many of these are being sent; try again after Retry-After",
        },
        {
            "version": "every fragment at this version; the newest of each when left out",
            "ema": "1: the average that `outer.ema` keeps of the published weights, the newest; "
            "of regions, only the one that evaluates may ask, and only for this",
        },
        gives=_FRAME,
        may=_ALL,
    ),
    Call(
        Routes.status,
        "GET",
        messages.STATUS,
        "Says how the run is.",
        {200: "the status document"},
        may=_ALL,
    ),
    Call(
        Routes.events,
        "GET",
        messages.EVENTS,
        "Streams the run log; resumable with Last-Event-ID.",
        {200: "server-sent events"},
        {"after": "id to start after, instead of Last-Event-ID; 0 for all that are kept"},
        gives="text/event-stream",
        may=_READERS,
    ),
    Call(
        Routes.history,
        "GET",
        messages.HISTORY,
        "Gives the curves of the run, its evaluations and its last rounds.",
        {200: "means over equal spans of time, in columns; null where nothing is known"},
        {
            "from": "seconds since the run began; 0 for the whole run",
            "points": "most points of a curve",
            "round": "number of the last round that is known",
        },
        may=_ALL,
    ),
    Call(
        Routes.stop,
        "POST",
        messages.STOP,
        "Stops the whole run gracefully; it can be resumed.",
        {202: "regions are being told", 426: "another wire version, or none named"},
        wire=True,
        may=_ADMIN,
    ),
    Call(
        Routes.amend,
        "POST",
        messages.AMENDMENTS,
        "Changes settings of a run that has begun; the same id again gets the same answer.",
        {
            201: "on record, and in force",
            200: "made before, nothing to change, or a dry run: what it is",
            409: "terms-changed: somebody else amended the run first; "
            "unconfirmed: it would end the run",
            422: "not-amendable: every key that cannot be changed so, and why",
            426: "another wire version, or none named",
        },
        sends=_JSON,
        message=messages.Amend,
        wire=True,
        may=_ADMIN,
    ),
    Call(
        Routes.amendments,
        "GET",
        messages.AMENDMENTS,
        "Lists the amendments of the run.",
        {200: "their number, who made them, when, and what they changed"},
        may=_ALL,
    ),
    Call(
        Routes.metrics,
        "GET",
        "/metrics",
        "Prometheus metrics.",
        {200: "text"},
        gives="text/plain",
        may=_READERS,
    ),
    Call(
        Routes.health,
        "GET",
        "/healthz",
        "Says whether the server works and can acknowledge contributions.",
        {200: "yes", 503: "no: it failed, or its disk is full; `trouble` says why"},
        may=_ANYBODY,
    ),
    Call(
        Routes.described,
        "GET",
        "/openapi.json",
        "This description.",
        {200: "OpenAPI 3.1"},
        may=_ALL,
    ),
    Call(
        Routes.page,
        "GET",
        "/",
        "The run as a page for people.",
        {200: "HTML"},
        {"x": "time: losses over time", "round": "number of the round that is told"},
        gives="text/html",
        may=_ALL,
    ),
)


def openapi(version: str) -> JsonObject:
    """Describes the API as an OpenAPI document."""
    paths: dict[str, JsonObject] = {}
    for call in CALLS:
        paths.setdefault(call.pattern, {})[call.method.lower()] = _operation(call)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "diloco aggregation server",
            "version": version,
            "description": "Regions contribute pseudo-gradients and fetch published weights. "
            "Every error body is {error: {code, message, hint}}.",
            "x-wire-version": WIRE_VERSION,
        },
        "paths": paths,
        "components": {
            "schemas": {"Error": _ERROR, **_message_schemas()},
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


_REF = "#/components/schemas/"


def _message_schemas() -> JsonObject:
    """The JSON schema of every message that a call takes, with the types it refers to."""
    schemas: JsonObject = {}
    for message in filter(None, (call.message for call in CALLS)):
        schema = message.model_json_schema(ref_template=_REF + "{model}")
        schemas |= schema.pop("$defs", {})
        schemas[message.__name__] = schema
    return schemas


_SCHEMAS = {"": {"type": "string"}, "number": {"type": "integer", "minimum": 0}}


def _operation(call: Call) -> JsonObject:
    parameters = [
        {"name": name, "in": "path", "required": True, "schema": _SCHEMAS[kind]}
        for name, kind in re.findall(r"{(\w+)(?::(\w+))?}", call.path)
    ]
    for name, meaning in (call.query or {}).items():
        parameters.append(_parameter(name, "query", meaning))
    if call.region:
        parameters.append(_parameter(messages.RUN_HEADER, "header", "the run's id", True))
    if call.region or call.wire:
        parameters.append(_parameter(messages.WIRE_HEADER, "header", "wire version", True))
    if call.epoch:
        parameters.append(_parameter(messages.EPOCH_HEADER, "header", "from the join", True))
    operation: JsonObject = {
        "operationId": call.name,
        "summary": call.does,
        "parameters": parameters,
        "responses": {str(code): _response(call, code) for code in call.every_answer},
    }
    if call.may:
        operation["security"] = [{"token": []}]
        operation["x-roles"] = sorted(call.may)
    if call.sends:
        schema = {"schema": {"$ref": _REF + call.message.__name__}} if call.message else {}
        operation["requestBody"] = {"required": True, "content": {call.sends: schema}}
    return operation


def _parameter(name: str, where: str, meaning: str, required: bool = False) -> JsonObject:
    return {
        "name": name,
        "in": where,
        "description": meaning,
        "required": required,
        "schema": {"type": "string"},
    }


def _response(call: Call, code: int) -> JsonObject:
    described: JsonObject = {"description": call.every_answer[code]}
    if code >= 400:
        described["content"] = {_JSON: {"schema": {"$ref": _REF + "Error"}}}
    elif code not in (204, 304):
        described["content"] = {call.gives: {}}
    return described


_ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["code", "message"],
            "properties": {
                "code": {"type": "string"},
                "message": {"type": "string"},
                "hint": {"type": ["string", "null"]},
            },
        }
    },
}
