"""Figures are pure folds; what is unknown is left out rather than shown as zero."""

import json

import pytest
from prometheus_client.parser import text_string_to_metric_families

from diloco_cli.observe.events import Event
from diloco_cli.observe.metrics import (
    METRICS,
    bits_per_parameter,
    goodput,
    last_known,
    prometheus_text,
    seconds_left,
    staleness,
)
from tests import ROOT

STATUS = {
    "run": "r1",
    "state": "training",
    "outer_steps": 12,
    "tokens": {"budget": 1000, "applied": 400, "pending": 50, "refused": 0, "discarded": 0},
    "loss": {"heldout": None, "train": 3.25},
    "wire": {"bits_per_parameter_up": 3.2, "bits_per_parameter_down": None, "bytes_up": 9},
    "goodput": 0.8,
    "regions": [
        {"name": "paris", "alive": True, "training": False, "step": 7, "loss": None},
        {"name": 'odd"name', "alive": False, "share": 0.25},
    ],
}


def samples(status):
    return {
        (sample.name, *sample.labels.values()): sample.value
        for family in text_string_to_metric_families(prometheus_text(status))
        for sample in family.samples
    }


def test_bits_and_goodput_are_unknown_before_anything_moved():
    assert bits_per_parameter(0, 0) is None and goodput(0, 0) is None
    assert bits_per_parameter(400, 1000) == pytest.approx(3.2)
    assert goodput(90, 100) == pytest.approx(0.9)


def test_staleness_is_that_of_the_furthest_fragment_and_never_negative():
    assert staleness([5, 5, 5], [5, 3, 6]) == 2
    assert staleness([], []) == 0


def test_time_left_follows_the_recent_rate_and_is_unknown_while_nothing_is_applied():
    assert seconds_left([(0, 0), (10, 100)], 400) == pytest.approx(30)
    assert seconds_left([(0, 100), (10, 100)], 400) is None
    assert seconds_left([(0, 0)], 400) is None
    assert seconds_left([(0, 0), (10, 500)], 400) is None


def test_prometheus_shows_what_is_known_and_leaves_out_what_is_not():
    found = samples(STATUS)
    assert found["diloco_tokens", "applied"] == 400
    assert found["diloco_state", "training"] == 1 and found["diloco_state", "finished"] == 0
    assert found["diloco_region_alive", "paris"] == 1
    assert found["diloco_region_share_ratio", 'odd"name'] == 0.25
    assert ("diloco_loss_heldout",) not in found
    assert ("diloco_region_loss", "paris") not in found


def test_an_empty_document_is_still_valid_prometheus_text():
    assert samples({})["diloco_state", "waiting"] == 0


def test_every_metric_shown_is_listed():
    assert {name for name, *_ in samples(STATUS)} <= set(METRICS)


def test_the_run_log_alone_tells_the_last_known_state():
    def at(kind, **fields):
        return Event(kind, "server", 5.0, 1.0, fields)

    log = [
        at("server-started", url="http://127.0.0.1:1"),
        at("joined", region="paris"),
        at("joined", region="tokyo"),
        at("evaluated", loss=5.5),
        at("accepted", region="paris", bytes=300),
        at("accepted", region="tokyo", bytes=200),
        at("published", fragment=0, version=1, tokens=4096.0),
        at("evaluated", loss=2.5),
        at("lapsed", region="tokyo"),
        at("left", region="paris"),
        at("lapsed", region="paris"),
        at("run-stopped", why="asked"),
    ]
    known = last_known(log)
    assert known["state"] == "stopped" and known["outer_steps"] == 1
    assert known["loss"] == {"first": 5.5, "heldout": 2.5, "best": 2.5}
    assert known["tokens"]["applied"] == 4096 and known["wire"]["bytes_up"] == 500
    assert known["regions"] == {"paris": "left", "tokyo": "lapsed"}


def test_the_log_of_a_restarted_server_counts_on():
    def at(kind, seconds, **fields):
        return Event(kind, "server", 5.0, seconds, fields)

    log = [
        at("server-started", 0.0, recovered=0),
        at("published", 9.0, fragment=0, version=1),
        at("server-started", 0.5, recovered=2),
        at("published", 3.0, fragment=0, version=3),
    ]
    known = last_known(log)
    assert known["outer_steps"] == 3, "one was published but not noted before the crash"
    assert known["wall_seconds"] == 12.0


def test_a_log_whose_beginning_is_not_kept_still_tells_the_state():
    def at(kind, **fields):
        return Event(kind, "server", 5.0, 1.0, fields)

    known = last_known(
        [
            at("accepted", region="paris", bytes=300),
            at("published", fragment=0, version=7000),
            at("published", fragment=1, version=7001),
            at("published", cut=["members"]),
        ]
    )
    assert known["state"] == "training" and known["regions"] == {"paris": "joined"}
    assert known["outer_steps"] == 14001


def test_the_metrics_of_a_run_are_what_they_were():
    golden = ROOT / "tests" / "golden"
    status = json.loads((golden / "status-training.json").read_text())
    assert prometheus_text(status) == (golden / "metrics-training.txt").read_text()
