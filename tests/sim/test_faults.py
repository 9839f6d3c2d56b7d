"""Fault schedules: drawn from a law and a seed, or read from a recording."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest

from diloco_cli.errors import SpecError
from diloco_cli.sim.faults import Fault, Law, drawn, load, save

REGIONS = ["paris", "tokyo"]


def gaps(shape: float) -> list[float]:
    times = [fault.time for fault in drawn(Law(10.0, shape), ["r"], until=1e5, seed=1)]
    return [after - before for before, after in zip([0.0, *times], times, strict=False)]


@pytest.mark.parametrize("shape", [1.0, 0.7, 2.0])
def test_failures_come_as_often_as_the_law_says(shape: float):
    assert statistics.mean(gaps(shape)) == pytest.approx(10.0, rel=0.05)


def test_a_small_shape_means_clusters():
    spread = {shape: statistics.stdev(gaps(shape)) for shape in (0.7, 1.0, 2.0)}
    assert spread[0.7] > 1.2 * spread[1.0] > 1.5 * spread[2.0]


def test_the_seed_decides_and_each_region_has_its_own_stream():
    law = Law(50.0)
    both = drawn(law, REGIONS, until=1000, seed=3)
    assert both == drawn(law, REGIONS, until=1000, seed=3)
    assert both != drawn(law, REGIONS, until=1000, seed=4)
    paris, tokyo = ({f.time for f in both if f.region == region} for region in REGIONS)
    assert paris and tokyo and not paris & tokyo
    alone = drawn(law, ["paris"], until=1000, seed=3)
    assert [fault for fault in both if fault.region == "paris"] == alone


def test_a_recorded_schedule_is_read_as_it_was_written(tmp_path: Path):
    faults = [
        Fault(1.5, "kill-trainer", "paris"),
        Fault(2.0, "slow", "tokyo", 30.0, 2.5),
        Fault(4.0, "kill-server", duration=3.0),
        Fault(9.0, "cut", "paris", 20.0),
    ]
    save(faults, tmp_path / "faults.json")
    assert load(tmp_path / "faults.json", REGIONS) == faults


@pytest.mark.parametrize(
    "record, said",
    [
        ({"time": 1, "kind": "kil-trainer", "region": "paris"}, "kil-trainer"),
        ({"time": 1, "kind": "kill-trainer", "region": "rome"}, "rome"),
        ({"time": 1, "kind": "kill-server", "region": "paris"}, "paris"),
        ({"time": -1, "kind": "kill-trainer", "region": "paris"}, "-1"),
        ({"time": 1, "kind": "cut", "region": "paris"}, "how long"),
        ({"time": 1, "kind": "slow", "region": "paris", "duration": 1, "factor": 0}, "factor"),
        ({"time": 1, "kind": "kill-trainer", "region": "paris", "when": 3}, "when"),
        ("boom", "boom"),
    ],
)
def test_a_fault_that_cannot_be_is_named(tmp_path: Path, record: object, said: str):
    file = tmp_path / "faults.json"
    file.write_text(json.dumps({"faults": [record]}))
    with pytest.raises(SpecError, match="fault 1") as caught:
        load(file, REGIONS)
    assert said in caught.value.message


@pytest.mark.parametrize("text", ["", "{", '{"faults": 3}'])
def test_a_file_that_is_no_schedule_is_refused(tmp_path: Path, text: str):
    file = tmp_path / "faults.json"
    file.write_text(text)
    with pytest.raises(SpecError, match=r"JSON|list"):
        load(file, REGIONS)
