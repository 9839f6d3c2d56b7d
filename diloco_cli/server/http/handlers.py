"""What each call does: read the request, ask the coordinator, write the answer.

Nothing is decided here but what HTTP itself is about: sizes, headers, status codes. The
calls and what they may answer are listed in `calls.CALLS`.
"""

from __future__ import annotations

import asyncio
import gc
import gzip
import importlib.metadata
import json
import re
import shutil
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import cast

from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse

from diloco_cli.core.rounds import Accept, Ahead, Answer, Fenced, Foreign, Recorded, Refused
from diloco_cli.observe.history import MOST_POINTS, History
from diloco_cli.observe.page import POLICY, View, page
from diloco_cli.observe.prometheus import ServerFacts, process_text, prometheus_text
from diloco_cli.observe.status import Status
from diloco_cli.server.build_status import amendment_of, build_status
from diloco_cli.server.http.event_stream import tail
from diloco_cli.server.http.health import health_of
from diloco_cli.server.http.limits import JSON_SECONDS
from diloco_cli.server.intake.body import LimitedReceive, too_large
from diloco_cli.server.intake.intake import Intake
from diloco_cli.server.intake.partial import Part, UploadAddress
from diloco_cli.server.refusals import HEADERS, HttpRefusal
from diloco_cli.server.rounds.coordinator import Coordinator, server_behind
from diloco_cli.server.versions.export import ModelDownload
from diloco_cli.server.versions.send import send
from diloco_cli.wire.messages import (
    EPOCH_HEADER,
    LONG_POLL_SECONDS,
    PARTS_HEADER,
    WIRE_VERSION,
    Amend,
    Amendment,
    Amendments,
    Having,
    Join,
    JsonObject,
    Message,
    Run,
    parse,
    parse_heartbeat,
)

LONGEST_WAIT = 60.0
MOST_JSON_BYTES = 1 << 16
LEAST_ZIPPED = 4096
PAGE_POINTS, PAGE_EVENTS = 300, 100
MOST_MODELS = 4
"""Downloads of whole models at once: a slow one keeps the weights of its version in memory."""


class Routes:
    """The calls of `calls.CALLS`, one method each."""

    def __init__(
        self,
        coordinator: Coordinator,
        events: Path,
        url: Callable[[], str],
        describe: Callable[[], Mapping[str, object]],
        history: History,
    ) -> None:
        """`describe` gives the OpenAPI document; somebody else fills the history."""
        self.coordinator = coordinator
        self.state = coordinator.state
        self.intake = Intake(coordinator)
        self._events = events
        self._url, self._describe, self._history = url, describe, history
        self._lent: weakref.WeakSet[ModelDownload] = weakref.WeakSet()
        """Whole models that are being sent, each with the files, or the memory, of its version."""
        self._opening = 0
        self.answers: Counter[tuple[str, int]] = Counter()
        """Since this server was started, by call and status."""
        self.expiries: Callable[[], Mapping[str, float]] = dict

    # Regions

    async def about(self, request: Request) -> Response:
        settings = self.state.settings
        return _json(
            Run(
                run=self.state.store.run,
                name=settings.spec.name,
                state=self.state.phase,
                spec_digest=settings.spec_digest,
                layout_digest=settings.layout.digest,
                wire=WIRE_VERSION,
                fragments=tuple(settings.sizes),
                lease_seconds=settings.spec.server.lease,
                settings=settings.settings,
                digests=self.state.history.digests,
                amendments=self._amendments(),
                was=self.state.store.was,
                continues=tuple(self.state.ledger.continues),
            )
        )

    async def join(self, request: Request) -> Response:
        message = parse(Join, await self._body(request))
        return _json(await self.coordinator.join(request.path_params["region"], message))

    async def heartbeat(self, request: Request) -> Response:
        fragments = len(self.state.settings.sizes)
        message = parse_heartbeat(await self._body(request), fragments=fragments)
        return _json(await self.coordinator.heartbeat(request.path_params["region"], message))

    async def calls(self, request: Request) -> Response:
        news = await self.coordinator.wait_news(
            request.path_params["region"],
            epoch=_number(request, "epoch"),
            after=_number(request, "after", -1),
            wait=_wait(request),
        )
        return _json(news) if news else Response(status_code=204)

    async def contribute(self, request: Request) -> Response:
        address = self._address(request)
        if frame := request.headers.get(PARTS_HEADER):
            answer = await self.intake.complete(address, _digest("diloco-parts", frame))
        else:
            body = _pieces(request)
            answer = await self.intake.take(address, body, length=_length(request))
        known = self.state.ledger.region_record(address.region, address.fragment).known
        if known and known.clock == address.clock:
            request.state.digest = known.digest
        return self._fate(address, answer)

    async def contribute_part(self, request: Request) -> Response:
        length, start = _length(request), request.path_params["start"]
        size = _number(request, "size")
        if not length or start + length > size:
            raise HttpRefusal(
                "bad-request",
                f"Bytes {start}-{start + (length or 0) - 1} of {size} are no part.",
                "A part says its length, and `size` is that of the whole frame.",
            )
        query = request.query_params
        frame = _digest("frame", query.get("frame", ""))
        part = Part(start, start + length, size, frame, query.get("digest", ""))
        request.state.digest = frame
        have = await self.intake.take_part(self._address(request), part, _pieces(request))
        return _json(Having(have=tuple(have)))

    async def parts(self, request: Request) -> Response:
        frame = _digest("frame", request.query_params.get("frame", ""))
        have, decided = self.intake.having(self._address(request), frame)
        return _json(Having(have=tuple(have), decided=decided))

    def _address(self, request: Request) -> UploadAddress:
        where = request.path_params
        return UploadAddress(
            fragment=self._fragment(request),
            region=where["region"],
            base=where["base"],
            clock=where["clock"],
            epoch=_header_number(request, EPOCH_HEADER),
        )

    def _fate(self, address: UploadAddress, answer: Answer) -> Response:
        slot = self.state.ledger.slots[address.fragment]
        merged = slot.merged.get(address.region, "")
        if isinstance(answer, Accept):
            document = {"fate": "pending", "why": answer.why, "merged": merged, "recorded": False}
            return JSONResponse(document, 201)
        if isinstance(answer, Recorded):
            fate, why = answer.decision.fate, answer.decision.why
            return JSONResponse({"fate": fate, "why": why, "merged": merged, "recorded": True})
        if isinstance(answer, Fenced):
            raise HttpRefusal("fenced", f"{answer.why}.", "Stop training and join again.")
        if isinstance(answer, Ahead):
            who = f"{address.region} contributes on version {address.base}"
            raise server_behind(who, address.fragment, slot.version)
        hint = "Keep the work; it travels with the next contribution."
        code = "returned"
        if isinstance(answer, Refused | Foreign):
            hint = "Drop the work and go on from the published weights."
            code = "refused" if isinstance(answer, Refused) else "foreign"
        raise HttpRefusal(code, answer.why, hint, fate=code, why=answer.why, merged=merged)

    # Weights

    async def fragment(self, request: Request) -> Response:
        latest = await self.coordinator.wait_version(
            self._fragment(request), after=_number(request, "after", -1), wait=_wait(request)
        )
        return _json(latest) if latest else Response(status_code=204)

    async def version(self, request: Request) -> Response:
        fragment, version = self._fragment(request), request.path_params["version"]
        since = _number(request, "from", -1)
        weights = self.state.weights
        await self.state.commit.durable()
        newest = weights.newest[fragment].number
        if version > newest:
            raise HttpRefusal("not-found", f"Fragment {fragment} is at version {newest}.", _NEWEST)
        if "from" in request.query_params:
            resource = self.state.weights.chain(fragment, since, version)
            if resource and (
                whole := await self.state.weights.shorter(fragment, version, resource)
            ):
                raise HttpRefusal(
                    "gone",
                    f"The deltas from version {since} to {version} have {resource.size} bytes, "
                    f"the whole fragment has {whole.size}.",
                    "Fetch it whole.",
                )
        else:
            resource = await weights.whole(fragment, version)
        if resource is None:
            what = f"Version {version} of fragment {fragment}"
            wanted = f"{what} from version {since}" if since >= 0 else what
            newest = weights.newest[fragment].number  # Newer ones may have come meanwhile.
            raise HttpRefusal(
                "gone", f"{wanted} is no longer kept; {newest} is the newest.", _NEWEST
            )
        request.state.digest, request.state.range = resource.etag, request.headers.get("range")
        return send(request, resource, self._sent)

    def _sent(self, count: int) -> None:
        self.state.totals.bytes_down += count

    async def weights(self, request: Request) -> Response:
        version = _number(request, "version", -1) if "version" in request.query_params else None
        average = bool(_number(request, "ema", 0))
        self._refuse_other_regions(request, average)
        if average and version is not None:
            raise HttpRefusal(
                "bad-request",
                "Only the newest average is kept, and a version is asked for.",
                "Leave out `version` or `ema`.",
            )
        await self.state.commit.durable()
        weights = self.state.weights
        if len(self._lent) + self._opening >= MOST_MODELS:
            gc.collect()  # One that was broken off may still be about.
        if len(self._lent) + self._opening >= MOST_MODELS:
            raise HttpRefusal(
                "busy",
                f"{MOST_MODELS} downloads of the whole model are under way, the most there may be.",
                "Try again when one of them is over.",
                headers={"retry-after": "5"},
            )
        self._opening += 1
        try:
            if average:
                model = await asyncio.to_thread(weights.average)
            else:
                model = await asyncio.to_thread(weights.model, version)
        finally:
            self._opening -= 1
        if model is None and average:
            raise HttpRefusal(
                "not-found",
                "This run keeps no average of its published weights, or has not begun one.",
                "Set `outer.ema: 0.05`; `diloco amend` does so while a run goes on.",
            )
        if model is None:
            clock = [each.number for each in weights.newest]
            code = "not-found" if version is not None and version > min(clock) else "gone"
            raise HttpRefusal(
                code,
                f"Not every fragment has version {version} here; the newest are {clock}.",
                "Leave `version` out for the newest of each fragment.",
            )
        self._lent.add(model)
        request.state.digest = f"versions {model.versions}"
        beside = {
            # Under this path the newest weights are others tomorrow.
            "cache-control": "no-store",
            "content-disposition": f'attachment; filename="{self.state.spec.name}.safetensors"',
            "diloco-versions": json.dumps(model.versions),
        }
        return send(request, model, lambda count: None, beside)

    def _refuse_other_regions(self, request: Request, average: bool) -> None:
        """Few models are sent at once: a region could keep those who watch the run from any."""
        caller = getattr(request.state, "caller", None)
        evaluates = average and caller and caller.name == self.coordinator.evaluator()
        if caller and caller.role == "upload" and not evaluates:
            raise HttpRefusal(
                "wrong-role",
                f"Region {caller.name!r} may not fetch the whole model.",
                "Regions fetch fragments; the one that evaluates may fetch the average (ema=1).",
            )

    # People

    async def status(self, request: Request) -> Response:
        return JSONResponse(self._status().plain(), headers={"cache-control": "no-store"})

    async def events(self, request: Request) -> Response:
        after = request.query_params.get("after") or request.headers.get("last-event-id")
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        stream = tail(self._events, after, self.state)
        return StreamingResponse(stream, headers=headers, media_type="text/event-stream")

    async def history(self, request: Request) -> Response:
        since = max(0, _number(request, "from", 0))
        points = max(2, min(_number(request, "points", MOST_POINTS), MOST_POINTS))
        document = self._document(since, points=points, round_after=_number(request, "round", 0))
        body = json.dumps(document, separators=(",", ":")).encode()
        headers = {"cache-control": "no-store"}
        if len(body) > LEAST_ZIPPED and "gzip" in request.headers.get("accept-encoding", ""):
            body = await asyncio.to_thread(gzip.compress, body, 1)
            headers["content-encoding"] = "gzip"
        return Response(body, headers=headers, media_type="application/json")

    async def stop(self, request: Request) -> Response:
        self.coordinator.stop("by request")
        return JSONResponse({"state": self.state.phase, "run": self.state.store.run}, 202)

    async def amend(self, request: Request) -> Response:
        wanted = parse(Amend, await self._body(request))
        caller = getattr(request.state, "caller", None)
        by = str(caller) if caller else "this machine"
        answer, new = await self.coordinator.amend(wanted, by=by)
        return Response(answer.body(), 201 if new else 200, media_type="application/json")

    async def amendments(self, request: Request) -> Response:
        return _json(Amendments(terms=self.state.ledger.terms, amendments=self._amendments()))

    def _amendments(self) -> tuple[Amendment, ...]:
        return tuple(map(amendment_of, self.state.ledger.amendments))

    async def metrics(self, request: Request) -> Response:
        facts = ServerFacts(
            version=importlib.metadata.version("diloco-cli"),
            disk_free=self._disk_free(),
            answers=self.answers,
            expiries=self.expiries(),
            rounds=self._history.rounds.lasted,
        )
        text = prometheus_text(self._status()) + process_text(facts)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def health(self, request: Request) -> Response:
        status, document = health_of(self.state)
        return JSONResponse({**document, "run": self.state.store.run}, status)

    async def described(self, request: Request) -> Response:
        return JSONResponse(self._describe())

    async def page(self, request: Request) -> Response:
        text = await asyncio.to_thread(
            page,
            self._status(),
            self._document(points=PAGE_POINTS),
            list(self._history.events)[::-1][:PAGE_EVENTS],
            view=View(
                by_time=request.query_params.get("x") == "time",
                round=_number(request, "round", 0) or None,
            ),
            wall=self.state.wall(),
        )
        beside = {"cache-control": "no-store", "content-security-policy": POLICY}
        return HTMLResponse(text, headers=beside)

    # Shared

    def _disk_free(self) -> int | None:
        try:
            return shutil.disk_usage(self._events.parent).free
        except OSError:
            return None

    def _document(self, since: int = 0, **more: int) -> JsonObject:
        beside = {"run_id": self.state.store.run, "now": round(self.state.seconds, 3)}
        return {**beside, **self._history.document(since, **more)}

    def _status(self) -> Status:
        return build_status(self.coordinator, self._url())

    def _fragment(self, request: Request) -> int:
        fragment, count = request.path_params["fragment"], len(self.state.settings.sizes)
        if fragment >= count:
            raise HttpRefusal("not-found", f"There is no fragment {fragment}, there are {count}.")
        return fragment

    async def _body(self, request: Request) -> bytes:
        """Reads a JSON body, which is short."""
        limit = MOST_JSON_BYTES + 512 * len(self.state.settings.sizes)
        if (length := _length(request)) and length > limit:
            raise too_large(length, limit)
        body = b""
        try:
            async with asyncio.timeout(JSON_SECONDS):
                async for piece in request.stream():
                    body += piece
                    if len(body) > limit:
                        raise too_large(len(body), limit)
        except TimeoutError:
            message = f"{len(body)} bytes of the body arrived in {JSON_SECONDS:g} s."
            raise HttpRefusal("too-slow", message, "Send it again.") from None
        return body


def _pieces(request: Request) -> LimitedReceive:
    """The body as it comes in, with nothing between it and the server that receives it."""
    return cast(LimitedReceive, request.receive)


def _json(message: Message) -> Response:
    return Response(message.body(), media_type="application/json")


def _number(request: Request, key: str, otherwise: int | None = None) -> int:
    text = request.query_params.get(key)
    if text is None and otherwise is not None:
        return otherwise
    try:
        return max(-1, min(int(text or ""), 2**53))
    except ValueError:
        raise HttpRefusal(
            "bad-request", f"`{key}` is {text!r:.40}, it needs a whole number."
        ) from None


def _header_number(request: Request, key: str) -> int:
    text = request.headers.get(key, "")
    if not (text.isascii() and text.isdigit()) or len(text) > 16:
        raise HttpRefusal("bad-request", f"The header `{key}` is {text!r:.40}.", HEADERS)
    return int(text)


def _digest(key: str, text: str) -> str:
    if not _SHA256.fullmatch(text):
        raise HttpRefusal(
            "bad-request",
            f"`{key}` is {text!r:.80}, it needs a SHA-256 in hexadecimal.",
            "A frame's digest is its last 32 bytes.",
        )
    return text


def _length(request: Request) -> int | None:
    return _header_number(request, "content-length") if _has_length(request) else None


def _has_length(request: Request) -> bool:
    return "content-length" in request.headers


def _wait(request: Request) -> float:
    try:
        return max(0.0, min(float(request.query_params["wait"]), LONGEST_WAIT))
    except (KeyError, ValueError):
        return LONG_POLL_SECONDS


_SHA256 = re.compile(r"[0-9a-f]{64}")
_NEWEST = "Ask `GET /v1/fragments/{f}` for the newest version and its links."
