"""Long bodies get through whatever the link does, once and to the bit; short calls never wait."""

from __future__ import annotations

import logging
import socket
import statistics
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from diloco_cli.bench.link import link_figures
from diloco_cli.bench.support.one_fragment_server import REGIONS, OneFragmentServer, stage
from diloco_cli.chaos.emulator.proxy import Proxy, emulated
from diloco_cli.errors import LinkError, WireError
from diloco_cli.net.client import Client, FencedError
from diloco_cli.net.options import Backend, Options, Retry, Timeouts
from diloco_cli.server.http.listener import bind
from diloco_cli.wire.frame import open_frame
from diloco_cli.wire.messages import Answer
from tests.chaos.emulator.link_client import wait_until

pytestmark = pytest.mark.live

REGION = REGIONS[0]
VALUES = 1_200_000
"""Of the fragment: a frame has 4 MB."""

PART = 700_000


@pytest.fixture(scope="module")
def running() -> Iterator[OneFragmentServer]:
    with stage(VALUES) as made:
        yield made


@pytest.fixture(params=["pyreqwest", "httpx"])
def backend(request) -> Backend:
    return request.param


class Bench:
    """A region that sends fresh frames through a link."""

    def __init__(self, running: OneFragmentServer, **options: Any) -> None:
        self.running, self.options = running, options
        with Client(running.url) as client:
            running.join(client)
            self.run = client.run().run
        self.data = running.frame(self.run, seed=running.clock)
        self.clock = running.clock

    def client(self, url: str | None = None, **changes: Any) -> Client:
        options = Options(**{"part_bytes": PART, **self.options, **changes})
        client = Client(url or self.running.url, options, run=self.run)
        client.run()
        return client

    def submit(self, client: Client, **said: Any) -> Answer:
        about = {"clock": self.clock, "frame": self.data, "epoch": self.running.epoch, **said}
        return client.submit(0, REGION, 0, **about)

    def kept(self) -> set[str]:
        return {path.name for path in (self.running.folder / "server" / "payloads").iterdir()}

    @property
    def name(self) -> str:
        return f"{open_frame(self.data).digest}.frame"


@pytest.fixture
def bench(running, backend) -> Bench:
    return Bench(running, backend=backend)


def linked(running: OneFragmentServer, link: str) -> Proxy:
    return emulated(link, "127.0.0.1", running.port)


def decided(answer: Answer) -> bool:
    """Whether the server took a frame for what it is; only the first of a region is merged."""
    return answer.fate in ("pending", "foreign")


def _note(done: list[Any], act: Any) -> None:
    try:
        done.append(act())
    except Exception as error:
        done.append(error)


def test_a_frame_in_parts_arrives_whole(bench):
    with bench.client() as client:
        first = bench.submit(client)
        assert decided(first)
        assert not any("draft" in name for name in bench.kept())


def test_the_same_frame_again_gets_the_recorded_answer_without_its_bytes(running, backend):
    with stage(VALUES) as fresh:
        bench = Bench(fresh, backend=backend)
        with linked(fresh, "unlimited/0ms") as proxy, bench.client(proxy.url) as client:
            assert bench.submit(client).fate == "pending"
            assert bench.kept() == {bench.name}
            before = proxy.up_bytes
            again = bench.submit(client)
            assert (again.fate, again.recorded) == ("pending", True)
            assert proxy.up_bytes - before < 20_000


def test_a_broken_upload_goes_on_where_it_was(bench, running):
    few: dict[str, Any] = {"lanes": 1, "part_bytes": 300_000}  # No more than this is on the way.
    with linked(running, "40Mbit/10ms") as proxy:
        with bench.client(proxy.url, retry=Retry(tries=1), **few) as client:
            done: list[Any] = []
            thread = threading.Thread(target=_note, args=(done, lambda: bench.submit(client)))
            thread.start()
            wait_until(proxy, lambda traffic: traffic.up_arrived > 2_200_000)
            proxy.cut(refuse=True)
            thread.join(60)
            assert isinstance(done[0], LinkError)
        proxy.heal()
        before = proxy.up_bytes
        with bench.client(proxy.url) as other:
            assert decided(bench.submit(other))
        assert proxy.up_bytes - before < len(bench.data) - 1_000_000


def test_resets_every_two_seconds_cost_little(running, backend):
    bench = Bench(running, backend=backend)
    with linked(running, "10Mbit/50ms/reset=2s") as proxy, bench.client(proxy.url) as client:
        before = proxy.traffic()
        assert decided(bench.submit(client))
        traffic = proxy.traffic()
        assert traffic.resets >= 1
        assert traffic.up - before.up < 1.3 * len(bench.data)


def test_a_download_never_fetches_a_byte_twice(bench, running):
    one: dict[str, Any] = {"part_bytes": 32_000_000}  # One range, which breaks in its middle.
    with linked(running, "20Mbit/20ms") as proxy, bench.client(proxy.url, **one) as client:
        done: list[Any] = []
        before = proxy.down_bytes
        thread = threading.Thread(target=_note, args=(done, lambda: client.whole(0, 0)))
        thread.start()
        for part in (1, 2, 3):
            wait_until(proxy, lambda t, n=part: t.down_arrived > before + n * 900_000)
            proxy.reset_all()
        thread.join(60)
        with bench.client() as direct:
            whole = direct.whole(0, 0)
        assert done[0].digest == whole.digest
        on_the_way = 3 * 500_000
        """What a reset throws away: the queues of the link and of both kernels."""
        assert proxy.down_bytes - before < len(whole.data) + on_the_way


def test_a_download_that_failed_for_good_goes_on_later(bench, running):
    with (
        linked(running, "20Mbit/20ms") as proxy,
        bench.client(proxy.url, retry=Retry(tries=1)) as client,
    ):
        done: list[Any] = []
        thread = threading.Thread(target=_note, args=(done, lambda: client.whole(0, 0)))
        thread.start()
        wait_until(proxy, lambda traffic: traffic.down_arrived > 2_500_000)
        proxy.cut(refuse=True)
        thread.join(60)
        assert isinstance(done[0], LinkError)
        proxy.heal()
        before = proxy.down_bytes
        found = client.whole(0, 0)
        assert proxy.down_bytes - before < len(found.data) - 1_000_000


def test_a_pull_that_breaks_off_goes_on_where_it_was(bench, running, tmp_path):
    with linked(running, "20Mbit/20ms") as proxy, bench.client(proxy.url) as client:
        before, done = proxy.down_bytes, []
        pull = partial(client.weights, tmp_path / "model.safetensors")
        thread = threading.Thread(target=_note, args=(done, pull))
        thread.start()
        wait_until(proxy, lambda traffic: traffic.down_arrived > before + 2_500_000)
        proxy.reset_all()
        thread.join(60)
        assert done[0]["run"] == bench.run
        size = (tmp_path / "model.safetensors").stat().st_size
        assert size > 4 * VALUES and proxy.down_bytes - before < size + 1_000_000


def test_a_server_killed_in_mid_upload_gets_only_what_it_does_not_have(backend):
    with stage(VALUES) as running:
        bench = Bench(running, backend=backend)
        patient = Retry(tries=40, first=0.1, most=0.3)
        few: dict[str, Any] = {"lanes": 1, "part_bytes": 300_000}
        with (
            linked(running, "40Mbit/10ms") as proxy,
            bench.client(proxy.url, retry=patient, **few) as client,
        ):
            done: list[Any] = []
            before = proxy.up_bytes
            thread = threading.Thread(target=_note, args=(done, lambda: bench.submit(client)))
            thread.start()
            wait_until(proxy, lambda traffic: traffic.up_arrived > 2_800_000)
            running.restart()
            thread.join(250)
            assert not isinstance(done[0], Exception), done[0]
            assert done[0].fate == "pending"
            # Not more than what was on the way, twice: once for each part that broke.
            assert proxy.up_bytes - before < len(bench.data) + 1_300_000
        assert bench.kept() == {bench.name}
        assert list((running.folder / "server" / "parts").iterdir()) == []


def test_a_frame_longer_than_its_fragment_is_refused_before_it_is_read(bench, running):
    with linked(running, "unlimited/0ms") as proxy, bench.client(proxy.url) as client:
        before = proxy.up_bytes
        with pytest.raises(WireError, match="at most"):
            bench.submit(client, frame=bytes(12_000_000))
        assert proxy.up_bytes - before < 12_000_000 / 2


def test_another_epoch_is_fenced(bench):
    with bench.client() as client, pytest.raises(FencedError):
        bench.submit(client, epoch=bench.running.epoch - 1)


def test_a_damaged_frame_leaves_nothing_behind(bench):
    middle = len(bench.data) // 2
    damaged = bench.data[:middle] + b"?" + bench.data[middle + 1 :]
    with bench.client() as client:
        with pytest.raises(WireError, match=r"hash|digest"):
            bench.submit(client, frame=damaged)
        assert not any("draft" in name for name in bench.kept())
        assert decided(bench.submit(client))


def test_heartbeats_do_not_wait_for_an_upload(running):
    bench = Bench(running)
    beat = {
        "epoch": running.epoch,
        "step": 0,
        "training": True,
        "stopping": False,
        "ended": 0,
        "fragments": [{"version": 0, "steps": 1.0}],
        "tokens": {
            fate: [0.0] for fate in ("trained", "applied", "pending", "refused", "discarded")
        },
    }
    took = []
    with (
        linked(running, "10Mbit/50ms") as proxy,
        bench.client(proxy.url) as bulk,
        bench.client(proxy.url) as control,
    ):
        done: list[Any] = []
        thread = threading.Thread(target=_note, args=(done, lambda: bench.submit(bulk)))
        thread.start()
        while thread.is_alive():
            began = time.monotonic()
            control.heartbeat(REGION, beat)
            took.append(time.monotonic() - began)
        assert decided(done[0])
    assert len(took) >= 10
    assert statistics.quantiles(took, n=100)[98] < 2.0


def test_an_upload_keeps_to_its_rate_limit(running, backend):
    bench = Bench(running, backend=backend)
    with bench.client(rate_limit=20e6) as client:
        began = time.monotonic()
        assert decided(bench.submit(client))
        assert time.monotonic() - began > 0.9 * len(bench.data) * 8 / 20e6


def test_a_link_that_falls_silent_is_given_up_after_a_time_that_follows_from_its_rate(
    running, caplog
):
    caplog.set_level(logging.INFO)
    bench = Bench(running)
    with linked(running, "100Mbit/2ms") as proxy:
        options: dict[str, Any] = {
            "timeouts": Timeouts(answer=0.3),
            "retry": Retry(tries=1),
        }
        with bench.client(proxy.url, **options) as client:
            done: list[Any] = []
            thread = threading.Thread(target=_note, args=(done, lambda: bench.submit(client)))
            thread.start()
            wait_until(proxy, lambda traffic: traffic.up_arrived > 1_800_000)
            proxy.cut()
            began = time.monotonic()
            thread.join(60)
            assert isinstance(done[0], LinkError)
            assert time.monotonic() - began < 20
        assert any("given up after" in line for line in caplog.messages)


def test_the_end_of_an_answer_never_waits_for_an_acknowledgement():
    with bind("127.0.0.1:0") as taken, socket.create_connection(taken.getsockname()):
        accepted, _ = taken.accept()
        with accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_a_file_is_sent_as_it_was_when_it_was_opened(bench, running, tmp_path: Path):
    file, other = tmp_path / "0.frame", tmp_path / "other"
    file.write_bytes(bench.data)
    other.write_bytes(bytes(len(bench.data)))
    with linked(running, "40Mbit/10ms") as proxy, bench.client(proxy.url) as client:
        done: list[Any] = []
        act = partial(bench.submit, client, frame=file)
        thread = threading.Thread(target=_note, args=(done, act))
        thread.start()
        wait_until(proxy, lambda traffic: traffic.up_arrived > 1_000_000)
        other.replace(file)
        thread.join(60)
        assert decided(done[0])


def test_the_benchmark_measures_every_figure_of_its_goals():
    figures = link_figures(quick=True)
    assert {each.goal for each in figures} == {None, 0.7, 0.8, 0.85, 1.3, 2.0}
    assert all(each.value > 0 and (each.reference or 0) > 0 for each in figures)


def test_the_benchmark_measures_the_way_to_a_server_that_runs(running):
    names = {each.name for each in link_figures(url=running.url)}
    assert names == {"status, p50", "largest fragment, down"}
