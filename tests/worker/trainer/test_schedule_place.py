"""The place in the schedule is the run's, also for late joiners and slow regions."""

from __future__ import annotations

import pytest

from diloco_cli.worker.trainer.schedule_place import SchedulePlace
from diloco_cli.worker.trainer.task import horizon
from tests.spec.short_spec import GOOD, loaded


def walk(place: SchedulePlace, steps: int) -> list[int]:
    places = []
    for _ in range(steps):
        places.append(place.next)
        place.stepped()
    return places


def test_without_a_word_every_step_is_one_place():
    assert walk(SchedulePlace(100), 5) == [0, 1, 2, 3, 4]
    assert walk(SchedulePlace(100, 40), 3) == [40, 41, 42]
    assert walk(SchedulePlace(3), 6) == [0, 1, 2, 3, 3, 3], "the end is the end"


def test_a_region_that_joins_late_begins_where_the_run_is():
    late = SchedulePlace(1000)
    late.hear(0.75)
    assert walk(late, 3) == [750, 751, 752]


def test_the_place_never_goes_back():
    place = SchedulePlace(1000)
    place.hear(0.5)
    ahead = walk(place, 20)[-1]
    place.hear(0.505)  # Others died: less is trained than expected.
    assert place.next >= ahead
    assert walk(place, 3) == [520, 520, 520], "it waits until the run has come there"
    place.hear(0.6)
    assert place.next == 600


@pytest.mark.parametrize("worth", [0.5, 4.0])
def test_a_slow_region_moves_on_by_what_its_steps_are_worth_to_the_run(worth):
    """Heard every tenth step; between two words it goes on at the pace of the run."""
    place, horizon, off = SchedulePlace(4000), 4000, []
    for step in range(600):
        if step % 10 == 0:
            place.hear(min(1.0, step * worth / horizon))
        if step > 100:
            off.append(abs(place.next - step * worth))
        place.stepped()
    assert max(off) <= 2


def test_the_horizon_is_the_same_for_all_and_knows_no_speed():
    text = GOOD.replace("{name: paris}", "{name: paris, speed: 0.25, inner: {batch: 4}}")
    spec = loaded(text)
    assert horizon(spec) == round(4_000_000 / (4 * 128 + 16 * 128))
