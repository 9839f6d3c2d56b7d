"""A region that is slowed down keeps a pace: on average exactly, and never a faster one."""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest

from diloco_cli.worker.trainer.pacing import StepPacing


def played(tempo: StepPacing, works: list[float], *, late: float = 0.0) -> list[float]:
    """When steps of these lengths begin, if one may begin `late` seconds after it is due."""
    now, found = 1000.0, []
    for work in works:
        now = max(now, tempo.due + late)
        found.append(now)
        now += work
        tempo.stepped(found[-1], now)
    return found


def gaps(times: list[float]) -> list[float]:
    return [after - before for before, after in itertools.pairwise(times)]


def test_paced_steps_begin_on_a_grid_and_being_late_adds_nothing_up():
    times = played(StepPacing(speed=1.0, pace=0.25, slow=None), [0.1] * 400, late=0.003)
    assert times[-1] - times[0] == pytest.approx(399 * 0.25, abs=0.01)


def test_speed_divides_the_pace():
    times = played(StepPacing(speed=0.5, pace=0.25, slow=None), [0.1] * 10)
    assert gaps(times) == pytest.approx([0.5] * 9)


def test_a_step_that_took_too_long_is_made_up_for_once_and_no_more():
    works = [0.1, 2.0, *[0.01] * 20]
    times = played(StepPacing(speed=1.0, pace=0.25, slow=None), works)
    assert sum(gap < 0.24 for gap in gaps(times)) == 1


def test_nobody_steps_faster_than_the_pace_whatever_happens():
    chance = random.Random(1)
    works = [chance.expovariate(10) for _ in range(1000)]
    times = played(StepPacing(speed=1.0, pace=0.25, slow=None), works)
    for first in range(0, 900, 50):
        assert times[first + 100] - times[first] >= 99 * 0.25 - 1e-6


def test_after_standing_still_the_grid_begins_anew():
    tempo = StepPacing(speed=1.0, pace=0.25, slow=None)
    tempo.stepped(10.0, 10.1)
    tempo.paused()
    assert tempo.due == 0.0
    tempo.stepped(20.0, 20.1)
    assert tempo.due == 20.25


def test_without_a_pace_only_a_slow_region_pauses():
    quick, slow = (StepPacing(speed=speed, pace=None, slow=None) for speed in (1.0, 0.25))
    assert not quick.measures and slow.measures
    for tempo in (quick, slow):
        tempo.stepped(10.0, 10.2)
    assert quick.due == 10.2 and slow.due == pytest.approx(10.8)


@pytest.mark.parametrize("pace", [None, 0.25])
def test_a_slow_fault_stretches_steps_while_its_file_is_there(tmp_path: Path, pace: float | None):
    file = tmp_path / "slow"
    tempo = StepPacing(speed=1.0, pace=pace, slow=file)
    assert gaps(played(tempo, [0.25] * 5)) == pytest.approx([0.25] * 4)
    file.write_text("4\n")
    # The step under way ends as it began.
    assert gaps(played(tempo, [0.25] * 6))[1:] == pytest.approx([1.0] * 4)
    file.unlink()
    assert gaps(played(tempo, [0.25] * 6))[1:] == pytest.approx([0.25] * 4)
