"""The server keeps its promises on its bad days, and a bad day can be had again.

This is the short version; `make dst` plays thousands of seeds, every step of the disk and
every planted defect. A failure names its seed: `python -m tests.dst.explore --from SEED --trace`.
"""

from collections import Counter

import pytest

from .bugs import BUGS, planted
from .explore import attempt, main
from .play import play
from .setting import swept

RUNS = 24

KNOWN = {
    "ack-before-journal": 12,
    "journal-not-flushed": 1,
    "names-not-flushed": 1,
    "version-not-flushed": 1,
    "payloads-dropped-early": 4,
    "retries-forgotten": 19,
}
"""Seeds in which these defects are known to show; `make dst` looks for all of them."""


def test_no_promise_breaks_and_everything_really_happens():
    sums = Counter()
    for seed in range(RUNS):
        outcome = attempt(seed)
        assert not outcome.problem, f"python -m tests.dst.explore --from {seed} --trace"
        sums.update(outcome.count)
    for kind in ("kills", "power cuts", "versions", "acknowledged", "lost", "twice", "EIO"):
        assert sums[kind] > 0, kind


@pytest.mark.parametrize("step", range(7, 140, 19))
@pytest.mark.parametrize("power", [False, True])
def test_the_server_may_die_at_any_step_of_its_disk(step, power):
    outcome = play(step, swept(step, power=power))
    assert not outcome.problem
    assert outcome.count["kills"] + outcome.count["power cuts"] == 2


@pytest.mark.parametrize("bug", KNOWN)
def test_a_planted_defect_is_found_and_replays_from_its_seed(bug):
    first, again = attempt(KNOWN[bug], bug), attempt(KNOWN[bug], bug)
    assert first.problem, BUGS[bug].says
    assert (again.problem, again.trace) == (first.problem, first.trace)
    assert not attempt(KNOWN[bug]).problem


def test_a_run_is_the_same_every_time():
    first, again = attempt(11), attempt(11)
    assert first.trace == again.trace
    assert len(first.trace) > 200


def test_a_planted_defect_is_gone_with_its_context():
    with planted("ack-before-journal"):
        pass
    assert not attempt(KNOWN["ack-before-journal"]).problem


def test_the_explorer_names_the_seed_that_broke(capsys):
    seed = KNOWN["retries-forgotten"]
    assert main(["--from", str(seed), "--bug", "retries-forgotten"]) == 1
    said = capsys.readouterr().out
    assert f"replay: python -m tests.dst.explore --from {seed} --bug retries-forgotten" in said


def test_the_explorer_shows_every_step_of_a_run(capsys):
    assert main(["--from", "0", "--trace"]) == 0
    said = capsys.readouterr().out
    assert "fsync file=server/journal" in said
    assert "1 of 1 runs, 0 broken" in said
