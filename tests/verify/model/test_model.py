"""The protocol keeps its promises whatever dies, and needs every one of its rules.

This is the short version; `make model` plays thousands of runs and every crash point.
A failure names the run: `python -m tests.verify.model.explore` replays it with those arguments.
"""

import pytest

from tests.verify.model.explore import attempt, crash_points, main, random_runs, schedule
from tests.verify.model.rules import RULES
from tests.verify.model.seeded_run import SCHEDULES, drawn, fixed

RUNS = 240
CHUNK = 40
PATIENCE = 80
"""Runs in which a rule that is off must show."""


@pytest.mark.parametrize("first", range(0, RUNS, CHUNK))
def test_no_promise_breaks_in_random_runs(first):
    broken = {how: str(run.violation) for how, run in random_runs(first, CHUNK) if run.violation}
    assert not broken


@pytest.mark.parametrize("name", SCHEDULES)
def test_no_promise_breaks_when_one_process_dies_at_any_of_these_points(name):
    runs = list(crash_points(name, step=13))
    assert not {how: str(run.violation) for how, run in runs if run.violation}
    assert all(run.stats["server"] + run.stats["agent"] + run.stats["trainer"] for _, run in runs)


@pytest.mark.parametrize("rule", RULES)
def test_each_rule_is_needed(rule):
    """Some run that goes well breaks a promise as soon as the rule is gone."""
    for seed in range(PATIENCE):
        without = attempt(schedule(seed, off=rule), off=rule).violation
        seen = without is not None and without.kind in RULES[rule].breaks
        if seen and attempt(schedule(seed, off=rule)).violation is None:
            return
    pytest.fail(f"{PATIENCE} runs without the rule {rule!r} broke nothing")


def test_a_run_can_be_played_again():
    first, again = (attempt(drawn(seed=7)) for _ in range(2))
    assert (first.stats, first.points) == (again.stats, again.points)


def test_the_faults_really_happen():
    sums = sum((run.stats for _, run in random_runs(1, 60)), start=attempt(drawn(0)).stats)
    kinds = ("server", "agent", "trainer", "pause", "cut", "leave", "lose", "restore", "rival")
    members = ("arrived", "forgotten", "removed", "silent lanes")
    assert all(sums[kind] > 0 for kind in (*kinds, *members, "dropped"))


def test_a_fixed_schedule_crashes_exactly_once():
    outcome = attempt(fixed("rebase", crash_at=100))
    assert sum(outcome.stats[kind] for kind in ("server", "agent", "trainer")) == 1


def test_the_explorer_names_the_run_that_broke(capsys):
    assert main(["--seeds", "20", "--rule-off", "subtract when adopting"]) == 1
    assert '--seeds 1 --start 0 --rule-off "subtract when adopting"' in capsys.readouterr().out


def test_the_explorer_is_content_with_runs_that_end_well(capsys):
    assert main(["--seeds", "3"]) == 0
    assert "3 runs" in capsys.readouterr().out
