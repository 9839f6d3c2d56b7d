"""The long tables: what they train next, and what they say of records."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from diloco_cli.bench.quality.runner import append
from tests.verify.quality import absences, downstream, ladder, late_loss, levers, public_harness


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
    (only,) = ladder.chosen("^1M$", "^regions 8, adamw$")
    assert [arm.name for arm in only.arms] == ["regions 8, adamw"] and only.rung.name == "1M"
    assert only.seeds == [61, 62, 63]
    assert sum(len(stage.arms) for stage in ladder.chosen("", "")) > 20
    (some,) = ladder.chosen("^1M$", "^regions 8, adamw$", [62, 64])
    assert some.seeds == [62]


def test_a_ladder_compares_every_way_with_data_parallel_seed_by_seed():
    losses = {"regions 8, muon": 1.9, "regions 8, adamw": 2.2, "data parallel, adamw": 2.0}
    rows = [
        {"rung": rung, "cell": cell, "seed": seed, "loss": loss, "ema": 1.0, "rate": 0.006}
        | {"versions": 9}
        for cell, loss in losses.items()
        for rung in ("1M", "25k at 5", "25k")
        for seed in (61, ladder.TUNED_ON)
    ]
    rows.append({**rows[4], "cell": "regions 8, adamw, int4 down", "rung": "25k", "loss": 2.31})
    said = [line.split(" | ") for line in ladder.told(rows).splitlines()[2:]]
    assert [(row[0], row[1], row[6]) for row in said[:5]] == [
        ("| 25k", "data parallel", "–"),
        ("| 25k", "eight regions", "+10.00 %"),
        ("| 25k", "eight regions, int4 down", "+5.00 %"),
        ("| 25k", "eight regions, muon", "−5.00 %"),
        ("| 1M", "data parallel", "–"),
    ]
    assert {row[0] for row in said[-3:]} == {"| 25k, 5 tokens"}


def test_levers_are_held_against_the_plain_one_of_their_kind():
    sweep = levers.SWEEPS["25k"]
    names = [sweep.id(lever, seed) for lever, seed in sweep.cells()]
    assert len(set(names)) == len(names)
    records: list[dict[str, Any]] = [
        {"id": name, "loss": 2.0 + number / 10, "ema": 2, "versions": 9, "bits_up": 3}
        | {"bits_down": 3}
        for number, name in enumerate(names)
    ]
    said = levers.told(sweep, records)
    first, other = (
        [record["loss"] for record in records if record["id"].startswith(f"25k, regions 8, {what}")]
        for what in ("rate", "clip 3, rate")
    )
    change = 50 * sum(b / a - 1 for a, b in zip(first, other, strict=True))
    assert f"| regions 8, clip 3, rate 0.006 | {sum(other) / 2:.4f} | {change:+.2f} % |" in said
    without = [record for record in records if "regions 8, rate" not in record["id"]]
    assert "regions 8" not in levers.told(sweep, without), "without a plain one nothing is compared"


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
    assert late_loss.ratio([]) == "never there"


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
    asked = np.concatenate([asked, asked[:1]])
    asked[9, :, :-4] = ord(" ")  # The harness would find an empty beginning.
    assert public_harness.written(asked, tmp_path) == 8
    lines = [json.loads(line) for line in (tmp_path / "questions.jsonl").read_text().splitlines()]
    assert [line["real"] for line in lines] == [0, 1, 2, 3] * 2
    assert all(line["endings"][line["real"]] == "aaaa" for line in lines)
    assert all(sorted(line["endings"]) == ["aaaa", "bbbb", "cccc", "dddd"] for line in lines)
    assert {line["beginning"] for line in lines} == {12 * "a"}
    assert str(tmp_path / "questions.jsonl") in (tmp_path / "next_code.yaml").read_text()
