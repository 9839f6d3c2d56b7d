"""A process that dies is started again, soon, then less soon; one that cannot be cured is not."""

import sys

import pytest

from diloco_cli.launch import Role
from diloco_cli.launch.subprocesses import LocalLauncher
from diloco_cli.launch.supervise import Patience, Supervisor

CODE = "import sys; sys.stderr.write(sys.argv[2]); sys.exit(int(sys.argv[1]))"


@pytest.fixture
def keeper_of(tmp_path):
    keepers = []

    def make(code, *arguments, **options):
        role = Role("left", (sys.executable, "-c", code, *arguments))
        keepers.append(Supervisor(LocalLauncher(tmp_path), role, **options))
        return keepers[-1]

    yield make
    for keeper in keepers:
        keeper.handle.kill()


def next_change(keeper, now):
    """Tends at one moment until something changes: only the child's own end is waited for."""
    while True:
        if change := keeper.tend(now=now):
            return change


def test_a_crash_is_followed_by_a_restart_after_the_delay(keeper_of):
    keeper = keeper_of(CODE, "1", "error: out of luck\n")
    keeper.start(now=0)
    died = next_change(keeper, 100)
    assert (died.what, died.code, died.why, died.delay) == ("died", 1, "out of luck", 1.0)
    assert keeper.tend(now=100.9) is None
    again = keeper.tend(now=101)
    assert again and (again.what, again.restarts) == ("restarted", 1)


def test_delays_grow_to_a_limit():
    assert [Patience().delay(n) for n in (1, 2, 3, 5, 6, 999)] == [1, 2, 4, 16, 30, 30]


def test_health_makes_earlier_failures_forgotten(keeper_of):
    keeper = keeper_of(CODE, "1", "")
    keeper.start(now=0)
    assert next_change(keeper, 1).delay == 1
    keeper.tend(now=2)
    assert next_change(keeper, 3).delay == 2
    keeper.tend(now=5)
    assert next_change(keeper, 5 + 60).delay == 1


def test_it_is_given_up_after_too_many_failures_in_a_row(keeper_of):
    keeper = keeper_of(CODE, "1", "error: again\n", patience=Patience(tries=2))
    keeper.start(now=0)
    seen = [next_change(keeper, now).what for now in (1, 2, 2, 4, 4)]
    assert seen == ["died", "restarted", "died", "restarted", "gone"]
    assert keeper.over and keeper.why == "again"


@pytest.mark.parametrize("code", [2, 5])
def test_what_another_start_cannot_cure_is_not_tried_again(keeper_of, code):
    keeper = keeper_of(CODE, str(code), "error: no region called x\n\nhint: y\n")
    keeper.start(now=0)
    change = next_change(keeper, 1)
    assert (change.what, change.code) == ("gone", code)
    assert change.why == "no region called x\nhint: y"
    assert keeper.tend(now=1e9) is None


@pytest.mark.parametrize("code", [0, 130, 143])
def test_who_leaves_of_its_own_will_is_let_go(keeper_of, code):
    keeper = keeper_of(CODE, str(code), "")
    keeper.start(now=0)
    assert next_change(keeper, 1).what == "left"
    assert keeper.state == "done" and keeper.tend(now=1e9) is None


def test_a_killed_child_comes_back(keeper_of):
    keeper = keeper_of("import time; time.sleep(600)")
    keeper.start(now=0)
    assert keeper.handle
    keeper.handle.kill()
    change = next_change(keeper, 1)
    assert change.what == "died" and "SIGKILL" in change.why
    first = keeper.handle.pid
    assert keeper.tend(now=2) and keeper.handle.pid != first


def test_who_is_retired_is_not_started_again_however_it_ends(keeper_of):
    keeper = keeper_of("import time; time.sleep(600)")
    keeper.start(now=0)
    keeper.retire()
    assert keeper.tend(now=1) is None and not keeper.over
    keeper.handle.kill()
    assert next_change(keeper, 2).what == "left" and keeper.over


def test_who_is_retired_between_two_starts_stays_away(keeper_of):
    keeper = keeper_of(CODE, "1", "")
    keeper.start(now=0)
    next_change(keeper, 1)
    keeper.retire()
    assert keeper.over and keeper.tend(now=1e9) is None


def test_who_is_moved_leaves_and_starts_again_in_its_new_role(keeper_of):
    keeper = keeper_of("import time; time.sleep(600)")
    keeper.start(now=0)
    keeper.move(Role("left", (sys.executable, "-c", CODE, "5", "error: moved\n")))
    assert next_change(keeper, 1).what == "restarted"
    assert next_change(keeper, 1).why == "moved"


def test_a_process_killed_with_sigkill_may_have_been_out_of_memory(keeper_of):
    keeper = keeper_of("import time; time.sleep(600)")
    keeper.start(now=0)
    keeper.handle.kill()
    assert next_change(keeper, 1).why == "killed by SIGKILL; out of memory, perhaps"


def test_what_is_sent_away_comes_back_when_its_time_is_over_and_is_no_failure(keeper_of):
    keeper = keeper_of("import time; time.sleep(600)")
    keeper.start(now=0)
    for begin in (10, 20, 30):
        keeper.send_away(until=begin + 5, kill=True)
        assert next_change(keeper, begin + 1).delay == 4
        assert keeper.tend(now=begin + 4.9) is None and not keeper.over
        assert next_change(keeper, begin + 5).what == "restarted"
    keeper.handle.kill()
    assert next_change(keeper, 50).delay == 1


def test_one_that_leaves_politely_comes_back_too(keeper_of):
    keeper = keeper_of("import time; time.sleep(600)")
    keeper.start(now=0)
    keeper.send_away(until=100, kill=False)
    assert next_change(keeper, 1).what == "died" and keeper.state == "waiting"
    keeper.call_back()
    assert next_change(keeper, 2).what == "restarted"


def test_whoever_is_away_when_all_is_over_is_not_started_again(keeper_of):
    keeper = keeper_of("import time; time.sleep(600)")
    keeper.start(now=0)
    keeper.send_away(until=100, kill=True)
    keeper.retire()
    assert next_change(keeper, 1).what == "left" and keeper.over
