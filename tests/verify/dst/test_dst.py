"""The server keeps its promises on its bad days, and a bad day can be had again.

This is the short version; `make dst` plays thousands of seeds, every step of the disk and
every planted defect. A failure names its seed:
`python -m tests.verify.dst.explore --from SEED --trace`.
"""

from collections import Counter

import pytest

from diloco_cli.core.journal_records import RunEnded, RunFinished
from tests.verify.dst.bugs import BUGS
from tests.verify.dst.explore import attempt, find, main
from tests.verify.dst.run_seed import play
from tests.verify.dst.seeded_run import silenced, swept
from tests.verify.dst.silent_regions import Silence

RUNS = 40

PATIENCE = 60
"""Seeds within which each of these planted defects must show; `make dst` looks for all."""

QUICK = (
    "ack-before-journal",
    "amended-again",
    "lane-handed-out-twice",
    "name-forgotten",
    "nobody-waited-for",
    "names-not-flushed",
    "payloads-dropped-early",
    "retries-forgotten",
    "version-not-flushed",
)


def test_no_promise_breaks_and_everything_really_happens():
    sums = Counter()
    for seed in range(RUNS):
        outcome = attempt(seed)
        assert not outcome.problem, f"python -m tests.verify.dst.explore --from {seed} --trace"
        sums.update(outcome.count)
    happened = ("kills", "power cuts", "versions", "acknowledged", "lost", "twice", "EIO")
    members = ("joined unlisted", "retired", "removed", "lanes moved")
    for kind in (*happened, "amended", *members):
        assert sums[kind] > 0, kind


@pytest.mark.parametrize("step", range(7, 140, 19))
@pytest.mark.parametrize("power", [False, True])
def test_the_server_may_die_at_any_step_of_its_disk(step, power):
    outcome = play(step, swept(step, power=power))
    assert not outcome.problem
    assert outcome.count["kills"] + outcome.count["power cuts"] == 2


@pytest.mark.parametrize("bug", QUICK)
def test_a_planted_defect_is_found_and_replays_from_its_seed(bug):
    found = find(bug, PATIENCE)
    assert found, BUGS[bug].says
    again = attempt(found.seed, bug)
    assert (again.problem, again.trace) == (found.problem, found.trace)
    assert not attempt(found.seed).problem, "and only with the defect"


def test_a_run_is_the_same_every_time():
    first, again = attempt(11), attempt(11)
    assert first.trace == again.trace
    assert len(first.trace) > 200


def test_the_explorer_names_the_seed_that_broke(capsys):
    assert main(["--seeds", "1", "--bug", "version-without-files"]) == 1
    said = capsys.readouterr().out
    assert "replay: python -m tests.verify.dst.explore --from 0 --bug version-without-files" in said


def test_the_explorer_shows_every_step_of_a_run(capsys):
    assert main(["--from", "0", "--trace"]) == 0
    said = capsys.readouterr().out
    assert "fsync file=server/journal" in said
    assert "1 of 1 runs, 0 broken" in said


def test_a_region_that_sleeps_through_the_end_is_waited_for_two_leases_and_no_longer():
    outcomes = [play(number, silenced(number)) for number in (12, 24, 36)]
    assert not any(outcome.problem for outcome in outcomes)
    assert {outcome.count["excused"] for outcome in outcomes} == {0, 1}
    assert find("one-lease-waited")


def test_only_silence_of_two_leases_after_the_end_excuses_a_region():
    why = "token budget reached; not waited for: paris"

    def excused(heard: float, finished: float, why: str = why) -> set[str]:
        silence = Silence(5.0)
        silence.opened(now=1.0)
        silence.heard("paris", at=heard)
        silence.recorded(RunEnded("budget reached"), now=20.0)
        silence.recorded(RunFinished(why), now=finished)
        return silence.excused

    assert excused(heard=18.0, finished=30.0) == {"paris"}
    assert excused(heard=18.0, finished=29.9) == set()
    assert excused(heard=21.0, finished=30.5) == set()
    assert excused(heard=18.0, finished=30.0, why="token budget reached") == set()
