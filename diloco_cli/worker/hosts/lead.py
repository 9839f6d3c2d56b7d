"""Host 0's trainer and the others: generations, orders to all followers, their deaths.

    listen ──▶ every host's follower has come ──▶ join ──▶ orders … ──▶ end
                         any of them is gone ──▶ we are gone: the next start is the next generation

Orders are numbered by one counter, and every follower hears all of them. A follower or a whole
host that is gone takes this process with it, at once, wherever it is: the devices of the others
would wait for it for ever. Nothing is lost by that which a death of this process alone would not
lose, because only this process writes anything.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from diloco_cli.errors import LinkError, SpecError
from diloco_cli.spec.resolved import resolved
from diloco_cli.system import logs
from diloco_cli.system.failpoints import reach
from diloco_cli.system.files import keep_bytes
from diloco_cli.system.process_end import exit_in_words
from diloco_cli.system.wakeup import LAST_MOMENT
from diloco_cli.worker.hosts.connection import ConnectionClosed, HostConnection, join_address
from diloco_cli.worker.hosts.listener import HostHello, HostListener, RegionTerms

log = logging.getLogger(__name__)

GENERATION = "generation"
PERMANENT = (2, 5)
"""Ends of a follower that would only come again."""
REASON_SECONDS = 2.0
"""For a supervisor to say how its follower ended."""


class Lead:
    """The way from host 0's trainer to all followers of one generation."""

    def __init__(self, terms: RegionTerms, secret: bytes, folder: Path) -> None:
        self.terms, self.generation = terms, _next_generation(folder)
        self._followers: dict[int, HostConnection] = {}
        self._supervisors: dict[int, HostConnection] = {}
        self._reasons: dict[int, dict[str, Any]] = {}
        self._lock = threading.RLock()
        self._changed = threading.Condition()
        self._count = 0
        self._forgotten: deque[int] = deque()
        self._ending = False
        self._joined = False
        self._speeds: dict[int, float] = {}
        self._unsaved = ""
        self._listener = HostListener(terms.place, secret, self._answer, wait=LAST_MOMENT + 10)

    # Who is there

    def gather(self, say: Callable[[str], None], stopped: Callable[[], str]) -> bool:
        """Waits until a follower of every host is there; False if we are to stop before."""
        said = ""
        while True:
            with self._changed:
                missing = sorted(set(range(1, self.terms.place.hosts)) - self._followers.keys())
                if not missing:
                    self._joined = True
                    return True
                known = [host for host in missing if host in self._supervisors]
            absent = [host for host in missing if host not in known]
            why = (
                f"waiting for {_hosts(absent)} of {self.terms.place.hosts}"
                if absent
                else f"{_hosts(known)} start{'' if len(known) > 1 else 's'}"
            )
            if why != said:
                say(why)
                log.info(why)
                said = why
            if stopped():
                return False
            with self._changed:
                self._changed.wait(0.2)

    def open_devices(self) -> str:
        """Tells all followers where JAX's own processes meet; gives that address."""
        host, _ = self.terms.place.address
        with socket.create_server(
            (host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET
        ) as probe:
            address = join_address(host, probe.getsockname()[1])
        with self.order("join", address=address):
            pass
        reach("hosts.met")
        return address

    def _answer(self, hello: HostHello, connection: HostConnection) -> None:
        self.terms.check(hello)
        follows = hello.role == "follower"
        if follows and hello.generation != self.generation:
            raise SpecError(
                f"A follower of generation {hello.generation} has come to generation "
                f"{self.generation}.",
                hint="It ends by itself; its supervisor starts one of this generation.",
            )
        with self._lock:  # The answer is ahead of the first order.
            there = self._followers if follows else self._supervisors
            if not self._enter(there, hello, connection):
                # Most likely it is the same host, started again before we know of its end.
                connection.send(
                    {
                        "later": f"There is a {hello.role} of host {hello.host} in generation "
                        f"{self.generation} already.",
                        "hint": "Give every host of the region a --host of its own.",
                    }
                )
                return
            answer = {"spec": resolved(self.terms.spec)} if follows else {}
            connection.send({"generation": self.generation, **answer})
        self._watch(hello, connection)

    def _enter(
        self, there: dict[int, HostConnection], hello: HostHello, connection: HostConnection
    ) -> bool:
        """Says whether there was none yet."""
        with self._changed:
            if hello.host in there or (self._joined and hello.role == "follower"):
                return False
            there[hello.host] = connection
            self._changed.notify_all()
            return True

    def _watch(self, hello: HostHello, connection: HostConnection) -> None:
        host = hello.host
        try:
            while True:
                message, _ = connection.receive()
                if "died" in message:
                    self._reasons[host] = message
                    self._is_gone(host)
                elif "speed" in message:
                    self.note_speed(host, float(message["speed"]))
                elif "unsaved" in message:
                    self._unsaved = f"host {host}: {message['unsaved']}"
        except ConnectionClosed:
            pass
        if hello.role == "supervisor" and not self._joined and host not in self._followers:
            with self._changed:  # Nothing depends on it yet; it may come again.
                self._supervisors.pop(host, None)
            return
        deadline = time.monotonic() + REASON_SECONDS
        while host not in self._reasons and not self._ending and time.monotonic() < deadline:
            threading.Event().wait(0.05)
        self._is_gone(host)

    def _is_gone(self, host: int) -> None:
        if self._ending:
            return
        reason = self._reasons.get(host, {})
        code = reason.get("died", 1)
        message = reason.get("message") or (
            exit_in_words(code) if "died" in reason else "its connection is closed"
        )
        hint = reason.get("hint") or "The region goes on by itself once all its hosts are there."
        leave(code if code in PERMANENT else 1, f"host {host} is gone: {message}", hint)

    # Orders

    @contextlib.contextmanager
    def order(self, name: str, **arguments: Any) -> Iterator[None]:
        """Announces what is about to be done; what is given inside belongs to it."""
        with self._lock:
            forgotten = []
            with contextlib.suppress(IndexError):
                while True:
                    forgotten.append(self._forgotten.popleft())
            message = {"order": name, "n": self._count, "with": arguments, "forget": forgotten}
            self._count += 1
            for connection in self._followers.values():
                self._send(connection, message)
            yield

    def give(self, host: int, values: np.ndarray, /, name: str = "", **arguments: Any) -> None:
        with self._lock:
            message = {"order": name, "with": arguments} if name else {}
            self._send(self._followers[host], message, values.reshape(-1).view(np.uint8))

    def forget(self, number: int) -> None:
        self._forgotten.append(number)

    def note_speed(self, host: int, seconds: float) -> None:
        self._speeds[host] = seconds

    def speeds(self) -> dict[int, float]:
        known = self._speeds.copy()
        return known if len(known) == self.terms.place.hosts else {}

    def unsaved(self) -> str:
        return self._unsaved

    def _send(self, connection: HostConnection, message: dict[str, Any], values: Any = b"") -> None:
        try:
            connection.send(message, values)
        except ConnectionClosed:
            self.explain("a host of the region is gone")

    # The end

    def close(self) -> None:
        """Lets the followers go, in order; their supervisors wait for the next generation."""
        self._ending = True
        with self._lock, contextlib.suppress(LinkError):
            for connection in self._followers.values():
                connection.send({"order": "end", "n": self._count, "with": {}, "forget": []})
        self._listener.close()
        for connection in [*self._supervisors.values()]:
            connection.close()

    def explain(self, otherwise: str) -> NoReturn:
        """Ends this process because of another: names it, if that becomes known soon."""
        threading.Event().wait(REASON_SECONDS + 1.0)  # The thread that watches it ends us.
        leave(1, otherwise)


def leave(code: int, message: str = "", hint: str | None = None) -> NoReturn:
    """Ends this process at once: JAX would wait for processes that are gone."""
    if message and not logs.log_fatal(message, hint):
        sys.stderr.write(f"error: {message}\n")
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def _hosts(numbers: list[int]) -> str:
    return f"host{'s' if len(numbers) > 1 else ''} {', '.join(map(str, numbers))}"


def _next_generation(folder: Path) -> str:
    """A name that no generation before it had, also where the folder was lost."""
    path = folder / GENERATION
    try:
        number = int(path.read_text().partition("-")[0]) + 1
    except (OSError, ValueError):
        number = 1
    name = f"{number}-{secrets.token_hex(4)}"
    with contextlib.suppress(OSError):
        keep_bytes(path, name.encode(), durable=False)
    return name
