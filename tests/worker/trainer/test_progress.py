"""When does a trainer speak up?"""

from __future__ import annotations

import pytest

from tests.worker.trainer.harness import steps


def test_every_few_steps_and_at_once_when_a_fragment_has_enough_for_a_round(play):
    """Four make a round; every second step alone would say so one too late."""
    stage, trainer = play()
    steps(trainer, 1)
    trainer.report()
    told = []
    for _ in range(6):
        steps(trainer, 1)
        told.append(stage.mailbox.progress().step)
    assert told == [1, 3, 4, 4, 6, 6]


def test_what_a_device_gives_follows_from_the_pace_and_the_shapes(play):
    stage, trainer = play()
    steps(trainer, 3)
    trainer.report()
    said, task = stage.mailbox.progress(), trainer.task
    per_token = task.model.step_flops(task.inner.batch, task.inner.sequence) / task.tokens
    assert said.tflops == pytest.approx(said.tokens_per_second * per_token / 1e12)
    assert said.tflops > 0 and said.devices == 1
    assert said.mfu is None, "what a processor can do at best is not known"
