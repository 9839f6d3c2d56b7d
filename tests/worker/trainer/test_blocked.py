"""How much of its time does a trainer lose to the exchange?"""

from __future__ import annotations

import pytest

from diloco_cli.observe.metrics import blocked_share
from diloco_cli.worker.trainer.mail import LOOK_SECONDS


def test_a_share_of_the_time_in_steps_and_between_them():
    assert blocked_share(2.0, 98.0) == pytest.approx(0.02)
    assert blocked_share(1.0, 0.0) is None


def test_waiting_for_a_version_counts_and_the_next_trainer_goes_on_counting(play, tasks):
    stage, trainer = play(overlap=0)
    trainer._wait("waiting for fragment 1 (overlap 0)")
    assert trainer.averages.blocked >= LOOK_SECONDS / 2
    trainer.report()
    before = stage.mailbox.progress().blocked
    trainer.close()
    again = stage.trainer(tasks(overlap=0))
    again.boundary()
    again.report()
    assert stage.mailbox.progress().blocked >= before > 0


def test_waiting_for_the_end_of_the_run_does_not_count(play):
    _, trainer = play()
    trainer.ended = True
    trainer._wait("drained, waiting for the others")
    assert trainer.averages.blocked == 0
