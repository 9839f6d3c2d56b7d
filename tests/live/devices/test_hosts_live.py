"""A region of two hosts beside one of one device, under TLS: whoever dies, it goes on by itself."""

from __future__ import annotations

import pytest

from tests.verify.regions.two_hosts import DEVICES, SHARDED, TwoHosts, two_hosts

pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]


def hosts_in_status(hosts: TwoHosts) -> list[int]:
    found = hosts.run.region("right").hosts
    assert all(host.work_seconds > 0 and host.step_seconds > 0 for host in found)
    return [host.host for host in found]


def test_whoever_dies_the_region_goes_on_also_on_fewer_hosts_and_the_books_are_exact(
    tmp_path, monkeypatch
):
    monkeypatch.setenv("XLA_FLAGS", DEVICES)
    with two_hosts(tmp_path, right={"checkpoint": SHARDED}) as hosts:
        run = hosts.run
        hosts.until_it_steps()
        run.wait_for(lambda: hosts_in_status(hosts) == [0, 1], hosts.server)
        for part in ("supervisor", "agent"):
            before = hosts.generation()
            hosts.kill(part)
            hosts.until_it_steps(other_than=None if part == "agent" else before)
        hosts.kill_at("save.sent")
        hosts.until_it_steps()
        lost = run.region("right").lost
        run.wait_for(lambda: bool(checkpoints(hosts)), hosts.server)
        hosts.move({"data": 2}, hosts=1)
        hosts.until_it_steps()
        assert run.region("right").lost == lost, "what was stopped in order loses nothing"
        assert run.progress("right").devices == 2 and hosts_in_status(hosts) == []
        books = hosts.stop()
    assert books["share"] > 0 and books["lost"] == lost


def checkpoints(hosts: TwoHosts) -> list[str]:
    """Sharded ones that both hosts have written."""
    folder = hosts.run.folder / "regions" / "right"
    return [str(path) for path in folder.glob("checkpoints/*/*/state/ocdbt.process_1")]
