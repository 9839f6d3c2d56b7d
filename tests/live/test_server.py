"""The server as a process with real sockets: same bits, nothing lost, a clean goodbye."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from diloco_cli.core.journal_records import Entry
from diloco_cli.errors import DilocoError
from diloco_cli.net.client import Client
from diloco_cli.net.options import ONCE, Options, Timeouts
from diloco_cli.server.http.asgi import make_app
from diloco_cli.server.http.listener import Listener, bind, url_of
from diloco_cli.server.recovery.start import open_coordinator
from diloco_cli.server.rounds.coordinator import Coordinator
from diloco_cli.wire.frame import open_frame
from tests import ROOT, SMALL_SERVER
from tests.server.harness import (
    NAMES,
    Bench,
    Region,
    close_server,
    initial,
    make_settings,
    make_spec,
    read_journal,
    replayed,
)

pytestmark = pytest.mark.live

ROUNDS = (
    (0, ("tokyo", "iowa", "paris")),
    (1, ("paris", "iowa", "tokyo")),
    (0, ("iowa", "paris", "tokyo")),
    (0, ("paris", "tokyo", "iowa")),
    (1, ("tokyo", "paris", "iowa")),
)
"""Which fragment is exchanged, and in which order the regions' frames arrive."""


class Process:
    """A small server in a process of its own."""

    def __init__(self, folder: Path, wrapper: tuple[str, ...] = (), **changes: Any) -> None:
        self.folder = folder
        folder.mkdir(exist_ok=True)
        self.log = open(folder / "log", "ab")  # noqa: SIM115
        self.child = subprocess.Popen(
            (*wrapper, sys.executable, *SMALL_SERVER, str(folder), json.dumps(changes)),
            stdin=subprocess.PIPE,
            stderr=self.log,
            cwd=ROOT,
        )

    @property
    def said(self) -> str:
        return (self.folder / "log").read_text()

    def url(self) -> str:
        """Waits until it listens; address.json appears only then."""
        while True:
            assert self.child.poll() is None, self.said
            with suppress(OSError, ValueError):
                address = json.loads((self.folder / "server" / "address.json").read_bytes())
                if address["pid"] == self.child.pid:
                    return address["url"]
            time.sleep(0.01)

    def end(self, *signals: signal.Signals, timeout: float = 30.0) -> int:
        for number in signals:
            self.child.send_signal(number)
        return self.child.wait(timeout)

    def close(self) -> None:
        self.child.kill()
        self.child.wait()
        assert self.child.stdin
        with suppress(OSError):
            self.child.stdin.close()
        self.log.close()


@contextmanager
def process(folder: Path, wrapper: tuple[str, ...] = (), **changes: Any) -> Iterator[Process]:
    running = Process(folder, wrapper, **changes)
    try:
        yield running
    finally:
        running.close()


@contextmanager
def in_this_process(folder: Path, spec: Any) -> Iterator[tuple[str, Coordinator]]:
    """The same server on real sockets, its state within reach; runs in a thread."""
    started: list[tuple[str, Coordinator, asyncio.AbstractEventLoop]] = []
    ready = threading.Event()

    async def main() -> None:
        coordinator = open_coordinator(make_settings(spec), folder / "server", initial)
        taken = bind(spec.server.listen)
        url = url_of(taken)
        app = make_app(coordinator, events=folder / "events.jsonl", url=lambda: url)
        listener = Listener(app, taken)
        await listener.start()
        started.append((url, coordinator, asyncio.get_running_loop()))
        ready.set()
        await coordinator.run()
        await listener.end()
        app.audit.close()
        await close_server(coordinator)

    thread = threading.Thread(target=lambda: asyncio.run(main()))
    thread.start()
    assert ready.wait(30)
    url, coordinator, loop = started[0]
    try:
        yield url, coordinator
    finally:
        loop.call_soon_threadsafe(coordinator.state.close)
        thread.join()


def join_all(server: Client, regions: dict[str, Region]) -> None:
    for region in regions.values():
        region.join_through(server)


def test_in_process_and_over_real_sockets_the_weights_are_the_same_bits(tmp_path):
    spec = make_spec(quorum=3, grace={"kind": "fixed", "seconds": 60.0})

    async def without_sockets() -> list[str]:
        bench = Bench(tmp_path / "bench", make_settings(spec))
        await bench.join()
        for fragment, order in ROUNDS:
            await bench.call(fragment)
            for name in order:
                await bench.send(name, fragment)
            await bench.settle()
        await close_server(bench.server)
        return bench.digests()

    settings = make_settings(spec)
    with in_this_process(tmp_path / "live", spec) as (url, coordinator), Client(url) as server:
        about = server.run()
        regions = {name: Region(name, settings, about.run) for name in NAMES}
        join_all(server, regions)
        for fragment, order in ROUNDS:
            steps = [0.0, 0.0]
            steps[fragment] = 12.0
            news = None
            for region in regions.values():
                news = server.heartbeat(region.name, region.beat(steps))
            assert news is not None
            while fragment not in news.calls:
                news = server.calls("iowa", after=news.n, epoch=1) or news
            for region in regions.values():
                server.heartbeat(region.name, region.beat())
            for name in order:
                region, frame = regions[name], regions[name].frame(fragment)
                base, clock = region.versions[fragment], region.clock
                assert server.submit(fragment, name, base, clock, frame, epoch=1).fate == "pending"
            latest = server.latest(fragment, after=regions["iowa"].versions[fragment])
            assert latest is not None and latest.members == tuple(sorted(order))
            for region in regions.values():
                region.adopt(fragment, latest.version, latest.merged[region.name])
        live = [newest.state.digest for newest in coordinator.state.weights.newest]
        whole = server.whole(0, 3)
        assert whole.header.published == coordinator.state.weights.newest[0].digest
    assert live == asyncio.run(without_sockets())


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with process(tmp_path_factory.mktemp("curl") / "run") as server:
        yield server.url()


def curl(*arguments: str) -> str:
    found = shutil.which("curl")
    if not found or "HTTP2" not in subprocess.check_output([found, "--version"], text=True):
        pytest.skip("needs a curl that speaks HTTP/2")
    return subprocess.check_output([found, "--silent", "--show-error", *arguments], text=True)


def test_curl_speaks_http2_and_http1_to_the_status(running):
    shown = ("--write-out", "\n%{http_version} %{http_code}")
    body, _, proof = curl("--http2-prior-knowledge", *shown, f"{running}/v1/status").rpartition(
        "\n"
    )
    assert proof == "2 200" and json.loads(body)["state"] == "waiting"
    assert curl("--http1.1", *shown, f"{running}/v1/status").endswith("\n1.1 200")


def test_curl_downloads_weights_that_safetensors_opens(running, tmp_path):
    import numpy as np
    from safetensors import safe_open

    file = tmp_path / "weights.safetensors"
    shown = ("--write-out", "%{http_version} %{http_code}", "--output", str(file))
    assert curl("--http2-prior-knowledge", *shown, f"{running}/v1/weights") == "2 200"
    with safe_open(file, "numpy") as opened:
        about = opened.metadata()
        assert about["versions"] == "[0, 0]"
        for name, values in initial().items():
            assert (opened.get_tensor(name) == np.asarray(values)).all()


def test_httpx_speaks_http2_with_prior_knowledge(running):
    with httpx.Client(http1=False, http2=True) as client:
        assert client.get(f"{running}/healthz").http_version == "HTTP/2"


def test_a_client_that_sleeps_does_not_hold_the_listener(tmp_path):
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def main() -> None:
        taken = bind("127.0.0.1:0")
        url = url_of(taken)
        listener = Listener(app, taken)
        await listener.start()
        with httpx.Client(http1=False, http2=True) as client:
            assert (await asyncio.to_thread(client.get, url)).status_code == 200
            await listener.end()
            assert listener._serving and listener._serving.done()
            assert not listener._serving.cancelled()

    asyncio.run(main())


def test_a_taken_port_is_a_sentence_and_exit_code_2(tmp_path):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with process(tmp_path / "run", server={"listen": f"127.0.0.1:{port}"}) as server:
            assert server.end() == 2
            assert f"127.0.0.1:{port} cannot be used: Address already in use" in server.said
            assert "hint: " in server.said and "Traceback" not in server.said


def test_a_port_shared_by_a_server_like_ours_counts_as_taken(tmp_path):
    with process(tmp_path / "one") as first:
        port = first.url().rpartition(":")[2]
        with process(tmp_path / "two", server={"listen": f"127.0.0.1:{port}"}) as second:
            assert second.end() == 2


def test_two_servers_cannot_have_one_folder(tmp_path):
    with process(tmp_path / "run") as first:
        first.url()
        with process(tmp_path / "run") as second:
            assert second.end() == 5
            assert f"is in use by another server (process {first.child.pid})" in second.said


@pytest.mark.parametrize("room", ["4k", "24k"])
def test_a_full_disk_at_the_start_is_a_sentence_and_exit_code_5(tmp_path, room):
    folder = tmp_path / "run" / "server"
    folder.mkdir(parents=True)
    small = f'mount -t tmpfs -o size={room} none {folder} && exec "$@"'
    wrapper = ("unshare", "--user", "--map-root-user", "--mount", "sh", "-c", small, "sh")
    if subprocess.run([*wrapper, "true"], capture_output=True).returncode:
        pytest.skip("needs a user namespace to mount a small disk in")
    with process(tmp_path / "run", wrapper) as server:
        assert server.end() == 5
        assert "There is no room left for" in server.said and "Traceback" not in server.said
        assert "hint: Free some space" in server.said


def test_a_failing_disk_ends_the_server_with_exit_code_5(tmp_path):
    with process(tmp_path / "run", bad_disk=True) as server:
        url, settings = server.url(), make_settings()
        with Client(url, Options(retry=ONCE)) as client:
            region = Region("paris", settings, client.run().run)
            with pytest.raises(DilocoError):
                join_all(client, {"paris": region})
        assert server.end() == 5
        assert "could not be made durable: Input/output error" in server.said
        assert not (tmp_path / "run" / "server" / "address.json").exists()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_server_gracefully(tmp_path, number):
    with process(tmp_path / "run", server={"lease": 0.5}) as server:
        url = server.url()
        with Client(url) as client, httpx.Client(http1=False, http2=True) as idle:
            assert idle.get(f"{url}/healthz").json()["ok"]  # A connection that sleeps.
            region = Region("paris", make_settings(), client.run().run)
            join_all(client, {"paris": region})
            assert not client.heartbeat("paris", region.beat()).stop
            address = json.loads((tmp_path / "run" / "server" / "address.json").read_bytes())
            assert address == {"url": url, "pid": server.child.pid}
            assert server.end(number) == 0  # Its region trains on and needs no goodbye.
        summary = json.loads((tmp_path / "run" / "summary.json").read_bytes())
        assert summary["state"] == "stopped" and summary["balanced"] is True
        assert not (tmp_path / "run" / "server" / "address.json").exists()
        assert "panic" not in server.said and "Traceback" not in server.said


def test_a_second_signal_ends_it_at_once(tmp_path):
    with process(tmp_path / "run", server={"lease": 600.0}) as server:
        url = server.url()
        with Client(url) as client:
            join_all(client, {"paris": Region("paris", make_settings(), client.run().run)})
            client.stop()  # It now waits for the region's goodbye.
        server.child.send_signal(signal.SIGTERM)
        while "SIGTERM: stopping" not in server.said:
            assert server.child.poll() is None
        while server.child.poll() is None:  # An echo of the first does not count.
            server.child.send_signal(signal.SIGTERM)
            time.sleep(0.02)
        assert server.child.wait() == 143


def test_two_signals_in_one_moment_are_one_request(tmp_path):
    """`timeout` sends one to its child and another to the child's group."""
    with process(tmp_path / "run", server={"lease": 0.5}) as server:
        server.url()
        server.child.send_signal(signal.SIGTERM)
        server.child.send_signal(signal.SIGINT)
        assert server.child.wait(30) == 0
        assert "stopped (SIG" in server.said


def test_without_its_parent_it_stops(tmp_path):
    with process(tmp_path / "run", with_parent=True) as server:
        server.url()
        assert server.child.stdin
        server.child.stdin.close()
        assert server.end() == 0


def test_a_request_to_stop_ends_it(tmp_path):
    with process(tmp_path / "run") as server:
        with Client(server.url()) as client:
            assert client.stop().state == "stopped"
        assert server.end() == 0


class Driver(threading.Thread):
    """A region that sends as fast as it may, through whatever happens to the server."""

    def __init__(self, region: Region, url: Callable[[], str]) -> None:
        super().__init__(name=region.name)
        self.region, self.where = region, url
        self.over = threading.Event()
        self.acknowledged: dict[str, bytes] = {}
        self.frames: list[bytes] = []
        self.flying: dict[int, bytes] = {}
        self.wrong: list[str] = []

    def run(self) -> None:
        while not self.over.is_set():
            try:
                with self._connected() as server:
                    while not self.over.is_set():
                        self._turn(server)
            except DilocoError:
                # The server is dead or not yet back: once more, but leave it the processor.
                self.over.wait(0.1)
            except BaseException as error:
                self.wrong.append(repr(error))
                return

    def _connected(self) -> Client:
        options = Options(Timeouts(connect=1.0, answer=5.0), ONCE)
        return Client(self.where(), options, run=self.region.run)

    def _turn(self, server: Client) -> None:
        region = self.region
        free = [0.0 if f in self.flying else 12.0 for f in range(len(region.versions))]
        news = server.heartbeat(region.name, region.beat(free))
        for fragment, version in enumerate(news.versions):
            if version > region.versions[fragment]:
                self._adopt(server, fragment)
        for fragment in news.calls:
            if fragment not in self.flying:
                self.flying[fragment] = region.frame(fragment)
                self.frames.append(self.flying[fragment])
        for fragment in list(self.flying):
            self._send(server, fragment)

    def _send(self, server: Client, fragment: int) -> None:
        frame = self.flying[fragment]
        about = open_frame(frame)
        base, clock = about.header.base, about.header.clock
        answer = server.submit(
            fragment, self.region.name, base, clock, frame, epoch=self.region.epoch
        )
        if answer.fate in ("pending", "merged"):
            self.acknowledged[about.digest] = frame
        else:
            self.wrong.append(f"{self.region.name} {fragment} {base}-{clock}: {answer}")
            del self.flying[fragment]

    def _adopt(self, server: Client, fragment: int) -> None:
        latest = server.latest(fragment)
        assert latest is not None
        merged = latest.merged.get(self.region.name, "")
        before = self.region.prev[fragment]
        self.region.adopt(fragment, latest.version, merged)
        if merged != before:
            del self.flying[fragment]


def test_nothing_acknowledged_is_lost_when_the_server_is_killed_again_and_again(tmp_path):
    rng = random.Random(11)
    folder, kills = tmp_path / "run", 8
    changes: dict[str, Any] = {"grace": {"kind": "fixed", "seconds": 0.02}}
    settings = make_settings(make_spec(**changes))
    server = Process(folder, **changes)
    drivers: list[Driver] = []
    try:
        with Client(server.url()) as client:
            regions = {name: Region(name, settings, client.run().run) for name in NAMES}
            join_all(client, regions)
        url = server.url()
        drivers = [Driver(region, lambda: url) for region in regions.values()]
        for driver in drivers:
            driver.start()
        for _ in range(kills):
            # Only one frame of a region and fragment waits, so these need rounds to be merged.
            enough = sum(len(driver.acknowledged) for driver in drivers) + 3
            until = time.monotonic() + rng.uniform(0.05, 0.4)
            while (
                sum(len(driver.acknowledged) for driver in drivers) < enough
                or time.monotonic() < until
            ):
                assert not any(driver.wrong for driver in drivers), [d.wrong for d in drivers]
                time.sleep(0.002)
            server.end(signal.SIGKILL)
            server.close()
            server = Process(folder, **changes)
            assert server.url() == url, "it comes back where it was"
    finally:
        for driver in drivers:
            driver.over.set()
        for driver in drivers:
            driver.join()
        server.close()

    assert [driver.wrong for driver in drivers] == [[], [], []]
    frames = [frame for driver in drivers for frame in driver.frames]
    acknowledged = {digest for driver in drivers for digest in driver.acknowledged}
    records = read_journal(folder)
    accepted = [r["receipt"]["digest"] for r in records if r["kind"] == "decided"]
    assert acknowledged <= set(accepted) and len(accepted) == len(set(accepted))
    assert not [r for r in records if r["kind"] == "dropped"]
    merged = [each["receipt"]["digest"] for each in merged_once(records)]
    assert len(merged) == len(set(merged)) > kills
    states = replayed(settings, folder, frames)
    assert [state.digest for state in states] == on_record(records)


def merged_once(records: list[Entry]) -> Iterator[Entry]:
    """The decisions whose contributions were published, as often as they were."""
    waiting: dict[tuple[int, str], Entry] = {}
    for record in records:
        if record["kind"] == "decided":
            about = record["receipt"]
            waiting[about["fragment"], about["region"]] = record
        elif record["kind"] == "published":
            for region in record["members"]:
                yield waiting[record["fragment"], region]


def on_record(records: list[Entry]) -> list[str]:
    """Digests of the newest versions as the journal has them: not every version is a file."""
    newest = {r["fragment"]: r["state"] for r in records if r["kind"] == "published"}
    return [digest for _, digest in sorted(newest.items())]


@pytest.mark.parametrize("with_parent", [False, True])
def test_a_run_that_nothing_comes_of_ends_with_1_and_says_why(tmp_path, with_parent):
    """Under `diloco run` with 0: it reads why in the summary, and restarts what ends with 1."""
    settings = make_settings(make_spec())
    divergence = {"times": 20, "tokens": 9.0, "step": 1, "seconds": 1.0, "published": False}
    said: dict[str, Any] = {"divergence": {**divergence, "why": "the loss was not finite"}}
    with process(tmp_path, with_parent=with_parent) as running, Client(running.url()) as server:
        regions = {name: Region(name, settings, server.run().run) for name in NAMES}
        join_all(server, regions)
        for region in regions.values():
            server.heartbeat(region.name, region.beat(**said))
        while not server.heartbeat("iowa", regions["iowa"].beat(**said)).stop:
            time.sleep(0.01)
        for region in regions.values():
            server.heartbeat(region.name, region.beat(stopping=True))
        assert running.end() == (0 if with_parent else 1)
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["state"] == "stopped" and "is thrown away" in summary["hopeless"]
    assert summary["hopeless"] in running.said
