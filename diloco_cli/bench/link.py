"""How much of a link is left for frames?

    32 MB, 256 MB     bodies through our client and server, beside raw TLS over the same loopback
    1 Gbit/s, 50 ms   the share of an emulated line
    10 Mbit/s, 50 ms  heartbeats while an upload fills the line; resets every two seconds

Server, line and client live in processes of their own, as they do in a run. Bodies end in
a draft file of the server's own store; what it costs to make them durable and to look at
every number is a figure of its own. Bodies and raw TLS take turns, and the best of each
counts: what else the machine does then disturbs a figure and its limit alike. Processor
seconds are those of both sides; they say what a byte costs where others use the cores too.
Our side speaks HTTP/2 in the clear, as on one machine, and over TLS with certificates and
tokens, as between sites; the reference is encrypted either way, and the goals are the same.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import psutil

from diloco_cli.bench.figure import Figure
from diloco_cli.bench.support.children import child
from diloco_cli.bench.support.one_fragment_server import REGIONS, OneFragmentServer, stage
from diloco_cli.bench.support.raw_tls import raw_tls
from diloco_cli.chaos.emulator.proxy import emulated
from diloco_cli.errors import DilocoError
from diloco_cli.net.client import Client
from diloco_cli.net.credentials import NOBODY, Credentials
from diloco_cli.net.options import Options
from diloco_cli.net.transfer.upload import Source, Upload
from diloco_cli.run.doctor.probe import measure
from diloco_cli.wire import messages
from diloco_cli.wire.frame import DIGEST_BYTES
from diloco_cli.wire.messages import EPOCH_HEADER, PARTS_HEADER

UP_GOAL, DOWN_GOAL = 0.70, 0.80
LINE_GOAL = 0.85
HEARTBEAT_GOAL = 2.0
RESENT_GOAL = 1.3

FAST, SLOW = "1Gbit/50ms", "10Mbit/50ms"
BEAT = {
    "step": 0,
    "training": True,
    "stopping": False,
    "ended": 0,
    "fragments": [{"version": 0, "steps": 1.0}],
    "tokens": {fate: [0.0] for fate in ("trained", "applied", "pending", "refused", "discarded")},
}


def link_figures(
    url: str | None = None,
    *,
    quick: bool = False,
    repeat: int = 11,
    credentials: Credentials = NOBODY,
    say: Callable[[str], None] = lambda text: None,
) -> list[Figure]:
    """Measures the way to the server at `url`, or a server and links of our own.

    `quick` measures small bodies once: it shows that the measurement works, not what the
    machine can do.
    """
    if url is not None:
        return _to(url, say, credentials)
    bodies = (2_000_000, 4_000_000) if quick else (32_000_000, 256_000_000)
    figures: list[Figure] = []
    for size in bodies:
        with stage(size // 4 + size // 16, tls=True) as running:
            figures += _loopback(running, size, 1 if quick else repeat, say)
        with stage(size // 4 + size // 16) as running:
            figures += _loopback(running, size, 1 if quick else repeat, say)
            if size == bodies[0]:
                figures.append(_durable(running, say))
            if size == bodies[1]:
                figures += _line(running, size, 1 if quick else 3, say)
    with stage(400_000 if quick else 4_000_000) as running:
        figures.append(_heartbeats(running, say))
        figures.append(_resets(running, say))
    return figures


def _loopback(
    running: OneFragmentServer, size: int, repeat: int, say: Callable[[str], None]
) -> list[Figure]:
    """Bodies up and down, each beside raw TLS in turn, so that other load disturbs both."""
    moved: dict[str, list[Moved]] = {"raw": [], "up": [], "down": []}
    noise = os.urandom(size)
    with Client(running.url, Options(credentials=running.credentials)) as server, raw_tls() as raw:
        running.join(server)
        server.whole(0, 0)  # The server encodes a version when it is first asked for.
        for number in range(repeat + 1):
            body = _fresh(noise)
            turn = {
                "raw": _moved(lambda: raw(max(size, 64_000_000))),
                "up": _moved(partial(_sent, running, server, body)),
                "down": _moved(lambda: _fetched(server)),
            }
            _forget(running, server, body)
            if number:  # The first opens connections and finds the rate.
                for way, body_moved in turn.items():
                    moved[way].append(body_moved)
            rates = [round(each.rate / 1e6) for each in turn.values()]
            say(f"{size / 1e6:g} MB: raw TLS, up, down {rates} MB/s")
    over = "over" if running.url.startswith("https") else "without"
    name = f"{size / 1e6:g} MB body, HTTP/2 {over} TLS"
    best = {way: max(each.rate for each in all_) for way, all_ in moved.items()}
    spent = {way: sum(each.spent for each in all_) / len(all_) for way, all_ in moved.items()}
    return [
        _rate(f"{name}, up", best["up"], best["raw"], UP_GOAL),
        _rate(f"{name}, down", best["down"], best["raw"], DOWN_GOAL),
        Figure(f"{name}, up, processor", spent["up"], "s/GB", spent["raw"], lower=True),
        Figure(f"{name}, down, processor", spent["down"], "s/GB", spent["raw"], lower=True),
    ]


class Moved(NamedTuple):
    """One body: bytes per second, and processor seconds of all processes for a gigabyte."""

    rate: float
    spent: float


def _moved(act: Callable[[], float]) -> Moved:
    before, began = _processor(), time.monotonic()
    rate = act()
    size = rate * (time.monotonic() - began)
    # The kernel counts in hundredths; a small body takes less than one.
    return Moved(rate, max(_processor() - before, 0.01) / size * 1e9)


def _processor() -> float:
    """Processor seconds of this process and of those it started."""
    me = psutil.Process()
    return sum(sum(each.cpu_times()[:2]) for each in (me, *me.children(recursive=True)))


def _fresh(noise: bytes) -> bytes:
    """A body the server does not know: new where a frame has its digest."""
    return noise[:-DIGEST_BYTES] + os.urandom(DIGEST_BYTES)


def _sent(running: OneFragmentServer, server: Client, body: bytes) -> float:
    """Sends a body the way of a contribution, into the server's store; bytes per second.

    In one piece up to the size at which parts begin. It is no frame: the server says so
    when it has all of it, which ends the measurement before anything is decoded.
    """
    running.clock += 1
    path, headers, size = _path(running), _headers(running, server), len(body)
    began = time.monotonic()
    if size <= server.up.part_bytes:
        lane = server.lane(0)
        code = lane.once(
            "PUT",
            path,
            lambda response: response.status_code,
            body=body,
            headers=headers,
            seconds=server.up.seconds(size),
            answers=frozenset({400}),
        )
        assert code == 400, code
    else:
        upload = Upload(
            Source(body),
            path,
            lane=server.lane,
            throughput=server.up,
            headers=headers,
            answer=server.answer,
        )
        upload.send_missing()
    return size / (time.monotonic() - began)


def _forget(running: OneFragmentServer, server: Client, body: bytes) -> None:
    """Has the server find out that the body last sent is no frame, and remove it.

    It would remove it while the next one comes in, and that is no part of the next one's way.
    """
    server.lane(0).once(
        "PUT",
        _path(running),
        lambda response: None,
        headers={**_headers(running, server), PARTS_HEADER: body[-DIGEST_BYTES:].hex()},
        seconds=server.up.seconds(len(body)),
        answers=frozenset({400, 409}),  # It may be gone: a short one was in one piece.
    )


def _path(running: OneFragmentServer) -> str:
    return messages.contribution_path(0, REGIONS[0], 0, running.clock)


def _headers(running: OneFragmentServer, server: Client) -> dict[str, str]:
    return {**server.headers(), EPOCH_HEADER: str(running.epoch)}


def _fetched(server: Client) -> float:
    began = time.monotonic()
    size = server.fetch(messages.version_path(0, 0), lambda data: data.nbytes, most=1 << 40)
    return size / (time.monotonic() - began)


def _durable(running: OneFragmentServer, say: Callable[[str], None]) -> Figure:
    """A real frame, until it is on the disk, looked at, and decided."""
    with Client(running.url) as server:
        running.join(server)
        frame = running.frame(server.run().run)
        began = time.monotonic()
        server.submit(0, REGIONS[0], 0, running.clock, frame, epoch=running.epoch)
        rate = len(frame) / (time.monotonic() - began)
    disk = _disk(len(frame), running)
    say(f"durable {rate / 1e6:.0f} MB/s, the disk alone {disk / 1e6:.0f} MB/s")
    return _rate(f"{len(frame) / 1e6:.0f} MB frame, up, durable and checked", rate, disk)


def _disk(size: int, running: OneFragmentServer) -> float:
    data, path = os.urandom(size), running.folder / "disk"
    began = time.monotonic()
    with open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    took = time.monotonic() - began
    path.unlink()
    return size / took


def _line(
    running: OneFragmentServer, size: int, repeat: int, say: Callable[[str], None]
) -> list[Figure]:
    """A fast, long line: how much of it a body gets, after a first one has found its rate."""
    line, up, down, noise = 1e9 / 8, [], [], os.urandom(size)
    with _line_to(running, FAST) as url, Client(url) as server:
        running.join(server)
        for number in range(repeat + 1):
            rates = _sent(running, server, _fresh(noise)), _fetched(server)
            if number:
                up.append(rates[0])
                down.append(rates[1])
            say(f"{FAST}: up, down {[round(rate / 1e6, 1) for rate in rates]} of 125 MB/s")
    name = f"1 Gbit/s, 50 ms line, {size / 1e6:g} MB"
    return [
        _rate(f"{name}, up", statistics.median(up), line, LINE_GOAL),
        _rate(f"{name}, down", statistics.median(down), line, LINE_GOAL),
    ]


@contextlib.contextmanager
def _line_to(running: OneFragmentServer, link: str) -> Iterator[str]:
    """An emulated line in a process of its own."""
    ours, theirs = multiprocessing.Pipe()
    with child(_emulate, theirs, link, running.port):
        yield ours.recv()


def _emulate(pipe: Any, link: str, port: int) -> None:
    with emulated(link, "127.0.0.1", port) as proxy:
        pipe.send(proxy.url)
        pipe.recv()


def _heartbeats(running: OneFragmentServer, say: Callable[[str], None]) -> Figure:
    """Heartbeats, one after another, while a frame fills a slow line."""
    took: list[float] = []
    with (
        emulated(SLOW, "127.0.0.1", running.port) as proxy,
        Client(proxy.url) as bulk,
        Client(proxy.url) as control,
    ):
        running.join(control)
        thread = _submitting(running, bulk)
        while thread.is_alive():
            began = time.monotonic()
            control.heartbeat(REGIONS[0], {**BEAT, "epoch": running.epoch})
            took.append(time.monotonic() - began)
        thread.join()
    worst = statistics.quantiles(took, n=100)[98] if len(took) > 1 else took[0]
    say(f"{SLOW}: {len(took)} heartbeats, p99 {worst * 1000:.0f} ms")
    name = "10 Mbit/s line filled by an upload, heartbeat p99"
    return Figure(name, worst, "s", HEARTBEAT_GOAL, HEARTBEAT_GOAL, "value", lower=True)


def _resets(running: OneFragmentServer, say: Callable[[str], None]) -> Figure:
    """A frame over a slow line that breaks every connection every two seconds."""
    with (
        emulated(f"{SLOW}/reset=2s", "127.0.0.1", running.port) as proxy,
        Client(proxy.url) as server,
        Client(running.url) as direct,
    ):
        running.join(direct)
        before = proxy.traffic()
        thread = _submitting(running, server)
        thread.join()
        after = proxy.traffic()
    size, used = thread.size, after.up - before.up
    say(f"{SLOW}/reset=2s: {used / 1e6:.1f} MB for {size / 1e6:.1f}, {after.resets} resets")
    name = "10 Mbit/s line with a reset every 2 s, bytes sent"
    return Figure(name, used / 1e6, "MB", size / 1e6, RESENT_GOAL, lower=True)


class _Submitting(threading.Thread):
    """A frame on its way."""

    def __init__(self, running: OneFragmentServer, server: Client, frame: bytes) -> None:
        super().__init__(daemon=True)
        self._running, self._server, self._frame = running, server, frame
        self.size = len(frame)
        self._clock, self._failure = running.clock, None

    def run(self) -> None:
        try:
            self._server.submit(
                0, REGIONS[0], 0, self._clock, self._frame, epoch=self._running.epoch
            )
        except DilocoError as error:
            self._failure = error

    def join(self, timeout: float | None = None) -> None:
        super().join(timeout)
        if self._failure:
            raise self._failure


def _submitting(running: OneFragmentServer, server: Client) -> _Submitting:
    thread = _Submitting(running, server, running.frame(server.run().run))
    thread.start()
    return thread


def _to(url: str, say: Callable[[str], None], credentials: Credentials) -> list[Figure]:
    """What can be measured at somebody's server without taking part in its run."""
    way = measure(url, say, credentials=credentials)
    # The first answers of a connection, and the first encoding, are slower than the others.
    return [
        Figure("status, p50", way.round_trip, "s", min(way.trips)),
        _rate("largest fragment, down", way.rate / 8, max(way.rates)),
    ]


def _rate(name: str, value: float, reference: float, goal: float | None = None) -> Figure:
    """Bytes a second, in megabytes."""
    return Figure(name, value / 1e6, "MB/s", reference / 1e6, goal)
