"""A real server behind an imagined link.

    with emulated("10Mbit/50ms", "127.0.0.1", server_port) as proxy:
        talk_to(proxy.url)
        proxy.cut()          # silence: connections stay open and nothing passes
        proxy.heal()
        proxy.reset_all()    # every connection breaks

Plain user-space TCP on loopback: no root, no namespaces, no change to either side, and
TLS passes untouched. The link lives in a thread of its own; every method may be called
from any thread and has taken effect when it returns.

1 Gbit/s takes an eighth of a core. A busy Python thread in the same process competes for
the interpreter, though, and halves that rate; up to 100 Mbit/s it does no harm. Quick
links belong into a process that does little else.
"""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future
from types import TracebackType
from typing import Any, Self, TypeVar

from diloco_cli.chaos.emulator.connection import EmulatedLink, LinkTraffic, tuned
from diloco_cli.sim.network import Link, parse_link

T = TypeVar("T")

PROMPT = 30.0
"""Seconds within which the link's own thread answers, however busy the machine is."""


def emulated(
    link: Link | str,
    target_host: str,
    target_port: int,
    *,
    back: Link | str | None = None,
    scheme: str = "http",
    port: int = 0,
) -> Proxy:
    """Puts a link between a server and all who use the proxy's address instead of its own.

    `back` is the way from the server to its clients where it differs. The proxy listens on
    `port` of loopback, or on a free one, until its `with` block ends or it is closed.
    """
    out = parse_link(link) if isinstance(link, str) else link
    home = parse_link(back) if isinstance(back, str) else back
    return Proxy(out, home or out, (target_host, target_port), scheme=scheme, port=port)


class Proxy:
    """A link that can be watched and mistreated while it is in use."""

    host = "127.0.0.1"

    def __init__(
        self, link: Link, back: Link, target: tuple[str, int], *, scheme: str, port: int
    ) -> None:
        self._link = link
        # Keeps the port ours while nobody listens on it, so that callers are refused.
        self._place = _bound(self.host, port)
        self.port: int = self._place.getsockname()[1]
        self.url = f"{scheme}://{self.host}:{self.port}"
        self._failure: BaseException | None = None
        self._refusing = True
        self._loop = asyncio.new_event_loop()
        self._loop.set_exception_handler(self._failed)
        try:
            self._crossing = EmulatedLink(self._loop, link, back, target)
        except BaseException:
            self._loop.close()
            self._place.close()
            raise
        self._thread = threading.Thread(
            target=self._loop.run_forever, name=f"link {link} at {self.url}", daemon=True
        )
        self._thread.start()
        self._call(self._welcome)

    @property
    def link(self) -> Link:
        return self._link

    @property
    def up_bytes(self) -> int:
        """Bytes of clients that entered the link, those a reset then lost included."""
        return self._crossing.up.entered

    @property
    def down_bytes(self) -> int:
        """Bytes of the server that entered the link."""
        return self._crossing.down.entered

    def traffic(self) -> LinkTraffic:
        """Counts everything at one moment."""
        return self._call(self._crossing.traffic)

    def cut(self, *, refuse: bool = False) -> None:
        """Lets nothing pass until `heal`.

        A partition by default: connections stay open and hear nothing, and what was on the
        way waits. With `refuse`, as if the other machine were gone: open connections break
        and new ones are refused.
        """

        def act() -> None:
            if refuse:
                self._refusing = True
                self._crossing.accept_nobody()
                self._crossing.reset_all()
            self._crossing.up.stop("cut")
            self._crossing.down.stop("cut")

        self._call(act)

    def heal(self) -> None:
        """Undoes `cut`; an outage of the link's own takes its time."""

        def act() -> None:
            self._crossing.up.go("cut")
            self._crossing.down.go("cut")
            self._welcome()

        self._call(act)

    def reset_all(self) -> int:
        """Breaks every open connection at both ends; says how many there were."""
        return self._call(self._crossing.reset_all)

    def shape(self, link: Link | str, *, back: Link | str | None = None) -> None:
        """Makes it another link; what is on the way arrives as it would have."""
        out = parse_link(link) if isinstance(link, str) else link
        home = parse_link(back) if isinstance(back, str) else back
        self._call(lambda: self._crossing.shape(out, home or out))
        self._link = out

    def close(self) -> None:
        """Breaks what is open and leaves nothing running; harmless when repeated."""
        if self._loop.is_closed():
            return
        self._call(self._crossing.close)
        asyncio.run_coroutine_threadsafe(_last_tasks(), self._loop).result(PROMPT)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(PROMPT)
        self._loop.close()
        self._place.close()
        if self._failure is not None:
            # A link that broke by itself must not pass for one that was told to.
            raise RuntimeError(f"the emulated link failed: {self._failure!r}") from self._failure

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        self.close()

    def _welcome(self) -> None:
        if self._refusing:
            listener = tuned(_bound(self.host, self.port), self._link)
            listener.listen(128)
            self._crossing.accept_from(listener)
            self._refusing = False

    def _call(self, act: Callable[[], T]) -> T:
        """Runs this in the loop's thread and waits for it."""
        answer: Future[T] = Future()

        def run() -> None:
            try:
                answer.set_result(act())
            except BaseException as error:
                answer.set_exception(error)

        if self._loop.is_closed():
            raise RuntimeError("this link is closed")
        self._loop.call_soon_threadsafe(run)
        return answer.result(PROMPT)

    def _failed(self, _: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self._failure = self._failure or context.get("exception") or RuntimeError(str(context))


def _bound(host: str, port: int) -> socket.socket:
    place = socket.socket()
    place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    try:
        place.bind((host, port))
    except OSError:
        place.close()
        raise
    return place


async def _last_tasks() -> None:
    """Lets calls that were just cancelled notice it."""
    others = asyncio.all_tasks() - {asyncio.current_task()}
    await asyncio.gather(*others, return_exceptions=True)
