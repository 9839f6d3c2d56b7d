"""A schedule follows from its seed, strikes real processes and links, and is ended at the end."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest

from diloco_cli.chaos.inflict import EmulatedLinks, FaultInflictor, InflictedFault, trainer_pid
from diloco_cli.launch import Role
from diloco_cli.launch.subprocesses import LocalLauncher, LocalProcess
from diloco_cli.launch.supervise import Patience, Supervisor
from diloco_cli.sim.faults import Fault, load, planned, save
from diloco_cli.spec.schema import ChaosSpec

REGIONS = ["paris", "tokyo", "iowa"]


def spec(*faults: dict, **more) -> ChaosSpec:
    return ChaosSpec.model_validate({"seconds": 1000, "faults": faults, **more})


# Drawing


MIXED = (
    {"kind": "kill-trainer", "per_hour": 200},
    {"kind": "kill-trainer", "per_hour": 200, "shape": 0.7},
    {"kind": "kill-server", "every": 300, "duration": 60},
    {"kind": "narrow", "every": 100, "at": 20, "duration": 10, "link": "1Mbit/200ms"},
    {"kind": "slow", "region": "tokyo", "at": 7, "duration": 5, "factor": 3},
    {"kind": "kill-server", "per_hour": 30},
)


def test_the_same_seed_draws_the_same_schedule_and_a_file_gives_it_back(tmp_path: Path):
    drawn = planned(spec(*MIXED, seed=3), REGIONS)
    assert drawn == planned(spec(*MIXED, seed=3), REGIONS)
    assert drawn != planned(spec(*MIXED, seed=4), REGIONS)
    save(drawn, tmp_path / "schedule.json")
    assert load(tmp_path / "schedule.json", REGIONS) == drawn


def test_entries_alike_strike_apart():
    twice = planned(spec(*MIXED[:1] * 2), REGIONS)
    assert len({(fault.time, fault.region) for fault in twice}) == len(twice) > 50


def test_a_rate_is_that_of_all_regions_together():
    long = spec({"kind": "kill-trainer", "per_hour": 360}, seconds=100_000)
    assert len(planned(long, REGIONS)) == pytest.approx(10_000, rel=0.03)
    own = planned(
        spec({"kind": "pause", "region": "iowa", "per_hour": 360, "duration": 1}), REGIONS
    )
    assert {fault.region for fault in own} == {"iowa"} and 70 < len(own) < 130


def test_periods_and_single_times_are_kept_to():
    found = planned(spec(*MIXED[2:5]), REGIONS)
    assert [f.time for f in found if f.kind == "kill-server"] == [300, 600, 900]
    narrow = [fault for fault in found if fault.kind == "narrow"]
    assert [fault.time for fault in narrow] == list(range(20, 1000, 100))
    assert {fault.region for fault in narrow} == {*REGIONS}
    assert Fault(7.0, "slow", "tokyo", 5.0, 3.0) in found


# Striking: real children that do nothing, on a clock of our own

SLEEP = "import time; time.sleep(600)"
PARENT = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", "trainer", "paris"])
time.sleep(600)
"""


class Stage:
    """Two workers and a server that only sleep; the first has a child that passes for a trainer."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        launcher = LocalLauncher(folder / "logs")
        codes = {"": SLEEP, "paris": PARENT, "tokyo": SLEEP}
        self.supervisors = {
            name: Supervisor(
                launcher,
                Role(name or "server", (sys.executable, "-c", code)),
                patience=Patience(first=0.0),
            )
            for name, code in codes.items()
        }
        for name, supervisor in self.supervisors.items():
            (folder / "regions" / name).mkdir(parents=True, exist_ok=True)
            supervisor.start(now=time.monotonic())

    def supervisor(self, region: str) -> Supervisor | None:
        return self.supervisors.get(region)

    def process(self, region: str) -> psutil.Process:
        handle = self.supervisors[region].handle
        assert isinstance(handle, LocalProcess)
        return psutil.Process(handle.pid)

    def end(self) -> None:
        for supervisor in self.supervisors.values():
            if supervisor.handle:
                supervisor.handle.kill()


def until(told, seconds: float = 300.0):
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if found := told():
            return found
        time.sleep(0.01)
    raise AssertionError("it did not happen")


@pytest.fixture
def stage(tmp_path):
    made = Stage(tmp_path)
    yield made
    made.end()


def inflictor(stage: Stage, *faults: Fault) -> FaultInflictor:
    links = EmulatedLinks(spec(), faults, [*stage.supervisors])
    made = FaultInflictor(faults, stage, links, seconds=1000)
    made.begin(0.0)
    return made


def test_only_the_trainer_dies_of_a_kill_trainer(stage: Stage):
    folder, agent = stage.folder / "regions" / "paris", stage.process("paris")
    pid = until(lambda: trainer_pid(folder, agent.pid))
    trainer = psutil.Process(pid)
    rough = inflictor(stage, Fault(5, "kill-trainer", "paris"), Fault(5, "kill-trainer", "tokyo"))
    rough.tend(4.9)
    assert trainer.status() != psutil.STATUS_ZOMBIE and rough.inflicted == []
    rough.tend(5.0)
    until(lambda: trainer.status() == psutil.STATUS_ZOMBIE)
    assert agent.is_running() and trainer_pid(folder, agent.pid) is None
    assert [inflicted.skipped for inflicted in rough.inflicted] == [
        "",
        "there was no trainer at that moment",
    ]
    assert rough.inflicted[1].as_record().get("skipped")


def test_a_lock_leads_to_a_trainer_that_is_nobodys_child_and_never_to_a_stranger(stage: Stage):
    folder, agent = stage.folder / "regions" / "paris", stage.process("paris")
    pid = until(lambda: trainer_pid(folder, agent.pid))
    (folder / "trainer.lock").write_text(f"{pid}\n")
    assert trainer_pid(folder, None) == pid
    for stranger in (f"{os.getpid()}\n", "", "999999999\n"):
        (folder / "trainer.lock").write_text(stranger)
        assert trainer_pid(folder, None) is None


def test_what_is_kept_down_is_started_by_its_supervisor_and_not_before(stage: Stage):
    rough = inflictor(stage, Fault(1, "kill-server", duration=500), Fault(2, "kill-server"))
    rough.tend(2.0)
    server = stage.supervisors[""]
    assert rough.inflicted[1].skipped == "the server was not running"
    until(lambda: server.tend(now=time.monotonic()))
    assert server.state == "waiting" and server.tend(now=time.monotonic() + 400) is None
    change = server.tend(now=time.monotonic() + 501)
    assert change and change.what == "restarted"


PAUSES = ((1, 5), (2, 1), (9, 9))


def test_a_paused_region_stands_still_until_it_is_over_or_ended(stage: Stage):
    tokyo = stage.process("tokyo")
    rough = inflictor(stage, *(Fault(at, "pause", "tokyo", took) for at, took in PAUSES))
    rough.tend(1.0)
    until(lambda: tokyo.status() == psutil.STATUS_STOPPED)
    rough.tend(2.0)
    rough.tend(3.5)  # The second would be over; the first is not.
    assert tokyo.status() == psutil.STATUS_STOPPED
    rough.tend(6.0)
    until(lambda: tokyo.status() != psutil.STATUS_STOPPED)
    rough.tend(9.0)
    until(lambda: tokyo.status() == psutil.STATUS_STOPPED)
    rough.end_all()
    until(lambda: tokyo.status() != psutil.STATUS_STOPPED)


ELSEWHERE = [sys.executable, "-c", SLEEP, "trainer", "tokyo"]


def test_a_trainer_that_an_earlier_agent_started_shares_its_regions_fate(stage: Stage):
    child = subprocess.Popen(ELSEWHERE, start_new_session=True)
    trainer = psutil.Process(child.pid)
    try:
        (stage.folder / "regions" / "tokyo" / "trainer.lock").write_text(f"{child.pid}\n")
        until(lambda: trainer_pid(stage.folder / "regions" / "tokyo", None))
        rough = inflictor(stage, Fault(1, "pause", "tokyo", 1), Fault(3, "kill-region", "tokyo"))
        rough.tend(1.0)
        until(lambda: trainer.status() == psutil.STATUS_STOPPED)
        rough.tend(2.0)
        until(lambda: trainer.status() != psutil.STATUS_STOPPED)
        rough.tend(3.0)
        assert until(child.poll) == -9
        agent = stage.supervisors["tokyo"].handle
        assert agent and agent.exit_code() == -9
    finally:
        child.kill()
        child.wait()


def test_a_slow_region_reads_so_in_its_folder_while_it_lasts(stage: Stage):
    file = stage.folder / "regions" / "tokyo" / "slow"
    rough = inflictor(stage, Fault(1, "slow", "tokyo", 3, 2.5))
    rough.tend(1.0)
    assert file.read_text() == "2.5\n"
    rough.tend(4.0)
    assert not file.exists()


def test_links_are_made_for_those_who_need_them_and_keep_their_place():
    rough = [Fault(1, "reset", "iowa"), Fault(1, "kill-trainer", "tokyo")]
    calm = EmulatedLinks(spec(links={"paris": "1Mbit/20ms"}), rough, REGIONS)
    try:
        server = "http://127.0.0.1:9"
        assert calm.url("tokyo", server) == server
        paris = calm.url("paris", server)
        assert paris != server and calm.url("paris", server) == paris
        assert calm.url("paris", "http://127.0.0.1:10") == paris
        assert calm.proxies["paris"].link.rate == 1e6
        calm.url("iowa", server)
        assert {*calm.proxies} == {"paris", "iowa"}
    finally:
        calm.close()


def test_what_a_link_carried_is_counted_past_a_new_server():
    calm = EmulatedLinks(spec(link="1Mbit/1ms"), [], ["paris"])
    with (
        socket.create_server(("127.0.0.1", 0)) as old,
        socket.create_server(("127.0.0.1", 0)) as new,
    ):
        try:
            for server, words in ((old, b"abc"), (new, b"defgh")):
                at = urlsplit(calm.url("paris", f"http://127.0.0.1:{server.getsockname()[1]}"))
                with socket.create_connection((at.hostname, at.port)) as client:
                    client.sendall(words)
                    accepted, _ = server.accept()
                    with accepted:
                        accepted.recv(16)
            assert calm.carried() == {"paris": (8, 0)}
        finally:
            calm.close()


def test_links_are_cut_narrowed_and_healed_when_it_is_time(stage: Stage):
    faults = [Fault(1, "cut", "paris", 2), Fault(2, "narrow", "paris", 2, link="1Mbit/200ms")]
    rough = inflictor(stage, *faults, Fault(3, "reset", "paris"), Fault(3, "cut", "tokyo", 1))
    rough.links.url("paris", "http://127.0.0.1:9")
    try:
        rough.tend(2.0)
        assert str(rough.links.proxies["paris"].link) == "1Mbit/200ms"
        rough.tend(4.0)
        assert str(rough.links.proxies["paris"].link).startswith("unlimited")
        skipped = ["no connection was open", "the region was never started"]
        assert [inflicted.skipped for inflicted in rough.inflicted[2:]] == skipped
    finally:
        rough.links.close()


def test_what_is_due_next_is_known(stage: Stage):
    rough = inflictor(stage, Fault(10, "slow", "tokyo", 5, 2.0), Fault(100, "kill-server"))
    assert rough.until_next(4.0) == 6.0
    rough.tend(10.0)
    assert rough.until_next(11.0) == 4.0
    rough.tend(15.0)
    assert rough.until_next(20.0) == 80.0
    assert not rough.over(999.0) and rough.over(1000.0)
    assert isinstance(rough.inflicted[0], InflictedFault) and rough.inflicted[0].at == 10.0
