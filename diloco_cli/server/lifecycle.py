"""The server's life: open, listen, serve, say goodbye.

    open the folder ─▶ replay ─▶ listen ─▶ address.json ─▶ … ─▶ drain ─▶ summary.json ─▶ gone

It ends by itself when the run is finished and everybody has heard so, with exit code 1 when every
region throws its work away again and again (rounds/divergence.py), and on SIGTERM, SIGINT,
`POST /v1/stop` or, started with a parent, when the parent is gone: regions are told, rounds that
are closing get published, what is recorded is flushed. A second signal ends it at once; nothing
acknowledged is lost either way.
"""

from __future__ import annotations

import asyncio
import gc
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import numpy as np

from diloco_cli.core.fragments import Fragment, Piece
from diloco_cli.errors import DilocoError, RunFailed
from diloco_cli.merge.outer_step import MergePlan, next_weights
from diloco_cli.observe.events import EventLog
from diloco_cli.server.build_status import build_summary
from diloco_cli.server.history import HistoryRecorder
from diloco_cli.server.http.asgi import Guarded, make_app
from diloco_cli.server.http.health import HealthPort
from diloco_cli.server.http.idle import IDLE_SECONDS
from diloco_cli.server.http.listener import bind, url_of
from diloco_cli.server.http.tls_reload import Certificates, TlsListener, refuse_open
from diloco_cli.server.recovery.start import Initial, open_coordinator
from diloco_cli.server.rounds.coordinator import Coordinator
from diloco_cli.server.settings import ServerSettings
from diloco_cli.server.terms import Build, build_plain
from diloco_cli.system.files import disk_errors, keep_bytes
from diloco_cli.system.malloc import release_compiler, return_memory
from diloco_cli.system.wakeup import stopping_signals
from diloco_cli.wire.codecs import codecs
from diloco_cli.wire.frame import Header, open_frame, pack

log = logging.getLogger(__name__)

ECHO_SECONDS = 0.1
"""`timeout` signals its child and then the child's group: that is one request, not two."""

LATE_LEASES = 30
"""For so many a run that has finished is served for members that have not heard of it."""

FOLDER_SECONDS = 5.0
"""Between two looks whether the server's folder is still there; each flush looks as well."""

SHUTDOWN_SECONDS = 5.0
"""Requests under way get this long to finish."""


def serve(
    settings: ServerSettings,
    folder: Path,
    initial: Initial,
    *,
    with_parent: bool = False,
    build: Build = build_plain,
) -> int:
    """Serves a run from its folder until it is finished or stopped; returns the exit code.

    `initial` makes the weights of version 0 and is called only if the folder has none;
    `settings` are those that the run began with, `build` makes the settings of later terms.
    With a parent, the end of standard input means the same as SIGTERM.
    """
    return_memory()
    threading.Thread(target=_get_ready, args=(settings,), name="get-ready", daemon=True).start()
    events = EventLog(folder / "events.jsonl", "server")
    try:
        return asyncio.run(_serve(settings, folder, initial, build, events, with_parent))
    finally:
        events.close()


def _get_ready(settings: ServerSettings) -> None:
    """Loads what contributions and merges need, while nobody waits for it yet."""
    size = 64
    header = Header.contribution(
        run="none",
        layout=settings.layout.digest,
        fragment=0,
        size=size,
        codec=settings.spec.wire.up,
        base=0,
        region=settings.spec.regions[0].name,
    )
    # A codec or a rule that does not work is reported when a contribution needs it.
    with suppress(Exception):
        zeros = np.zeros(size, np.float32)
        frame = open_frame(pack(header, zeros))
        plan = MergePlan(settings.merge, settings.outer, codecs.build(settings.spec.wire.down))
        fragment = Fragment(0, (Piece("none", 0, size, (size,), offset=0),))
        state = (zeros, settings.outer.start(size), zeros)
        next_weights(plan, fragment, [(1.0, frame)] * 2, state)
    release_compiler()


async def _serve(
    settings: ServerSettings,
    folder: Path,
    initial: Initial,
    build: Build,
    events: EventLog,
    with_parent: bool,
) -> int:
    began = time.monotonic()
    where = settings.spec.server
    certificates = Certificates(Path(where.certs)) if where.certs else None
    tokens = None
    if certificates:
        certificates.check()
        tokens = certificates.tokens(settings.spec.name)
    taken = bind(where.listen, prefer=_last_port(folder))
    url = url_of(taken, scheme="https" if certificates else "http")
    taken_port = int(taken.getsockname()[1])
    try:
        refuse_open(taken, certificates)
        recorder = HistoryRecorder(folder, len(settings.sizes), events.note)
        coordinator = open_coordinator(
            settings, folder / "server", initial, note=recorder.note, build=build
        )
    except BaseException:
        taken.close()
        raise
    _keep_counting(coordinator, folder)
    app = make_app(
        coordinator,
        events=events.path,
        url=lambda: url,
        tokens=tokens,
        history=recorder.history,
        expiries=certificates.expiries if certificates else dict,
    )
    health = None
    if where.health:
        try:
            health = HealthPort(coordinator.state, bind(where.health, key="server.health"))
        except BaseException:
            taken.close()
            raise
    idle = max(IDLE_SECONDS, 2 * where.lease)
    listener = TlsListener(app, taken, certificates, idle=idle)
    conducting: asyncio.Task[None] | None = None
    recording: asyncio.Task[None] | None = None
    watching: asyncio.Task[None] | None = None
    try:
        _watch_signals(coordinator)
        if with_parent:
            _watch_parent(coordinator)
        elif coordinator.state.finished_at is None:
            coordinator.late_leases = LATE_LEASES  # Members on other hosts may come back.
        await listener.start()
        if health:
            await health.start()
        conducting = asyncio.create_task(coordinator.run())
        recording = asyncio.create_task(recorder.run(coordinator))
        watching = asyncio.create_task(_watch_folder(coordinator))
        gc.freeze()  # What is loaded by now stays; there is no need to look through it ever again.
        _announce(folder, url)
        elsewhere = _from_elsewhere(where.listen, taken_port, certificates)
        _greet(coordinator, url, time.monotonic() - began, elsewhere)
        await _until_done(coordinator, listener)
        recorder.sample(coordinator)
        recording.cancel()  # It must not begin another write beside the last one.
        await recorder.keep()
        await _shut_down(coordinator, app, folder)
        # `diloco run` reads it in the summary; what ends with 1 it would start again.
        return 1 if coordinator.state.hopeless and not with_parent else 0
    finally:
        for task in filter(None, (recording, watching)):
            task.cancel()
        coordinator.state.close()
        if health:
            await health.end()
        await listener.end()
        if conducting:
            await conducting
        _address(folder).unlink(missing_ok=True)
        coordinator.state.store.close()
        app.audit.close()


async def _watch_folder(coordinator: Coordinator) -> None:
    """Ends a server whose journal is deleted or replaced under it, if nothing happens meanwhile."""
    state = coordinator.state
    while not state.closed:
        await asyncio.sleep(FOLDER_SECONDS)
        await state.commit.between_flushes(state.store.journal.check)


async def _until_done(coordinator: Coordinator, listener: TlsListener) -> None:
    """Waits for the end; a listener that ends before it would leave a server nobody hears."""
    done = asyncio.create_task(coordinator.done.wait())
    await asyncio.wait({done, listener.serving}, return_when=asyncio.FIRST_COMPLETED)
    if not done.done():
        done.cancel()
        coordinator.state.fail(RunFailed("The listener ended by itself."))


async def _shut_down(coordinator: Coordinator, app: Guarded, folder: Path) -> None:
    """Brings everything to rest and writes the summary."""
    state = coordinator.state
    if state.failure is None:
        await coordinator.publisher.settled()
        await coordinator.publisher.store_newest()
    state.close()
    deadline = time.monotonic() + SHUTDOWN_SECONDS
    while app.under_way and time.monotonic() < deadline:
        await asyncio.sleep(0.02)
    if state.failure is not None:
        raise _in_words(state.failure)
    await state.commit.close()
    if not _is_summed_up(folder):
        text = json.dumps(build_summary(coordinator).plain(), indent=2)
        path = folder / "summary.json"
        with disk_errors(path):
            keep_bytes(path, text.encode() + b"\n")
    log.info(f"{state.spec.name}: {state.phase} ({state.ledger.finished or state.stopping})")


def _is_summed_up(folder: Path) -> bool:
    """Whether the run was finished before: who serves its weights again adds nothing to it."""
    with suppress(OSError, ValueError, AttributeError):
        return json.loads((folder / "summary.json").read_bytes()).get("state") == "finished"
    return False


def _keep_counting(coordinator: Coordinator, folder: Path) -> None:
    """Goes on from what the last server had sent when it was stopped; the journal knows of less."""
    with suppress(OSError, ValueError, KeyError, TypeError, AttributeError):
        summary = json.loads((folder / "summary.json").read_bytes())
        if summary["run"] == coordinator.state.store.run:
            totals = coordinator.state.totals
            totals.bytes_down = max(totals.bytes_down, int(summary["wire"]["bytes_down"]))


def _in_words(failure: BaseException) -> BaseException:
    if isinstance(failure, DilocoError):
        return failure
    error = RunFailed(
        f"The server failed: {type(failure).__name__}: {failure}.",
        hint="Start it again with the same command; please report this.",
    )
    error.__cause__ = failure
    return error


def _from_elsewhere(listen: str, port: int, certificates: Certificates | None) -> str:
    """How other hosts reach a server that listens on every address."""
    if certificates is None or listen.rpartition(":")[0].strip("[]") not in ("", "0.0.0.0", "::"):
        return ""
    names = certificates.names()
    told = " or ".join(f"https://{name}:{port}" for name in names[:3])
    return f"; from other hosts {told}" if told else ""


def _greet(coordinator: Coordinator, url: str, seconds: float, elsewhere: str) -> None:
    state = coordinator.state
    recovered = state.ledger.outer_steps
    resumed = state.store.journal.last > bool(state.ledger.begun)
    what = f"resumed after {recovered} outer steps" if resumed else "begun"
    log.info(f"{state.spec.name} (run {state.store.run}) {what}, serving at {url}{elsewhere}")
    state.note(
        "server-started",
        url=url,
        pid=os.getpid(),
        recovered=recovered,
        seconds_taken=round(seconds, 3),
    )


def _watch_signals(coordinator: Coordinator) -> None:
    loop, heard = asyncio.get_running_loop(), []

    def hear(number: signal.Signals) -> None:
        if heard and loop.time() - heard[0] < ECHO_SECONDS:
            return
        if heard:
            # Everything acknowledged is on the disk; the next start replays it.
            os._exit(128 + number)
        heard.append(loop.time())
        log.info(f"{number.name}: stopping; a second signal stops at once")
        # Regions are not told to stop: they train on and find the next server here.
        coordinator.stop(f"{number.name} received", everyone=False)

    # Certificates and tokens are looked at every second; without a terminal SIGHUP asks for that.
    asked = stopping_signals(lambda: log.info("SIGHUP: certificates and tokens are up to date"))
    for number in asked:
        loop.add_signal_handler(number, hear, number)


def _watch_parent(coordinator: Coordinator) -> None:
    loop = asyncio.get_running_loop()

    def gone() -> None:
        log.info("the parent process is gone: stopping")
        coordinator.stop("its parent process is gone")

    threading.Thread(target=_wait_for_end, args=(loop, gone), daemon=True).start()


def _wait_for_end(loop: asyncio.AbstractEventLoop, gone: Callable[[], None]) -> None:
    try:
        while os.read(sys.stdin.fileno(), 4096):
            pass
    except (OSError, ValueError):
        pass
    with suppress(RuntimeError):  # The server may have ended by itself.
        loop.call_soon_threadsafe(gone)


def _address(folder: Path) -> Path:
    return folder / "server" / "address.json"


def _announce(folder: Path, url: str) -> None:
    """Says in `address.json` where the server listens; the file is removed when it ends."""
    path = _address(folder)
    with disk_errors(path):
        keep_bytes(path, json.dumps({"url": url, "pid": os.getpid()}).encode())


def _last_port(folder: Path) -> int:
    """The port of a server that was killed here: its regions still look for it there."""
    try:
        url = json.loads(_address(folder).read_bytes())["url"]
        return int(url.rsplit(":", 1)[1])
    except (OSError, ValueError, KeyError, IndexError, TypeError):
        return 0
