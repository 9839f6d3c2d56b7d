"""When does a trainer speak up?"""

from __future__ import annotations

from tests.worker.trainer.harness import steps


def test_every_few_steps_and_at_once_when_a_fragment_has_enough_for_a_round(play):
    """Four make a round; every second step alone would say so one too late."""
    stage, trainer = play()
    told = []
    for _ in range(7):
        steps(trainer, 1)
        told.append(stage.mailbox.progress().step)
    assert told == [1, 1, 3, 4, 4, 6, 6]
