"""Requests on their way: late, lost, twice, cut off, out of order.

The server's real ASGI application answers, called as an HTTP server would call it.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass
from random import Random
from typing import Any
from urllib.parse import urlsplit

from tests.verify.dst.host import Host
from tests.verify.dst.loop import Life, Loop

UNANSWERED_SECONDS = 5.0


class Lost(Exception):
    """No answer came."""


@dataclass(frozen=True)
class Reply:
    status: int
    headers: dict[str, str]
    body: bytes


@dataclass
class Weather:
    """How bad the network is; it gets better when the faults are over."""

    delay: float = 0.05
    loss: float = 0.0
    twice: float = 0.0
    cut: float = 0.0
    """Share of bodies that break off."""
    gone: float = 0.0
    """Share of requests whose handler is cancelled because the client went away."""


class Network:
    def __init__(self, loop: Loop, rng: Random, host: Host, weather: Weather) -> None:
        self.loop, self.rng, self.host, self.weather = loop, rng, host, weather
        self.parted: dict[str, float] = {}
        """Until when somebody cannot be reached."""
        self.count: Counter[str] = Counter()

    async def ask(
        self,
        who: str,
        method: str,
        target: str,
        headers: dict[str, str],
        body: bytes = b"",
        *,
        seconds: float = UNANSWERED_SECONDS,
    ) -> Reply:
        """Asks the server and waits for the answer; raises Lost when none comes in time."""
        answer: asyncio.Future[Reply] = self.loop.create_future()
        exchange = Exchange(self, who, method, target, headers, body, answer)
        self._send(exchange)
        if self._happens(self.weather.twice):
            self.count["twice"] += 1
            self._send(Exchange(self, who, method, target, headers, body, None))
        try:
            async with asyncio.timeout(seconds):
                return await answer
        except TimeoutError:
            raise Lost(f"{method} {target}") from None
        finally:
            exchange.leave()

    def _send(self, exchange: Exchange) -> None:
        if self._happens(self.weather.loss):
            self.count["lost"] += 1
            return
        self.loop.call_later(self.delay(), exchange.arrive, context=self.host.outside)

    def reply(self, exchange: Exchange, reply: Reply) -> None:
        answer = exchange.answer
        if answer is None or self.is_parted(exchange.who):
            return
        if self._happens(self.weather.loss):
            self.count["reply lost"] += 1
            return

        def deliver() -> None:
            if not answer.done():
                answer.set_result(reply)

        self.loop.call_later(self.delay(), deliver, context=self.host.outside)

    def delay(self) -> float:
        delay = self.rng.expovariate(1 / self.weather.delay)
        return delay * (8 if self.rng.random() < 0.05 else 1)

    def is_parted(self, who: str) -> bool:
        return self.parted.get(who, 0.0) > self.loop.time()

    def _happens(self, share: float) -> bool:
        return share > 0 and self.rng.random() < share


class Exchange:
    """One request, as the server sees it."""

    def __init__(
        self,
        network: Network,
        who: str,
        method: str,
        target: str,
        headers: dict[str, str],
        body: bytes,
        answer: asyncio.Future[Reply] | None,
    ) -> None:
        self.network, self.who, self.answer = network, who, answer
        self.method, self.target, self.headers, self.body = method, target, headers, body
        self.arrived = 0.0
        self._pieces = self._cut_up()
        self._left = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._life: Life | None = None
        self._status, self._headers, self._said = 0, {}, []

    def _cut_up(self) -> list[bytes]:
        rng, body = self.network.rng, self.body
        if len(body) > 200 and rng.random() < 0.5:
            at = rng.randrange(1, len(body))
            return [body[:at], body[at:]]
        return [body]

    def arrive(self) -> None:
        network, host = self.network, self.network.host
        if network.is_parted(self.who) or host.app is None or host.life is None:
            return
        self.arrived = network.loop.time()
        host.trace("asked", who=self.who, what=f"{self.method} {self.target}")
        self._life = host.life
        self._task = host.life.task(network.loop, self._serve(host.app))

    async def _serve(self, app: Any) -> None:
        where = urlsplit(self.target)
        lines = {**self.headers, "content-length": str(len(self.body))}
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.4"},
            "http_version": "2",
            "method": self.method,
            "scheme": "http",
            "path": where.path,
            "raw_path": where.path.encode(),
            "query_string": where.query.encode(),
            "root_path": "",
            "headers": [(key.encode(), value.encode()) for key, value in lines.items()],
            "client": (self.who, 1),
            "server": ("server", 1),
        }
        await app(scope, self._receive, self._send)

    async def _receive(self) -> dict[str, Any]:
        network = self.network
        if not self._pieces:
            await self._left.wait()
            return {"type": "http.disconnect"}
        if len(self._pieces) == 1 and self.body and network._happens(network.weather.cut):
            network.count["cut"] += 1
            return {"type": "http.disconnect"}
        if self.body:
            await asyncio.sleep(network.delay() / 4)
        piece = self._pieces.pop(0)
        return {"type": "http.request", "body": piece, "more_body": bool(self._pieces)}

    async def _send(self, message: dict[str, Any]) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            self._headers = {k.decode(): v.decode() for k, v in message["headers"]}
            return
        self._said.append(bytes(message.get("body", b"")))
        if not message.get("more_body"):
            reply = Reply(self._status, self._headers, b"".join(self._said))
            network = self.network
            network.host.answered(self, reply)
            network.reply(self, reply)

    def leave(self) -> None:
        """The client waits no longer; some servers cancel what it asked for."""
        self._left.set()
        task, network = self._task, self.network
        if task and not task.done() and network._happens(network.weather.gone):
            network.count["gone"] += 1
            task.cancel()
