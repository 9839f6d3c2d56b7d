"""Curves stay small however long the run, show gaps as gaps and survive a restart."""

import json
import math

import pytest

from diloco_cli.observe.history import (
    MOST_EVALUATIONS,
    MOST_ROWS,
    Curves,
    History,
    Rounds,
)
from tests.observe.documents import make_status


def sampled(seconds, **changes):
    return make_status(
        tokens={"applied": 10 * seconds},
        loss={
            "heldout": 5.0 / (1 + seconds),
            "heldout_at": seconds,
            "ema": 4.0 / (1 + seconds),
            "ema_at": seconds,
        },
        regions=[
            {"name": "left", "alive": True, "tokens_per_second": 7.0, "loss": 2.0},
            {"name": "right", "alive": False, "tokens_per_second": None},
        ],
        **changes,
    )


def test_rows_join_when_there_are_too_many_and_nothing_is_lost():
    curves = Curves(("value",), most=8)
    for second in range(100):
        curves.add(second, {"value": float(second)})
    times, columns = curves.since(0)
    assert curves.span == 16 and len(times) == 7 and times[0] == 8
    assert columns["value"][0] == pytest.approx(7.5)
    assert columns["value"][-1] == pytest.approx(97.5)


def test_a_span_without_samples_is_a_gap():
    curves = Curves(("value",), most=8)
    curves.add(0, {"value": 1.0})
    curves.add(3, {"value": math.nan})
    curves.add(4, {"value": 2.0})
    assert curves.since(0)[1]["value"] == [1.0, None, None, None, 2.0]
    assert curves.since(3.5)[1]["value"] == [None, 2.0]


def test_a_clock_that_jumps_leaves_a_gap_and_no_more_rows():
    curves = Curves(("value",), most=8)
    for at in (1.0, -5.0, math.inf, 1e9, 1e9 + 1):
        curves.add(at, {"value": 1.0})
    times, columns = curves.since(0)
    assert len(times) <= 8 and [value for value in columns["value"] if value] == [1.0, 1.0]


def test_asking_for_fewer_points_joins_rows():
    curves = Curves(("value",), most=64)
    for second in range(50):
        curves.add(second, {"value": float(second)})
    times, columns = curves.since(0, points=10)
    assert len(times) == 10 and columns["value"][:2] == [2.0, 7.0]


def test_a_million_outer_steps_are_answered_in_little_and_survive_a_restart():
    history = History(4)
    for second in range(0, 3_000_000, 250):
        history.sample(second, sampled(second))
    assert history.run.rows <= MOST_ROWS and len(history.evaluations) <= MOST_EVALUATIONS
    assert history.evaluations[0].outer_step == 0 and history.evaluations[-1].outer_step > 2_999_000
    document = history.document()
    assert len(json.dumps(document)) < 400_000
    known = [value for value in document["run"]["applied"] if value is not None]
    assert known == sorted(known) and len(known) > 500
    assert "right" not in document["regions"] and document["regions"]["left"]["loss"][0] == 2.0

    assert len(document["ema"]) == len(document["evaluations"]) <= 1001
    data, again = history.dump(), History(4)
    assert len(data) < 300_000
    again.load(data)
    assert again.document() == document
    again.sample(3_000_100, sampled(3_000_100))
    assert again.document()["evaluations"][-1][3] == 3_000_100


def test_a_damaged_file_is_refused_and_changes_nothing():
    history = History(1)
    history.sample(1, sampled(1))
    before, data = history.document(), history.dump()
    for bad in (b"", b"rubbish", data[: len(data) // 2], data[:-30] + bytes(30)):
        with pytest.raises(ValueError, match="damaged"):
            history.load(bad)
    assert history.document() == before


def test_two_hundred_regions_fit_into_two_megabytes():
    history = History(24)
    regions = [
        {"name": f"region-{number:03}", "alive": True, "tokens_per_second": 1.0, "loss": 2.0}
        for number in range(200)
    ]
    status = make_status(regions=regions)
    for second in range(600):
        history.sample(second, status)
    assert len(json.dumps(history.document())) < 2_000_000


def test_a_round_is_told_moment_by_moment():
    rounds = Rounds(2)
    early = {"region": "right", "fragment": 0, "tokens": 5.0}
    rounds.note("accepted", early, 0.5)
    rounds.note("called", {"fragment": 0, "version": 3}, 1.0)
    rounds.note("accepted", {"region": "left", "fragment": 0, "tokens": 7.0}, 2.0)
    closed = {"fragment": 0, "version": 3, "members": ["left", "right"], "why": "all are here"}
    rounds.note("closed", closed, 3.0)
    rounds.note("published", {"fragment": 0, "version": 4, "bytes": 99}, 4.0)
    rounds.adopted("left", [3, 0], 3.9)
    rounds.adopted("left", [4, 0], 5.0)
    rounds.adopted("left", [4, 0], 6.0)
    [told] = rounds.after(0)
    assert told["answered"] == {"right": 0.5, "left": 2.0} and told["tokens"]["left"] == 7.0
    assert (told["called"], told["closed"], told["published"]) == (1.0, 3.0, 4.0)
    assert told["adopted"] == {"left": 5.0} and told["members"] == ["left", "right"]
    assert rounds.after(told["number"]) == []


def test_only_the_last_rounds_are_kept():
    rounds = Rounds(1)
    for number in range(1000):
        rounds.note("called", {"fragment": 0, "version": number}, number)
        rounds.note("published", {"fragment": 0, "version": number + 1}, number)
    assert len(rounds.after(0)) == rounds.most and rounds.after(998)[-1]["number"] == 1000
