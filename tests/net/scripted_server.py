"""A real HTTP/2 server that says exactly what a test tells it to, and remembers what it heard.

    POST /puppet/script   {"PUT /v1/x": [[status, headers, base64 body, options], …]}
    GET  /puppet/heard    every request since the last question

Options: `delay` seconds before the answer; `cut` breaks the connection's stream after so many
bytes of the body; `early` answers without reading the request's body.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
from typing import Any

scripts: dict[str, list[Any]] = {}
heard: list[dict[str, Any]] = []


async def app(scope: dict[str, Any], receive: Any, send: Any) -> None:
    if scope["type"] != "http":
        return
    key = f"{scope['method']} {scope['path']}"
    if scope["query_string"]:
        key += "?" + scope["query_string"].decode()
    if key == "POST /puppet/script":
        for path, replies in json.loads(await whole(receive)).items():
            scripts.setdefault(path, []).extend(replies)
        await answer(send, 200, {}, b"")
    elif key == "GET /puppet/heard":
        said = json.dumps(heard).encode()
        heard.clear()
        scripts.clear()
        await answer(send, 200, {}, said)
    else:
        await perform(key, scope, receive, send)


async def perform(key: str, scope: dict[str, Any], receive: Any, send: Any) -> None:
    note = {
        "key": key,
        "http": scope["http_version"],
        "headers": {name.decode(): value.decode() for name, value in scope["headers"]},
    }
    heard.append(note)
    replies = scripts.get(key)
    missing = [404, {}, base64.b64encode(b"nothing scripted").decode(), {}]
    status, headers, encoded, options = replies.pop(0) if replies else missing
    if not options.get("early"):
        body = await whole(receive)
        note["length"] = len(body)
        note["sha256"] = hashlib.sha256(body).hexdigest()
        note["text"] = body[:2000].decode("latin-1")
    await asyncio.sleep(options.get("delay", 0))
    await answer(send, status, headers, base64.b64decode(encoded), options.get("cut"))


async def whole(receive: Any) -> bytes:
    pieces = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return b"".join(pieces)
        pieces.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(pieces)


async def answer(
    send: Any, status: int, headers: dict[str, str], body: bytes, cut: int | None = None
) -> None:
    lines = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status, "headers": lines})
    if cut is None:
        await send({"type": "http.response.body", "body": body})
        return
    await send({"type": "http.response.body", "body": body[:cut], "more_body": True})
    await asyncio.sleep(0.05)  # The bytes leave before the stream breaks.
    raise RuntimeError("cut as told")
