"""The ASGI application: routes, the checks before them, words for whatever goes wrong."""

from __future__ import annotations

import importlib.metadata
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from starlette.convertors import IntegerConvertor, register_url_convertor
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Match, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from diloco_cli.errors import StoreError, WireError
from diloco_cli.observe.history import History
from diloco_cli.server.access.roles import AccessCheck
from diloco_cli.server.access.tokens import TokenList
from diloco_cli.server.http.audit import Audit, Watched
from diloco_cli.server.http.calls import CALLS, Call, openapi
from diloco_cli.server.http.handlers import Routes
from diloco_cli.server.http.limits import Quota
from diloco_cli.server.intake.body import LimitedReceive
from diloco_cli.server.refusals import HEADERS, HttpRefusal
from diloco_cli.server.rounds.coordinator import Coordinator
from diloco_cli.server.rounds.membership import other_wire
from diloco_cli.system.files import DiskFull, ReadOnly
from diloco_cli.wire.frame import most_bytes
from diloco_cli.wire.messages import RUN_HEADER, WIRE_HEADER, WIRE_VERSION

log = logging.getLogger(__name__)


class NumberConvertor(IntegerConvertor):
    """A number in a path; Python refuses to read one of thousands of digits."""

    regex = "[0-9]{1,18}"


register_url_convertor("number", NumberConvertor())


def make_app(
    coordinator: Coordinator,
    *,
    events: Path,
    url: Callable[[], str],
    tokens: TokenList | None = None,
    history: History | None = None,
    expiries: Callable[[], Mapping[str, float]] = dict,
) -> Guarded:
    """Makes the ASGI application of a coordinator.

    `events` is the path of the run log; `url` says where the server can be reached. Without
    tokens anybody may do anything, which is for the loopback address only. `expiries` says until
    when certificates and credentials are good.
    """
    release = importlib.metadata.version("diloco-cli")
    history = history or History(len(coordinator.state.settings.sizes))
    routes = Routes(coordinator, events, url, lambda: openapi(release), history)
    routes.expiries = expiries
    access = AccessCheck(tokens)
    state = coordinator.state
    if tokens:
        state.credential_trouble = tokens.trouble_of

    def model_bytes() -> int:
        sizes, codecs = state.settings.sizes, state.history.up_codecs
        return max(sum(most_bytes(size, codec) for size in sizes) for codec in codecs)

    quota = Quota(model_bytes)
    table = [
        Route(call.path, _endpoint(routes, call, access, quota), methods=[call.method])
        for call in CALLS
    ]
    return Guarded(
        Table(table),
        coordinator,
        Audit(events.with_name("audit.jsonl")),
        access,
        routes.answers,
    )


class Table:
    """Finds the call of a request and sends its answer.

    Starlette's own application does that in nine layers, each around every message. They
    cost more than many an answer, and what they catch is caught in the endpoints.
    """

    def __init__(self, routes: Sequence[Route]) -> None:
        self.routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        response = await self._answer(scope, receive, send)
        await response(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> Response:
        allowed: set[str] = set()
        for route in self.routes:
            match, parameters = route.matches(scope)
            if match == Match.FULL:
                scope.update(parameters)
                return await route.endpoint(Request(scope, receive, send))
            if match == Match.PARTIAL:
                allowed |= route.methods or set()
        if allowed:
            return answer_error(_not_allowed(scope["method"], allowed))
        return answer_error(
            HttpRefusal("not-found", f"There is no call at {scope['path']:.80}.", LISTED)
        )


LISTED = "GET /openapi.json lists the calls."


def _not_allowed(method: str, allowed: set[str]) -> HttpRefusal:
    may = ", ".join(sorted(allowed))
    message = f"{method:.20} is not for this path, which takes {may}."
    return HttpRefusal("not-allowed", message, LISTED, headers={"allow": may})


def _endpoint(
    routes: Routes, call: Call, access: AccessCheck, quota: Quota
) -> Callable[[Request], Awaitable[Response]]:
    """Checks a request, lets the call answer, and puts failures into words."""
    run = routes.state.store.run

    async def endpoint(request: Request) -> Response:
        request.state.call = call.name
        try:
            access.check(call, request)
            if call.wire or call.region:
                _check_wire(request)
            _check_run(request, run, must=call.region)
            with _counted(quota, call, request):
                return await call.handler(routes, request)
        except ClientDisconnect:
            return Response(status_code=400)  # Nobody is there to read it.
        except Exception as error:
            if isinstance(error, DiskFull):
                routes.state.disk_full("upload", error)
            return _answer_failure(error, request)

    return endpoint


def _counted(quota: Quota, call: Call, request: Request) -> AbstractContextManager[None]:
    """Counts an upload among those of its region while it lasts."""
    if not (call.epoch and call.sends):
        return nullcontext()
    length = request.headers.get("content-length", "")
    size = int(length) if length.isascii() and length.isdigit() and len(length) < 16 else 0
    return quota.taken(request.path_params["region"], size)


def _check_wire(request: Request) -> None:
    theirs = request.headers.get(WIRE_HEADER)
    if theirs != str(WIRE_VERSION):
        raise other_wire(theirs[:20] if theirs else f"an unnamed one (`{WIRE_HEADER}` is missing)")


def _check_run(request: Request, run: str, *, must: bool) -> None:
    named = request.headers.get(RUN_HEADER)
    if named is None and must:
        raise HttpRefusal("bad-request", f"The header `{RUN_HEADER}` is missing.", HEADERS)
    if named is not None and named != run:
        raise HttpRefusal(
            "other-run",
            f"This server runs {run}, the request is for {named[:80]}.",
            "Is the URL right? A region's folder belongs to one run; use another --dir.",
        )


class Guarded:
    """Counts the requests under way, writes down who did what, and at the end turns all away."""

    def __init__(
        self,
        app: ASGIApp,
        coordinator: Coordinator,
        audit: Audit,
        access: AccessCheck,
        answers: Counter[tuple[str, int]],
    ) -> None:
        """`answers` counts by call and status."""
        self.app = app
        self.state = coordinator.state
        self.under_way = 0
        self.audit, self.met, self._access = audit, access.met, access
        self.answers = answers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        if _lacks_host(scope):
            await answer_error(_NO_HOST)(scope, receive, send)
            return
        self.under_way += 1
        incoming = LimitedReceive(receive)
        watched = Watched(scope, incoming, send)
        try:
            if self.state.closed:
                await answer_error(closing())(scope, incoming, send)
            else:
                await self._answer(scope, incoming, watched)
            if scope["method"] in ("PUT", "POST"):
                await incoming.linger()
        finally:
            incoming.close()
            self.under_way -= 1

    async def _answer(self, scope: Scope, incoming: LimitedReceive, watched: Watched) -> None:
        try:
            await self.app(scope, incoming, watched.send)
        finally:
            self._access.left(watched.state.get("counted"))
            watched.note(self.audit)
            self.answers[watched.state.get("call", ""), watched.status] += 1


def _lacks_host(scope: Scope) -> bool:
    """What HTTP/1.1 asks every client to send, so that nobody in between mistakes the request."""
    if not str(scope.get("http_version", "")).startswith("1.1"):
        return False
    hosts = [value for name, value in scope["headers"] if name == b"host"]
    return len(hosts) != 1 or not hosts[0]  # The HTTP library adds an empty one where none came.


_NO_HOST = HttpRefusal("bad-request", "The request has no `Host`, or more than one.")


def answer_error(denied: HttpRefusal) -> Response:
    """Turns a refusal into an error body."""
    return JSONResponse(denied.body, denied.status, denied.headers)


def _answer_failure(error: Exception, request: Request) -> Response:
    # Not in the endpoint: a local of its frame would refer to the error, whose traceback refers
    # to the frame, and the cycle would keep the body.
    denied = _denied(error, request)
    request.state.code = denied.code
    return answer_error(denied)


def _denied(error: Exception, request: Request) -> HttpRefusal:
    """Turns what went wrong into a refusal; a fault of our own is logged."""
    if isinstance(error, HttpRefusal):
        return error
    if isinstance(error, DiskFull):
        code = "read-only" if isinstance(error, ReadOnly) else "no-room"
        return HttpRefusal(code, error.message, error.hint, headers={"retry-after": "5"})
    if isinstance(error, StoreError):
        return closing()
    if isinstance(error, WireError):
        return HttpRefusal("bad-request", error.message, error.hint)
    who = {
        "peer": request.client.host if request.client else None,
        "region": request.path_params.get("region", "")[:64],
    }
    log.error(f"{request.state.call} failed", exc_info=error, extra=who)
    return HttpRefusal("failed", f"{type(error).__name__}: {error}", "See the server's log.")


def closing() -> HttpRefusal:
    """The server is on its way out."""
    return HttpRefusal(
        "closing",
        "This server is about to stop.",
        "It can be started again with the same command; regions wait for it.",
        headers={"retry-after": "5"},
    )
