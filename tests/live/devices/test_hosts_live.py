"""A region of two hosts beside one of one device: whoever dies, it goes on by itself."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable

import psutil
import pytest

from diloco_cli.launch.ports import free_addresses
from diloco_cli.launch.roles import follower_role, work_role
from diloco_cli.launch.subprocesses import LocalProcess
from diloco_cli.worker.mailbox import Mailbox
from tests.cli.harness import diloco
from tests.live.processes import Live

SYNC = {"fragments": 2, "every": 8}
INNER = {"batch": 4, "sequence": 16, "schedule": {"kind": "constant"}}
pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]


class TwoHosts:
    """The processes of the region `right`, on two hosts that are this machine."""

    def __init__(self, run: Live) -> None:
        self.run, self.coordinator = run, free_addresses(1)[0]
        self.first, self.second = self.start_first(), self.start_second()

    def start_first(self) -> LocalProcess:
        url, home = self.run.address["url"], self.run.folder
        role = work_role(
            self.run.file, home, "right", url=url, cores=(), coordinator=self.coordinator
        )
        return self.run.start(role)

    def start_second(self) -> LocalProcess:
        role = follower_role(
            self.run.file, self.run.folder, "right", host=1, coordinator=self.coordinator, cores=()
        )
        return self.run.start(role)

    def kill_follower(self) -> None:
        (follower,) = psutil.Process(self.second.pid).children()
        follower.kill()

    def kill_lead(self) -> None:
        pid = Mailbox(self.run.folder / "regions" / "right").trainer_lock_holder()
        assert pid is not None  # Not a child of an agent that took it over.
        os.kill(pid, signal.SIGKILL)

    def kill_agent(self) -> None:
        os.kill(self.first.pid, signal.SIGKILL)
        self.run.exit_code(self.first)
        self.first = self.start_first()

    def generation(self) -> str:
        return (self.run.folder / "regions" / "right" / "generation").read_text()


def hosts_in_status(run: Live) -> list[int]:
    (right,) = [region for region in run.status().regions if region.name == "right"]
    assert all(host.work_seconds > 0 and host.step_seconds > 0 for host in right.hosts)
    return [host.host for host in right.hosts]


def test_whoever_dies_the_region_goes_on_and_the_books_are_exact(live, monkeypatch, capsys):
    monkeypatch.setenv("XLA_FLAGS", "--xla_force_host_platform_device_count=2")
    right = {"name": "right", "mesh": {"fsdp": 4}, "hosts": 2, "speed": 0.3}
    run = live(
        {"name": "left", "speed": 0.02}, right, sync={"fragments": 2, "every": 8}, inner=INNER
    )
    server = run.serve()
    left, hosts = run.work("left"), TwoHosts(run)

    def goes_on(since: float) -> Callable[[], bool]:
        """It has trained in a report of its own, after that time, further than before."""

        def stepped() -> bool:
            path = run.folder / "regions" / "right" / "progress.json"
            progress = run.progress("right")
            return progress.training and path.stat().st_mtime > since and progress.step > 0

        return stepped

    run.wait_for(goes_on(0.0), server, left)
    run.wait_for(lambda: hosts_in_status(run) == [0, 1], server, left)
    for strike, ends in (
        (hosts.kill_follower, True),
        (hosts.kill_agent, False),
        (hosts.kill_lead, True),
    ):
        before, since = hosts.generation(), time.time()
        strike()
        if ends:
            run.wait_for(lambda before=before: hosts.generation() != before, server, left)
            since = time.time()
        run.wait_for(goes_on(since), server, left, seconds=240)
    applied = run.status().tokens.applied
    run.wait_for(lambda: run.status().tokens.applied > applied, server, left)
    for process in (hosts.first, left):
        os.kill(process.pid, signal.SIGTERM)
        assert run.exit_code(process) == 0
    assert hosts.second.exit_code() is None  # It waits for the next generation.
    os.kill(server.pid, signal.SIGTERM)
    run.exit_code(server)
    summary = run.summary()
    assert summary["balanced"]
    assert summary["regions"]["right"]["share"] > 0
    code, said, _ = diloco(capsys, "replay", str(run.folder))
    assert code == 0 and said.count("equal") == 2
