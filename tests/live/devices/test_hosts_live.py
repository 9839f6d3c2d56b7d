"""A region of two hosts beside one of one device, under TLS: whoever dies, it goes on by itself."""

from __future__ import annotations

import pytest

from tests.verify.regions.two_hosts import DEVICES, SHARDED, TwoHosts, two_hosts

pytestmark = [pytest.mark.live, pytest.mark.timeout(900)]


def hosts_in_status(hosts: TwoHosts) -> list[int]:
    found = hosts.run.region("right").hosts
    assert all(host.work_seconds > 0 and host.step_seconds > 0 for host in found)
    return [host.host for host in found]


def test_whoever_dies_the_region_goes_on_also_on_fewer_and_on_more_hosts(tmp_path, monkeypatch):
    monkeypatch.setenv("XLA_FLAGS", DEVICES)
    with two_hosts(tmp_path, right={"checkpoint": SHARDED}) as hosts:
        run = hosts.run
        hosts.until_it_steps()
        run.wait_for(lambda: hosts_in_status(hosts) == [0, 1], hosts.server)
        for part in ("supervisor", "agent"):
            before = hosts.generation()
            hosts.kill(part)
            hosts.until_it_steps(other_than=None if part == "agent" else before)
        hosts.kill_in_mid_write("follower")
        lost = run.region("right").lost
        assert [*hosts.complete()[-1].glob("state/ocdbt.process_1")], "both hosts write"
        for mesh, count in (({"data": 2}, 1), ({"fsdp": 2, "tensor": 2}, 2)):
            before = run.progress("right").step
            hosts.move(mesh, hosts=count)
            hosts.until_it_steps()
            assert run.region("right").lost == lost, "what was stopped in order loses nothing"
            assert run.progress("right").devices == 2 * count
            assert run.progress("right").step > before
            shown = [0, 1] if count == 2 else []
            run.wait_for(lambda: hosts_in_status(hosts) == shown, hosts.server)  # noqa: B023
        books = hosts.stop()
    assert books["share"] > 0 and books["lost"] == lost
