"""What each call does: read the request, ask the coordinator, write the answer.

Nothing is decided here but what HTTP itself is about: sizes, headers, status codes. The
calls and what they may answer are listed in `api.CALLS`.
"""

from __future__ import annotations

import asyncio
import gc
import importlib.metadata
import json
import re
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import cast

from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, Response, StreamingResponse

from diloco_cli.core.rounds import Accept, Ahead, Answer, Fenced, Foreign, Recorded, Refused
from diloco_cli.observe.dashboard import page
from diloco_cli.observe.prometheus import prometheus_text
from diloco_cli.observe.status import Status
from diloco_cli.server.build_status import build_status
from diloco_cli.server.http.calls import openapi
from diloco_cli.server.http.event_stream import tail
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
    Having,
    Join,
    Message,
    Run,
    parse,
    parse_heartbeat,
)

LONGEST_WAIT = 60.0
MOST_JSON_BYTES = 1 << 16
MOST_MODELS = 4
"""Downloads of whole models at once: a slow one keeps the weights of its version in memory."""


class Routes:
    """The calls of `api.CALLS`, one method each."""

    def __init__(self, coordinator: Coordinator, events: Path, url: Callable[[], str]) -> None:
        self.coordinator = coordinator
        self.state = coordinator.state
        self.intake = Intake(coordinator)
        self._events = events
        self._url = url
        self._lent: weakref.WeakSet[ModelDownload] = weakref.WeakSet()
        """Whole models that are being sent, each with the memory of its version."""

    # Regions

    async def about(self, request: Request) -> Response:
        recipe = self.state.settings
        return _json(
            Run(
                run=self.state.store.run,
                name=recipe.spec.name,
                state=self.state.phase,
                spec_digest=recipe.spec_digest,
                layout_digest=recipe.layout.digest,
                wire=WIRE_VERSION,
                fragments=tuple(recipe.sizes),
                lease_seconds=recipe.spec.server.lease,
                settings=recipe.settings,
            )
        )

    async def join(self, request: Request) -> Response:
        asked = parse(Join, await self._body(request))
        return _json(await self.coordinator.join(request.path_params["region"], asked))

    async def heartbeat(self, request: Request) -> Response:
        fragments = len(self.state.settings.sizes)
        said = parse_heartbeat(await self._body(request), fragments=fragments)
        return _json(await self.coordinator.heartbeat(request.path_params["region"], said))

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
            said = {"fate": "pending", "why": answer.why, "merged": merged, "recorded": False}
            return JSONResponse(said, 201)
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
            asked = f"{what} from version {since}" if since >= 0 else what
            raise HttpRefusal(
                "gone", f"{asked} is no longer kept; {newest} is the newest.", _NEWEST
            )
        request.state.digest, request.state.range = resource.etag, request.headers.get("range")
        return send(request, resource, self._sent)

    def _sent(self, count: int) -> None:
        self.state.totals.bytes_down += count

    async def weights(self, request: Request) -> Response:
        asked = _number(request, "version", -1) if "version" in request.query_params else None
        await self.state.commit.durable()
        weights = self.state.weights
        if len(self._lent) >= MOST_MODELS:
            gc.collect()  # One that was broken off may still be about.
        if len(self._lent) >= MOST_MODELS:
            raise HttpRefusal(
                "busy",
                f"{MOST_MODELS} downloads of the whole model are under way, the most there may be.",
                "Try again when one of them is over.",
                headers={"retry-after": "5"},
            )
        if asked is None:
            model = weights.model()
        else:
            model = await asyncio.to_thread(weights.model, asked)
        if model is None:
            clock = [each.number for each in weights.newest]
            code = "not-found" if asked is not None and asked > min(clock) else "gone"
            raise HttpRefusal(
                code,
                f"Not every fragment has version {asked} here; the newest are {clock}.",
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

    # People

    async def status(self, request: Request) -> Response:
        return JSONResponse(self._status().plain(), headers={"cache-control": "no-store"})

    async def events(self, request: Request) -> Response:
        said = request.query_params.get("after") or request.headers.get("last-event-id")
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        stream = tail(self._events, said, self.state)
        return StreamingResponse(stream, headers=headers, media_type="text/event-stream")

    async def stop(self, request: Request) -> Response:
        self.coordinator.stop("by request")
        return JSONResponse({"state": self.state.phase, "run": self.state.store.run}, 202)

    async def metrics(self, request: Request) -> Response:
        text = prometheus_text(self._status())
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    async def health(self, request: Request) -> Response:
        well = self.state.failure is None
        said = {"ok": well, "run": self.state.store.run, "trouble": self.state.trouble}
        return JSONResponse(said, 200 if well else 503)

    async def described(self, request: Request) -> Response:
        return JSONResponse(openapi(importlib.metadata.version("diloco-cli")))

    async def page(self, request: Request) -> Response:
        return HTMLResponse(page(self._status()), headers={"cache-control": "no-store"})

    # Shared

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
            said = f"{len(body)} bytes of the body arrived in {JSON_SECONDS:g} s."
            raise HttpRefusal("too-slow", said, "Send it again.") from None
        return body


def _pieces(request: Request) -> LimitedReceive:
    """The body as it comes in, with nothing between it and the server that receives it."""
    return cast(LimitedReceive, request.receive)


def _json(said: Message) -> Response:
    return Response(said.body(), media_type="application/json")


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
