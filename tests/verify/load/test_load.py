"""A few of the many clients: whatever the server acknowledges is merged, once."""

from __future__ import annotations

import dataclasses

import pytest

from tests.verify.load.clients import Outcome, Told
from tests.verify.load.many import Load, run_load
from tests.verify.load.report import Sample, audit, figures

pytestmark = pytest.mark.live


def test_what_many_clients_are_told_is_merged_once(tmp_path):
    load = Load(16, 4.0, parameters=200_000, grace=0.5, sample=0.5)

    found = run_load(load, tmp_path)

    assert found["acknowledged"] > 0
    assert not found["refused"]
    assert not found["faults"] and not found["unmerged"]
    assert found["samples"] and found["memory"]["first_mb"] > 1
    # The same books with one frame more, or one forgotten, would not have passed.
    outcome = Outcome(told={("region-0", 0): Told("f" * 64, 1.0, 1)})
    assert len(audit(tmp_path / "server", 4, [outcome])) == 1


def outcome_of(rate: float, seconds: float) -> Outcome:
    return Outcome(uploads=[(at / rate, 0.1, 10**6) for at in range(int(rate * seconds))])


@pytest.mark.parametrize(
    ("rate", "growth", "met"), [(60, 0.0, True), (40, 0.0, False), (60, 0.3, False)]
)
def test_too_slow_or_growing_misses_the_goal(rate, growth, met):
    samples = [Sample(at, 200 + growth * at, 100) for at in range(0, 300, 10)]

    found = figures([outcome_of(rate, 300)], samples, began=0, seconds=300, server_cpu=1)

    assert found["met"] is met
    assert found["per_second_by_minute"] == [rate] * 5
    assert found["memory"]["warm_seconds"] == 60


def test_memory_that_is_needed_once_does_not_count_as_growth():
    samples = [Sample(at, 100 if at < 60 else 200, 100) for at in range(0, 300, 10)]

    found = figures([outcome_of(60, 300)], samples, began=0, seconds=300, server_cpu=1)

    assert found["memory"]["ratio"] == 1
    assert dataclasses.asdict(samples[0]) == found["samples"][0]
