"""Who may take part in a region, over real sockets; whoever may not hears why."""

from __future__ import annotations

import contextlib
import dataclasses
import socket
import threading
import time
from collections.abc import Callable, Iterator

import pytest

from diloco_cli.assemble import spelled_out
from diloco_cli.errors import LinkError, SpecError, WireError
from diloco_cli.launch.ports import free_addresses
from diloco_cli.spec.schema import RunSpec
from diloco_cli.system.wakeup import Wakeup
from diloco_cli.worker.handover import trainer_digest
from diloco_cli.worker.hosts.connection import HostConnection, connect
from diloco_cli.worker.hosts.first_host import FirstHost
from diloco_cli.worker.hosts.follower_supervisor import FollowerSupervisor
from diloco_cli.worker.hosts.lead import Lead
from diloco_cli.worker.hosts.listener import HostHello, HostListener, RegionTerms, release
from diloco_cli.worker.hosts.which_host import HostPlace

SECRET = b"known to both"


def spec_of(**changes) -> RunSpec:
    spec = {
        "spec": 1,
        "name": "pair",
        "budget": {"tokens": 10**6},
        "regions": [{"name": "paris", "mesh": {"fsdp": 4}, "hosts": 2}],
        **changes,
    }
    return spelled_out(RunSpec.model_validate(spec))


@pytest.fixture
def place() -> HostPlace:
    return HostPlace(0, 2, free_addresses(1)[0])


@pytest.fixture
def lead(place, tmp_path):
    spec = spec_of()
    made = Lead(RegionTerms(place, spec, "paris", trainer_digest(spec, "paris")), SECRET, tmp_path)
    yield made
    made.close()


def hello(place, spec=None, role="supervisor", **more) -> HostHello:
    other = dataclasses.replace(place, host=1)
    return dataclasses.replace(HostHello.of(role, other, spec or spec_of(), "paris"), **more)


@pytest.fixture
def call(place) -> Iterator[Callable[..., dict]]:
    made: list[HostConnection] = []

    def one(said: HostHello, secret: bytes = SECRET) -> dict:
        made.append(connect(place.address, secret, seconds=10))
        made[-1].send(said.record())
        return made[-1].receive()[0]

    yield one
    for each in made:
        each.close()


def test_a_host_with_the_same_settings_hears_the_generation(lead, place, call):
    answer = call(hello(place))
    assert answer == {"generation": lead.generation}


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"spec": spec_of(inner={"batch": 32})}, "inner.batch is 32 there and 16 on host 0"),
        (
            {"spec": spec_of(regions=[{"name": "paris", "mesh": {"data": 4}, "hosts": 2}])},
            "regions.paris.mesh.data is 4 there and 1 on host 0",
        ),
        ({"release": "diloco 9"}, "host 1 runs diloco 9"),
        ({"hosts": 3}, "it is host 1 of 3"),
        ({"host": 0}, "it is host 0 of 2"),
        ({"region": "rome"}, "Host 0 is of pair/paris, host 1 of pair/rome"),
        ({"role": "follower", "generation": "7-old"}, "A follower of generation 7-old has come"),
    ],
)
def test_a_host_that_differs_hears_in_what(lead, place, call, change, words):
    answer = call(hello(place, **change))
    assert answer["over"] == 2 and words in answer["message"] and answer["hint"]


def test_there_is_one_of_each_and_another_is_told_to_wait(lead, place, call, tmp_path):
    first = connect(place.address, SECRET, seconds=10)
    first.send(hello(place).record())
    assert "generation" in first.receive()[0]
    assert "There is a supervisor of host 1" in call(hello(place))["later"]
    with pytest.raises(SpecError, match="There is a supervisor of host 1") as raised:
        supervisor(place, tmp_path).run(wait=0.0)
    assert "--host of its own" in (raised.value.hint or "")
    first.close()  # It was killed and is started again, before host 0 knows of its end.
    deadline = time.monotonic() + 60.0
    while "later" in (answer := call(hello(place))) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert answer == {"generation": lead.generation}


def test_a_stranger_is_told_nothing(lead, place, call):
    with pytest.raises(WireError, match="does not know this region's secret"):
        call(hello(place), secret=b"guessed")
    with socket.create_connection(place.address) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        with contextlib.suppress(ConnectionResetError):
            assert stranger.recv(100) == b""


def supervisor(place, tmp_path, spec=None) -> FollowerSupervisor:
    other = dataclasses.replace(place, host=1)
    spec = spec or spec_of()
    return FollowerSupervisor(spec, "paris", other, SECRET, Wakeup(), tmp_path / "log", cores=None)


def test_a_coordinator_that_is_not_there_is_waited_for_and_then_named(place, tmp_path):
    with pytest.raises(LinkError, match=f"Nobody listens at {place.coordinator}") as raised:
        supervisor(place, tmp_path).run(wait=0.0)
    assert raised.value.exit_code == 4 and "host 0" in (raised.value.hint or "")


def test_a_refused_supervisor_ends_with_the_reason(lead, place, tmp_path):
    with pytest.raises(SpecError, match="batch is 32 there"):
        supervisor(place, tmp_path, spec_of(inner={"batch": 32})).run(wait=10.0)


def test_supervisors_hear_that_the_run_is_over(place, tmp_path):
    codes = []
    other = supervisor(place, tmp_path)
    waiting = threading.Thread(target=lambda: codes.append(other.run(wait=60.0)))
    waiting.start()
    FirstHost(place, SECRET).dismiss(None)
    waiting.join(60.0)
    assert codes == [0]


def test_a_taken_address_is_named(place):
    with socket.create_server(place.address), pytest.raises(SpecError, match="cannot listen at"):
        HostListener(place, SECRET, lambda *_: None, wait=0.0)


def test_the_release_names_what_must_be_equal():
    assert "diloco" in release() and "jax" in release()
