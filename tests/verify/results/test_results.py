"""The page makers: what they say of records, and what they refuse."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from diloco_cli.observe.events import Event
from tests.verify.results import curves, eight_sites, goodput
from tests.verify.results.budget import Outcome
from tests.verify.results.records import Record, reached
from tests.verify.results.scavenging import SHORTEST, VISITORS, drawn


def record(folder: Path, method: str, tokens: float, **changes: Any) -> Path:
    faults = [{"time": float(n), "kind": "kill-trainer", "region": "a", "at": n} for n in (1, 2)]
    faults[1] |= {"skipped": "a is down already"}
    said = {
        "method": method,
        "regions": 8,
        "seconds": 20.0,
        "faults": faults,
        "tokens": {"trained": 90, "applied": 1000, "fault_free": 1200},
        "goodput": {"time": 0.5, "tokens": tokens, "participation": None},
        "recovery": {"count": 1, "p50": 2.0, "p95": 3.0},
        "loss": {"heldout": 2.5, "curve": [[0, 5.0, 0.0], [500, 3.0, 10.0], [1000, 2.5, 20.0]]},
        **changes,
    }
    path = folder / f"x-{method}" / "chaos.json"
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps(said))
    return path


def test_goodput_is_a_row_a_method_and_a_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    paths = [record(tmp_path, name, share) for name, share in (("decoupled", 0.9), ("rigid", 0.2))]
    png, raw = tmp_path / "out" / "bars.png", tmp_path / "raw"
    goodput.main([*map(str, paths), "--png", str(png), "--raw", str(raw)])
    rows = capsys.readouterr().out.splitlines()[2:]
    assert rows[0] == (
        "| 360 | data parallel, rigid | 1 | 20.0 % | 50.0 % | – | 2.0 / 3.0 s | 2.500 | 1,000 |"
    )
    assert "decoupled | 1 | 90.0 %" in rows[1]
    assert png.read_bytes().startswith(b"\x89PNG")
    assert (raw / "x-rigid.json").read_bytes() == paths[1].read_bytes()


def test_runs_of_other_faults_do_not_stand_side_by_side(tmp_path: Path):
    one = record(tmp_path, "rigid", 0.2)
    other = [{"time": 9.0, "kind": "kill-trainer", "region": "a", "at": 9.0}]
    with pytest.raises(SystemExit, match="given these faults"):
        goodput.main([str(one), str(record(tmp_path, "decoupled", 0.9, faults=other))])


def test_time_to_a_loss_is_compared_with_the_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    quick = {"heldout": 2.0, "curve": [[0, 5.0, 0.0], [500, 2.0, 3.0]]}
    slow = record(tmp_path, "rigid", 0.2)
    fast = record(tmp_path, "decoupled", 0.9, loss=quick)
    png = tmp_path / "curves.png"
    curves.main([str(slow), str(fast), "--loss", "3", "--png", str(png), "--log"])
    rows = capsys.readouterr().out.splitlines()[2:]
    assert "| 10.0 | 1.0 |" in rows[0] and "| 2.0 | 5.0 |" in rows[1]
    assert png.read_bytes().startswith(b"\x89PNG")
    curves.main([str(slow), str(fast), "--loss", "2.2"])
    rows = capsys.readouterr().out.splitlines()[2:]
    assert "not reached | – |" in rows[0] and "| 2.8 | – |" in rows[1]
    assert reached(Record.load(slow).curve, 6.0) == 0.0


def test_the_schedule_of_visits_is_the_same_for_a_seed_and_one_visit_at_a_time_for_each():
    visits = drawn(1, 1200.0, 30)
    assert visits == drawn(1, 1200.0, 30) != drawn(2, 1200.0, 30)
    assert len(visits) == 30 and len({visit.region for visit in visits}) == VISITORS
    assert all(visit.end - visit.start >= SHORTEST for visit in visits)
    assert all(visit.start >= 0 and visit.end < 1200.0 for visit in visits)
    for region in {visit.region for visit in visits}:
        own = [visit for visit in visits if visit.region == region]
        assert all(one.end < next.start for one, next in pairwise(own))


@pytest.mark.parametrize(
    ("applied", "balanced", "holds"),
    [
        (1000, True, True),
        (1200, True, True),
        (1201, True, False),
        (900, True, False),
        (901, True, True),
        (1000, False, False),
    ],
)
def test_a_budget_holds_within_two_rounds_above_and_one_below(applied, balanced, holds):
    assert Outcome("x", 1000.0, applied, 100.0, 1.0, 0.0, balanced).holds is holds


def test_bits_of_a_run_are_those_of_its_frames_and_of_what_lines_carried():
    def event(kind: str, **fields: object) -> Event:
        return Event(kind, "server", 0.0, 0.0, dict(fields))

    events = [
        event("accepted", region="a", fragment=0, version=0, bytes=50),
        event("accepted", region="b", fragment=0, version=0, bytes=70),
        event("accepted", region="a", fragment=1, version=0, bytes=50),
        event("published", fragment=0, version=1, bytes=40),
        event("published", fragment=1, version=1, bytes=20),
        event("published", fragment=1, version=2, bytes=20),  # Nobody's frame is known of it.
    ]
    rounds = eight_sites.rounds_of(events, [160, 80])
    assert rounds == [(1, 3.0, 2.0), (1, 5.0, 2.0)]
    assert eight_sites.by_version(rounds) == [(1, 4.0, 2.0)]
    found = {
        "regions": 8,
        "fragments": 24,
        "every": 24,
        "seconds": 100.0,
        "rounds": 2,
        "pace": 1.0,
        "participation": 1.0,
        "blocked": 0.0,
        "loss": 2.0,
        "bits": [[1, 3.0, 4.0], [2, 3.0, 4.0], [3, 3.0, 4.0]],
        "gbits": {"up": [0.6, 0.7], "down": [0.8, 0.9]},
    }
    said = eight_sites.table(found)
    # All of 5 B parameters in 24 s: 3 bits of each are 0.625 Gbit/s.
    assert "| frames alone, Gbit/s | 0.62 | 0.83 |" in said
    assert "| all that its line carried | 0.65 | 0.85 |" in said
