"""The learning rate across changes of the settings: no jump, and the same after every restart."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import numpy as np
import pytest

from diloco_cli.spec.schema import InnerSpec
from diloco_cli.worker.engines.learning_rate import RatePlan

COSINE = {"kind": "cosine", "warmup": 10, "floor": 0.1}
TOKENS = 64
"""Of a step of all regions."""


def plan(
    horizon: int = 100, *, tokens: int = TOKENS, schedule: dict | None = None, lr: float = 1.0
):
    inner = InnerSpec(
        batch=4,
        sequence=16,
        optimizer={"kind": "sgd", "lr": lr},
        schedule=schedule or COSINE,
    )
    return RatePlan.of(inner, horizon, horizon * tokens)


def after(first: RatePlan, new: RatePlan, place: int) -> RatePlan:
    return first.followed_by(new, place)[0]


def rates(of: RatePlan, first: int, last: int) -> list[float]:
    return [of.at(place) for place in range(first, last)]


def test_without_a_change_nothing_changes():
    first = plan()
    assert first.followed_by(plan(), 40) == (first, 40)
    second = after(first, plan(200), 40)
    assert second.followed_by(plan(200), 70) == (second, 70), "a restart begins nothing anew"


def test_a_cosine_at_its_floor_warms_up_again_for_a_larger_budget():
    last = plan().at(99)
    assert last == pytest.approx(0.1, rel=0.01)
    longer = after(plan(), plan(200), 100)
    rising = rates(longer, 100, 111)
    assert rising == sorted(rising) and len(set(rising)) == 11
    steps = np.diff(rising)
    assert rising[0] < 2 * last and steps.max() < 1.5 * steps.min(), "in a straight line, about"
    # From then on it is the schedule of the larger budget at this count.
    assert rates(longer, 110, 200) == pytest.approx(rates(plan(200), 110, 200), rel=1e-6)


def test_a_rate_within_a_tenth_is_taken_at_once():
    at = 55
    near, far = (after(plan(), plan(lr=lr), at) for lr in (1.09, 1.11))
    assert near.at(at) == pytest.approx(1.09 * plan().at(at), rel=1e-6)
    assert plan().at(at) < far.at(at) < 1.02 * plan().at(at)
    assert far.at(at + 10) == pytest.approx(1.11 * plan().at(at + 10), rel=1e-6)


def test_a_schedule_without_a_rise_changes_at_once():
    constant = {"kind": "constant"}
    changed = after(plan(schedule=constant), plan(schedule=constant, lr=0.25), 10)
    assert changed.at(10) == 0.25


def test_a_change_while_the_rate_still_rises_begins_where_it_is():
    second = after(plan(), plan(400), 100)
    third = after(second, plan(400, lr=0.5), 105)
    assert third.before == second.at(105)
    assert third.at(105) == pytest.approx(second.at(105), rel=0.02)
    assert third.at(115) == pytest.approx(0.5 * plan(400).at(115), rel=1e-6)


def test_a_larger_batch_moves_nothing_on_the_curve():
    curve = {**COSINE, "warmup": 0}
    whole = plan(100, schedule=curve)
    half, place = whole.followed_by(plan(50, tokens=2 * TOKENS, schedule=curve), 50)
    assert place == 25 and half.at(25) == pytest.approx(whole.at(50), rel=1e-6)
    assert half.at(49) == pytest.approx(whole.at(98), rel=1e-6)
    back, place = half.followed_by(whole, 35)
    assert place == 70 and back.at(70) == pytest.approx(whole.at(70), rel=1e-6)


def test_another_shape_is_reached_from_the_rate_before():
    flat = after(plan(), plan(schedule={"kind": "constant", "warmup": 4}), 90)
    assert flat.before == plan().at(90)
    assert flat.at(90) < flat.at(92) < flat.at(94) == 1.0


def test_a_plan_survives_the_checkpoint_to_the_bit():
    kept = after(plan(), plan(300, lr=0.7), 33)
    again = RatePlan(**json.loads(json.dumps(asdict(kept))))
    assert again == kept and rates(again, 33, 60) == rates(kept, 33, 60)
    assert after(again, plan(300, lr=0.7), 50) == kept


def test_a_rate_of_nothing_is_no_reason_to_stay_there():
    off = plan(schedule={**COSINE, "floor": 0.0})
    on = after(off, plan(400, schedule={**COSINE, "floor": 0.0}), 100)
    assert on.before == 0.0 and 0 < on.at(100) < on.at(110)
    assert replace(on, before=None).at(100) > 5 * on.at(100), "without the rise it would jump"


@pytest.mark.parametrize("shape", ["linear", "cosine", "sqrt"])
def test_warmup_stable_decay_has_three_parts_in_shares_of_the_run(shape):
    wsd = {"kind": "wsd", "warmup": 0.1, "decay": 0.4, "shape": shape, "floor": 0.1}
    run = plan(200, schedule=wsd)
    rising, falling = rates(run, 0, 21), rates(run, 120, 201)
    assert rising == sorted(rising) and 0 < rising[0] < 0.1 and rising[-1] == 1.0
    assert set(rates(run, 20, 121)) == {1.0}
    assert falling == sorted(falling, reverse=True) and len(set(falling)) > 70
    assert falling[-1] == pytest.approx(0.1) and run.at(220) == pytest.approx(0.1)
    middle = {"linear": 0.55, "cosine": 0.55, "sqrt": 0.1 + 0.9 * (1 - 0.5**0.5)}[shape]
    assert run.at(160) == pytest.approx(middle, rel=1e-5)
