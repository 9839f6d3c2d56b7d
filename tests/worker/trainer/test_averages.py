"""What a trainer knows of its own pace."""

import pytest

from diloco_cli.worker.trainer.checkpoints.checkpoint import LONGEST, SHORTEST, interval
from diloco_cli.worker.trainer.progress import SUSTAINED, TrainingAverages


def steps(meter: TrainingAverages, count: int, seconds: float, *, now: float = 0.0) -> float:
    for _ in range(count):
        now += seconds
        meter.stepped(10.0, now=now)
    return now


def test_the_pace_is_the_best_that_was_kept_up():
    meter = TrainingAverages(now=0.0)
    now = steps(meter, 2, 1.0)
    assert meter.pace == pytest.approx(10.0), "the only pace it knows"
    now = steps(meter, int(SUSTAINED), 1.0, now=now)
    now = steps(meter, 3, 0.1, now=now)  # A lucky moment.
    now = steps(meter, int(SUSTAINED), 2.0, now=now)
    assert meter.pace == pytest.approx(10.0)
    steps(meter, int(4 * SUSTAINED), 0.5, now=now)
    assert meter.pace == pytest.approx(20.0)


def test_only_time_in_steps_counts_as_worked():
    meter = TrainingAverages(now=0.0)
    now = steps(meter, 5, 1.0)
    assert meter.worked == pytest.approx(4.0), "the first step has no beginning"
    meter.paused()
    steps(meter, 3, 1.0, now=now + 100)
    assert meter.worked == pytest.approx(6.0)


def test_checkpoints_come_as_often_as_they_are_cheap():
    assert interval(0.0, 0.0) == interval(0.001, 0.004) == SHORTEST
    assert interval(0.01, 0.03) == pytest.approx(8.0)
    assert interval(0.1, 3.0) == LONGEST, "never rarer than a model of any size can bear"
    assert interval(2.0, 9.0) == pytest.approx(100.0), "but it does not stop the training"
