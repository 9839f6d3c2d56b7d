"""The machine of the server: starts its real life, kills it, cuts its power, starts it again."""

from __future__ import annotations

import asyncio
import contextvars
import itertools
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import starlette.responses

from diloco_cli.errors import StoreError
from diloco_cli.server import lifecycle
from diloco_cli.server.intake import partial_files
from diloco_cli.server.recovery.start import open_coordinator
from diloco_cli.server.rounds.coordinator import Coordinator
from diloco_cli.server.settings import ServerSettings
from diloco_cli.server.store import run_identity
from diloco_cli.server.terms import build_plain
from diloco_cli.system import files as files
from tests.verify.dst.disk import Disk
from tests.verify.dst.loop import BEGIN, Life, Loop

Trace = Callable[..., None]


@dataclass
class Deaths:
    """How the server dies: at a step of its disk, or at a moment."""

    share: float = 0.0
    """Of the disk's steps."""
    power: float = 0.5
    """Share of deaths that are power cuts."""
    steps: set[int] = field(default_factory=set)
    """Steps of the disk, counted from the first, at which it dies for certain."""
    cut_after: float | None = None
    """Seconds after the second start within which the power goes."""


def _silent(message: str) -> None:
    """In the place of the server's log."""


class Host:
    """Where the server runs."""

    def __init__(
        self,
        loop: Loop,
        disk: Disk,
        rng: Random,
        settings: ServerSettings,
        trace: Trace,
        initial: Callable,
    ) -> None:
        self.loop, self.disk, self.rng, self.settings = loop, disk, rng, settings
        self.trace, self.initial = trace, initial
        self.outside = contextvars.copy_context()
        self.deaths = Deaths()
        self.count: Counter[str] = Counter()
        self.life: Life | None = None
        self.app: Any = None
        self.coordinator: Coordinator | None = None
        self.skew = 0.0
        """Of the wall clock."""
        self.over: asyncio.Future[None] = loop.create_future()
        self.on_open: Callable[[Coordinator], None] = lambda coordinator: None
        self.on_crash: Callable[[bool], None] = lambda power: None
        self.on_reply: Callable[[Any, Any], None] = lambda exchange, reply: None
        self.problem: BaseException | None = None
        self.steps = 0
        disk.step = self._step

    def start(self) -> None:
        """Turns the machine on."""
        if self.over.done() or (self.life and not self.life.dead):
            return
        self.life = Life("server")
        self.count["starts"] += 1
        self.trace("start")
        if self.count["starts"] == 2 and (after := self.deaths.cut_after) is not None:
            cut = partial(self.crash, power=True)
            self.loop.call_later(self.rng.uniform(0.5, after), cut, context=self.outside)
        task = self.life.task(self.loop, self._live())
        task.add_done_callback(self._ended, context=self.outside)

    async def _live(self) -> int:
        events: Any = SimpleNamespace(note=self._note, path=self.disk.root / "events.jsonl")
        return await lifecycle._serve(
            self.settings, self.disk.root, self.initial, build_plain, events, with_parent=False
        )

    def _note(self, kind: str, **fields: Any) -> None:
        if kind not in ("fenced",):
            told = {key: value for key, value in fields.items() if key not in ("why", "pid")}
            self.trace(kind, **told)

    def _ended(self, task: asyncio.Task[int]) -> None:
        """The server went by itself: finished, stopped, or failed."""
        life = self.life
        if task.cancelled() or life is None or life.dead:
            return
        error = task.exception()
        state = self.coordinator.state if self.coordinator else None
        self.trace("ended", error=repr(error) if error else "")
        if error is not None and not self._is_expected(error):
            self._give_up(error)
        life.end()
        self.disk.let_go()
        self.drop_app()
        if state and state.ledger.finished and error is None:
            self.over.set_result(None)
        else:
            self.count["failed" if error else "stopped"] += 1
            self.loop.call_later(self.rng.uniform(0.1, 3), self.start, context=self.outside)

    def _is_expected(self, error: BaseException) -> bool:
        """A disk that fails may end the server, never anything else."""
        injected = self.disk.count["EIO"] + self.disk.count["ENOSPC"]
        return isinstance(error, StoreError) and injected > 0

    def _give_up(self, error: BaseException) -> None:
        self.problem = self.problem or error
        if not self.over.done():
            self.over.set_exception(error)

    # Death

    def _step(self, what: str) -> None:
        self.steps += 1
        deaths = self.deaths
        if self.steps in deaths.steps or (deaths.share and self.rng.random() < deaths.share):
            self.crash()
            self.disk._check_alive()

    def crash(self, *, power: bool | None = None) -> None:
        """Kills the server here and now."""
        life = self.life
        if life is None or life.dead or self.over.done():
            return
        power = self.rng.random() < self.deaths.power if power is None else power
        self.count["power cuts" if power else "kills"] += 1
        self.trace("power cut" if power else "killed", step=self.steps)
        self.drop_app()
        life.end()
        self.on_crash(power)
        try:
            self.disk.cut_power() if power else self.disk.let_go()
        except Exception as error:  # In a thread that is dead by now nobody would hear it.
            self._give_up(error)
        self.loop.call_later(self.rng.uniform(0.1, 4), self.start, context=self.outside)

    def drop_app(self) -> None:
        """Closes what a dead process does not keep open; requests it left behind write nothing."""
        if self.app:
            self.app.audit.close()
            self.app.audit.addFilter(lambda record: False)
        self.app = None

    def stop(self) -> None:
        """SIGTERM."""
        if self.coordinator and self.life and not self.life.dead and self.app:
            self.count["SIGTERM"] += 1
            self.trace("SIGTERM")
            self.life.context.copy().run(
                partial(self.coordinator.stop, f"{signal.SIGTERM.name} received", everyone=False)
            )

    def answered(self, exchange: Any, reply: Any) -> None:
        self.on_reply(exchange, reply)

    # Seams

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """Puts this machine's clock, port and chance where the server looks for the real ones."""
        fixed = {
            (lifecycle, "time"): SimpleNamespace(monotonic=self.loop.time),
            (lifecycle, "bind"): lambda listen, prefer=0: SimpleNamespace(
                close=lambda: None, getsockname=lambda: ("server", 1)
            ),
            (lifecycle, "url_of"): lambda taken, scheme: f"{scheme}://server:1",
            (lifecycle, "refuse_open"): lambda taken, certificates: None,
            (lifecycle, "TlsListener"): partial(Listener, self),
            (lifecycle, "_watch_signals"): lambda coordinator: None,
            (lifecycle, "log"): SimpleNamespace(info=_silent, warning=_silent),
            (lifecycle, "open_coordinator"): self._open,
            (run_identity, "secrets"): SimpleNamespace(
                token_hex=lambda n: self.rng.randbytes(n).hex()
            ),
            (partial_files, "secrets"): SimpleNamespace(
                token_hex=lambda n: self.rng.randbytes(n).hex()
            ),
            (files, "_count"): itertools.count(),
            (starlette.responses, "iterate_in_threadpool"): _one_by_one,
        }
        patches = [patch.object(where, name, what) for (where, name), what in fixed.items()]
        for each in patches:
            each.start()
        try:
            yield
        finally:
            for each in patches:
                each.stop()

    def wall(self) -> float:
        return 1.7e9 + self.loop.time() - BEGIN + self.skew

    def _open(
        self, settings: ServerSettings, folder: Path, initial: Any, **options: Any
    ) -> Coordinator:
        self.coordinator = None
        self.coordinator = open_coordinator(
            settings, folder, initial, clock=self.loop.time, wall=self.wall, **options
        )
        try:
            self.on_open(self.coordinator)
        except Exception as error:
            self._give_up(error)
            raise
        return self.coordinator


class Listener:
    """In the place of the one that listens on a socket."""

    def __init__(self, host: Host, app: Any, *_: Any, **__: Any) -> None:
        self._host, self._app = host, app
        self.serving: asyncio.Future[None] = host.loop.create_future()

    async def start(self) -> None:
        self._host.app = self._app

    async def end(self) -> None:
        self._host.app = None
        if not self.serving.done():
            self.serving.cancel()


async def _one_by_one(pieces: Any) -> Any:
    loop = asyncio.get_running_loop()
    while (piece := await loop.run_in_executor(None, next, pieces, None)) is not None:
        yield piece
