"""Three goodputs, each by hand: they differ exactly where a run loses something."""

import pytest

from diloco_cli.observe.metrics import Effort, goodputs, time_goodput, token_goodput
from diloco_cli.observe.prometheus import prometheus_text
from tests.observe.documents import make_status


def test_a_run_without_faults_has_nothing_but_its_mail_to_lose():
    busy = Effort(worked=100, trained=1000, useful=1000, applied=950, pace=10)
    found = goodputs([busy, busy], elapsed=100, contributions=10, chances=10)
    assert found.plain() == {"time": 1.0, "tokens": 0.95, "participation": 1.0}


def test_work_that_was_lost_is_time_that_was_lost():
    # Worked 90 of 100 seconds, and a tenth of what came of it died with a trainer.
    robbed = Effort(worked=90, trained=900, useful=810, applied=810, pace=10)
    assert time_goodput([robbed], 100) == pytest.approx(0.81)
    assert token_goodput([robbed], 100) == pytest.approx(0.81)


def test_a_slow_region_gives_few_tokens_but_wastes_no_time():
    fast = Effort(worked=100, trained=1000, useful=1000, applied=1000, pace=10)
    slow = Effort(worked=50, trained=50, useful=50, applied=50, pace=1)
    found = goodputs([fast, slow], elapsed=100, contributions=6, chances=8)
    assert found.time == pytest.approx(0.75), "regions count alike"
    assert found.tokens == pytest.approx(1050 / 1100), "tokens count alike"
    assert found.participation == pytest.approx(0.75)


def test_a_member_that_gives_nothing_lowers_all_three():
    here = Effort(worked=100, trained=1000, useful=1000, applied=1000, pace=10)
    found = goodputs([here, Effort()], elapsed=100, contributions=4, chances=8)
    assert found.plain() == {"time": 0.5, "tokens": 0.5, "participation": 0.5}


def test_a_region_counts_for_as_long_as_it_was_a_member():
    always = Effort(worked=100, trained=1000, useful=1000, applied=1000, pace=10)
    visitor = Effort(worked=20, trained=400, useful=400, applied=400, pace=20, present=25)
    found = goodputs([always, visitor], elapsed=100, contributions=5, chances=5)
    assert found.time == pytest.approx(120 / 125)
    assert found.tokens == pytest.approx(1400 / (1000 + 20 * 25))
    assert found.participation == 1.0


def test_nothing_is_known_before_anything_happened():
    nothing = goodputs([Effort(), Effort()], elapsed=0, contributions=0, chances=0)
    assert set(nothing.plain().values()) == {None}
    shown = prometheus_text(make_status(goodputs={"time": 0.9, "tokens": 0.8}))
    assert "diloco_goodput_time_ratio 0.9" in shown and "diloco_goodput_tokens_ratio 0.8" in shown
    assert "\ndiloco_participation_ratio " not in shown


def test_the_example_in_the_docs_is_right():
    fast = Effort(worked=100, trained=1000, useful=1000, applied=950, pace=10)
    slow = Effort(worked=80, trained=80, useful=70, applied=70, pace=1)
    found = goodputs([fast, slow], elapsed=100, contributions=7, chances=8)
    assert {name: round(100 * (share or 0)) for name, share in found} == {
        "time": 85,
        "tokens": 93,
        "participation": 88,
    }


def test_a_pace_from_slow_first_steps_makes_no_share_larger_than_the_whole():
    hurried = Effort(worked=5, trained=100, useful=100, applied=100, pace=2)
    slow = Effort(worked=5, trained=10, useful=10, applied=10, pace=2)
    assert token_goodput([hurried, slow], 10) == pytest.approx(110 / (100 + 20))
