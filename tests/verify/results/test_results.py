"""The page makers: what they say of records, and what they refuse."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from diloco_cli.bench.quality.runner import append
from diloco_cli.observe.events import Event
from tests.verify.results import (
    absences,
    curves,
    downstream,
    eight_sites,
    goodput,
    ladder,
    late_loss,
    levers,
    public_harness,
)
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


def test_a_ladder_tunes_until_the_best_rate_lies_between_worse_ones(tmp_path: Path):
    losses = {0.012: 1.9, 0.006: 1.8, 0.024: 2.0, 0.003: 1.7, 0.0015: 1.75}
    file = tmp_path / "ladder.jsonl"
    for rate, loss in losses.items():
        name = f"25k, data parallel, adamw, seed {ladder.TUNED_ON}, rate {rate:.3g}"
        append(file, {"id": name, "cell": "data parallel, adamw", "seed": 101, "loss": loss})
    table = ladder.Table(file, None, until=0.0)  # Whatever were missing could not be trained.
    assert table.tuned(ladder.SMALL, ladder.DP, 0.012) == 0.003
    with pytest.raises(TimeoutError):
        table.tuned(ladder.SMALL, ladder.Arm(8), 0.006)


def test_parts_of_the_ladder_are_chosen_by_rung_and_way():
    (only,) = ladder.chosen("^1M$", "regions 8")
    assert [arm.name for arm in only.arms] == ["regions 8, adamw"] and only.rung.name == "1M"
    assert sum(len(stage.arms) for stage in ladder.chosen("", "")) > 20


def test_levers_are_held_against_the_plain_one_of_their_kind():
    rows = {lever.name: 2.0 + number / 10 for number, lever in enumerate(levers.LEVERS)}
    assert len(rows) == len(levers.LEVERS)
    records = [
        {"id": name, "loss": loss, "ema": loss, "versions": 9, "bits_up": 3, "bits_down": 3}
        for name, loss in rows.items()
    ]
    said = levers.told(records)
    plain = rows[levers.Lever(8).name]
    change = 100 * (rows["regions 8, every 12, rate 0.003"] / plain - 1)
    assert f"| regions 8, every 12, rate 0.003 | {plain + 0.4:.4f} | {change:+.2f} % |" in said
    assert levers.told(records[1:2]).count("\n") == 1, "without a plain one nothing is compared"


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
    # 5 B parameters, one of 24 fragments a second: 3 bits of them are 0.625 Gbit/s.
    assert "| frames alone, Gbit/s | 0.62 | 0.83 |" in said
    assert "| all that its line carried | 0.65 | 0.85 |" in said


def test_a_question_has_one_real_ending_and_three_of_other_stretches():
    windows = np.arange(64 * 33, dtype=np.int32).reshape(64, 33)
    windows[7, -8:] = windows[9, -8:]  # Two real endings would be no question.
    asked = downstream.questions(windows, 64)
    assert asked.shape[1:] == (4, 33) and 60 <= len(asked) <= 64
    assert (asked[:, :, :-8] == asked[:, :1, :-8]).all()
    assert not (asked[:, 1:, -8:] == asked[:, :1, -8:]).all(axis=2).any()


def test_scores_are_compared_seed_by_seed():
    cells = {"data parallel, adamw": 0.50, "regions 8, adamw": 0.48}
    records = [
        {"rung": "25k", "cell": cell, "seed": seed, "right": right + seed / 100}
        for cell, right in cells.items()
        for seed in (1, 2)
    ]
    assert "| 25k | regions 8, adamw | 2 | 49.50 % | -2.00" in downstream.told(records)


def test_a_data_parallel_job_under_kills_loses_what_its_kind_loses():
    kills = [(10.0, "a"), (12.0, "b"), (30.0, "a"), (60.0, "a")]  # The last comes too late.
    rigid = late_loss.Parallel("rigid", 0.0, step=0.25, back=5.0, checkpoint=0.0)
    assert rigid.goodput(kills, 50.0) == pytest.approx(40 / 50)  # Of two kills; one strikes a dead.
    again = late_loss.Parallel("elastic", 10.0, step=0.25, back=5.0)
    assert again.goodput(kills, 50.0) == pytest.approx(30 / 50)
    at_once = late_loss.Parallel("elastic", 0.0, step=0.25, back=5.0)
    assert at_once.goodput(kills, 50.0) == pytest.approx(1 - 15 / 8 / 50)
    # The undisturbed curve, later by what was lost: step 100 would have been at 25 s.
    assert rigid.curve([(40.0, 3.0), (100.0, 2.0)], kills, 50.0) == [(10.0, 3.0), (30.0, 2.0)]
    assert late_loss.at([(0.0, 4.0), (10.0, 2.0)], 5.0) == 3.0
    assert late_loss.ratio([20.0, 20.0, 20.0]) == "20.0 (20.0 to 20.0)"


def test_absences_are_compared_seed_by_seed():
    names = absences.CUT_OFF, absences.OUT
    records = [
        {"cell": name, "seed": seed, "loss": (2.0 + seed) * factor}
        for seed in (1, 2, 3)
        for name, factor in zip(names, (1.0, 1.01), strict=True)
    ]
    said = absences.told(records)
    assert "| cut off, comes back | 3 | 4.0000 | -0.99 ± 0.00 % | left out |" in said
    assert "| cut off, comes back | 3 | 4.0000 | – | even |" in said


def test_a_task_of_the_public_harness_has_the_real_ending_in_every_place(tmp_path: Path):
    asked = np.full((9, 4, 16), ord("a"), np.int32)
    asked[:, :, -4:] = ord("a") + np.arange(4)[None, :, None]
    asked[3, 2, 5] = 200  # No plain ASCII: such a stretch is left out.
    assert public_harness.written(asked, tmp_path) == 8
    lines = [json.loads(line) for line in (tmp_path / "questions.jsonl").read_text().splitlines()]
    assert [line["real"] for line in lines] == [0, 1, 2, 3] * 2
    assert all(line["endings"][line["real"]] == "aaaa" for line in lines)
    assert all(sorted(line["endings"]) == ["aaaa", "bbbb", "cccc", "dddd"] for line in lines)
    assert {line["beginning"] for line in lines} == {12 * "a"}
    assert str(tmp_path / "questions.jsonl") in (tmp_path / "next_code.yaml").read_text()
