"""The server dies at every step there is, and at any moment; nothing it said becomes untrue."""

from __future__ import annotations

import random
import re
import signal
import time

import pytest

from diloco_cli.system import failpoints
from diloco_cli.system.failpoints import POINTS, REGION_POINTS
from tests import ROOT
from tests.verify.durability.amendments import Operator, amend_and_kill
from tests.verify.durability.killable_server import Stage
from tests.verify.durability.killloop import kill_again_and_again
from tests.verify.durability.powercut import cut_again_and_again, why_not

pytestmark = pytest.mark.live

SOURCES = ROOT / "diloco_cli"
SHORT = {"kind": "folder", "journal": 1 << 12, "history": 4, "replay": 4, "reserve": 0}
SHORT |= {"whole": 2}
"""A store that compacts and prunes after a few rounds."""


def points_in_the_code() -> set[str]:
    """The names that `reach` is called with, and those made of `steps`."""
    found: set[str] = set()
    for path in SOURCES.rglob("*.py"):
        text = path.read_text()
        found |= set(re.findall(r'reach\("([a-z.]+)"\)', text))
        for steps in re.findall(r'steps="([a-z]+)"', text):
            found |= {f"{steps}.{what}" for what in ("written", "flushed", "renamed", "kept")}
    return found


def test_every_step_of_the_code_is_listed_and_every_one_listed_is_there():
    assert points_in_the_code() == {*POINTS, *REGION_POINTS}


def test_a_trap_is_set_only_where_there_is_a_point():
    for order in ("journal.writen=kill", "journal.written=explode", "journal.written=error:EWHAT"):
        with pytest.raises(ValueError, match="is no failpoint"):
            failpoints.arm(order)
    assert not failpoints._armed


def test_a_trap_waits_for_its_turn_and_unset_it_does_nothing():
    failpoints.reach("merge.done")
    failpoints.arm("merge.done=error:EIO@2")
    try:
        failpoints.reach("merge.done")
        with pytest.raises(OSError, match="Input/output error"):
            failpoints.reach("merge.done")
    finally:
        failpoints.disarm()


def test_dying_at_any_step_loses_nothing_and_doubles_nothing(tmp_path):
    server = {"listen": "127.0.0.1:0", "lease": 30.0, "store": SHORT}
    stage = Stage(tmp_path / "run", server=server)
    operator = Operator(stage, random.Random(1))
    try:
        stage.start()
        stage.add_clients()
        stage.until_accepted(8)
        stage.kill()
        stage.check()
        for number, point in enumerate(POINTS):
            while point == "start.made" and not stage.unstored:
                stage.start()
                stage.until_accepted(2)
                stage.kill()
                stage.check()
            # Not always the first time it is reached: the files of a version may be two.
            amends = point == "amendment.recorded"
            times = 1 if "start" in point or amends else 1 + number % 2
            stage.start(failpoint=f"{point}=kill@{times}")
            while amends and operator.send():
                pass  # One that changes nothing is answered at once.
            assert stage.died() == -signal.SIGKILL, f"{point} was not reached"
            stage.check()
            operator.check()
        stage.start()
        stage.wait(operator.send)
        stage.until_accepted(8)
        stage.kill()
        found = stage.check()
        assert found.base > 0 and all(line.made for line in found.lines)
    finally:
        stage.close()


def test_killed_at_any_moment_the_server_comes_back_with_all_it_said(tmp_path):
    seen = kill_again_and_again(tmp_path / "run", 4, seed=time.time_ns() % 1000, cold_every=4)
    assert seen["kills"] == 4 and seen["acknowledged"] >= 8 and len(seen["starts"]) == 1
    assert seen["made_again"] > 0


def test_a_run_that_is_amended_and_killed_keeps_every_amendment_once(tmp_path):
    seen = amend_and_kill(tmp_path / "run", 6, 3, seed=time.time_ns() % 1000)
    assert "lost 0, doubled 0" in seen and "3 kills" in seen


def test_a_power_cut_takes_nothing_that_was_acknowledged(tmp_path):
    if why := why_not():
        pytest.skip(why)
    said = cut_again_and_again(tmp_path, 2, seed=time.time_ns() % 1000)
    assert said.startswith("2 power cuts")
