"""`diloco bench recovery` kills a real trainer and reads from the run log what that took."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from diloco_cli.bench.recovery import GOAL_SECONDS, figures


@pytest.mark.long
def test_a_killed_trainer_is_timed_from_its_death_to_the_next_step():
    command = "bench recovery --kills 1 --model smoke --format json"
    done = subprocess.run(
        [sys.executable, "-m", "diloco_cli", *command.split()],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    found = {each["name"]: each for each in json.loads(done.stdout)["figures"]}
    [kill] = found["recovery p95"]["kills"]
    parts = sum(kill[part] for part in ("detect", "start", "fetch", "compile"))
    assert 0 < parts <= kill["total"] + 0.05, (
        "the clock of a process ticks a hundred times a second"
    )
    assert found["recovery p50"]["value"] == found["recovery max"]["value"] == kill["total"]


def test_the_figures_name_the_goal_and_whether_it_was_met():
    kinds = ("detect", "start", "fetch", "compile", "lost")
    quick = dict.fromkeys(kinds, 1.0) | {"total": 2.0}
    slow = quick | {"total": 9.0, "lost": 64.0}
    told = {each.name: each for each in figures([quick] * 19 + [slow], limit=0.5)}
    assert told["recovery p95"].value == 2.0 and told["recovery p95"].met
    assert told["recovery p95"].goal == GOAL_SECONDS
    assert told["recovery max"].value == 9.0 and told["recovery p50"].ratio == 4.0
    told = {each.name: each for each in figures([quick, slow], limit=0.5)}
    assert not told["recovery p95"].met and told["tokens lost p95"].value == 64.0
