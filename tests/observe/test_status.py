"""The documents are exact, but for what a newer server adds; nothing is lost on the way."""

import json

import pytest

from diloco_cli.errors import WireError
from diloco_cli.observe.status import Status, Summary
from tests import ROOT
from tests.observe.documents import make_region, make_status, status_json


@pytest.mark.parametrize("path", sorted((ROOT / "tests" / "golden").glob("st*-*.json")))
def test_what_is_read_is_written_again_to_the_byte(path):
    assert json.dumps(Status.read(path.read_bytes()).plain(), indent=2) + "\n" == path.read_text()


@pytest.mark.parametrize("path", sorted((ROOT / "tests" / "golden").glob("summary-*.json")))
def test_a_summary_is_written_again_to_the_byte(path):
    assert json.dumps(Summary.read(path.read_bytes()).plain(), indent=2) + "\n" == path.read_text()


def test_keys_of_a_newer_server_are_kept():
    newer = {**status_json(regions=[{"name": "left", "fans": 3}]), "moon": "full"}
    assert Status.read(json.dumps(newer).encode()).plain() == newer


@pytest.mark.parametrize(
    "changes, words",
    [({"outer_steps": "12"}, "`outer_steps`"), ({"regions": [{"name": 7}]}, "`regions.0.name`")],
)
def test_a_wrong_key_is_named(changes, words):
    with pytest.raises(WireError, match=words):
        make_status(**changes)


def test_a_missing_key_is_named():
    with pytest.raises(WireError, match="`state`"):
        Status.read(json.dumps({k: v for k, v in status_json().items() if k != "state"}).encode())


def test_a_summary_needs_no_more_than_a_state():
    assert Summary.read(b'{"state": "stopped"}').plain() == {"state": "stopped"}


@pytest.mark.parametrize(
    "region, state",
    [
        ({}, "away"),
        ({"starting": True}, "starting"),
        ({"left": True}, "left"),
        ({"done": True}, "done"),
        ({"done": True, "failed": "no data"}, "failed"),
        ({"alive": True}, "starting"),
        ({"alive": True, "step": 0}, "starting"),
        ({"alive": True, "step": 9}, "idle"),
        ({"alive": True, "training": True}, "training"),
        ({"alive": True, "training": True, "contributing": True}, "contributing"),
    ],
)
def test_alive_training_and_contributing_are_three_things(region, state):
    assert make_region("left", **region).state == state
