"""Every launcher's variables name the same hosts, and nothing contradicts the spec unnoticed."""

from __future__ import annotations

import pytest

from diloco_cli.errors import SpecError
from diloco_cli.worker.hosts.which_host import HostPlace, find_place, first_node

SLURM = {
    "SLURM_JOB_ID": "12",
    "SLURM_STEP_ID": "3",
    "SLURM_PROCID": "1",
    "SLURM_STEP_NUM_TASKS": "2",
    "SLURM_STEP_NODELIST": "gpu[03-04]",
}
TORCHRUN = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a.example", "MASTER_PORT": "29500"}


def place(environment=(), listed=2, hosts=None, host=None, coordinator=None) -> HostPlace | None:
    return find_place(
        "paris",
        listed,
        hosts=hosts,
        host=host,
        coordinator=coordinator,
        environment=dict(environment),
    )


def test_options_say_it():
    assert place(hosts=2, host=1, coordinator="n1:7351") == HostPlace(1, 2, "n1:7351")


def test_slurm_says_it():
    found = place(SLURM)
    assert found and (found.host, found.hosts, found.address[0]) == (1, 2, "gpu03")
    others = place({**SLURM, "SLURM_PROCID": "0"}), place({**SLURM, "SLURM_STEP_ID": "4"})
    assert others[0] and others[0].coordinator == found.coordinator
    assert others[1] and others[1].coordinator != found.coordinator


def test_torchrun_says_it_and_keeps_its_own_port():
    assert place(TORCHRUN) == HostPlace(1, 2, "a.example:29501")


def test_kubernetes_says_which_host_and_the_command_says_where_the_first_is():
    found = place({"JOB_COMPLETION_INDEX": "1"}, coordinator="paris-0.paris:7351")
    assert found == HostPlace(1, 2, "paris-0.paris:7351")


def test_options_come_before_variables():
    assert place(SLURM, host=0, coordinator="n1:1") == HostPlace(0, 2, "n1:1")


def test_a_region_of_one_host_is_nobodys_business():
    assert place({**SLURM, "SLURM_STEP_NUM_TASKS": "64"}, listed=1) is None


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"environment": {**SLURM, "SLURM_STEP_NUM_TASKS": "4"}}, "has 2 hosts, Slurm .* says 4"),
        ({"hosts": 4, "host": 0, "coordinator": "n:1"}, "has 2 hosts, --hosts says 4"),
        ({"hosts": 2, "listed": 1}, "has 1 host, --hosts says 2"),
        ({"host": 2, "coordinator": "n:1"}, "host 2 of region paris, which has 2: 0 to 1"),
        ({"host": 1}, "Where host 0 is, neither an option nor a launcher says"),
        ({"coordinator": "n:1"}, "Which host is, neither an option nor a launcher says"),
        ({"host": 1, "coordinator": "n"}, "'n' is not HOST:PORT"),
        ({"host": 1, "coordinator": "n:70000"}, "is not HOST:PORT"),
        ({"host": 1, "listed": 1}, "whose spec has no `hosts`"),
        ({"environment": {**SLURM, "SLURM_PROCID": "x"}}, "SLURM_PROCID is 'x'"),
    ],
)
def test_contradictions_are_named(arguments, words):
    with pytest.raises(SpecError, match=words) as raised:
        place(**arguments)
    assert raised.value.hint


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("vm", "vm"),
        ("a,b", "a"),
        ("gpu[03-07,9],login1", "gpu03"),
        ("gpu[9,11]", "gpu9"),
        ("rack[1-2]-eth0", "rack1-eth0"),
    ],
)
def test_the_first_node_of_a_list(nodes, first):
    assert first_node(nodes) == first
